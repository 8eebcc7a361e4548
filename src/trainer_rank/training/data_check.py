"""A data file, checked to its end: all faults, and a summary of the lines that have none. Imports no torch itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainer_rank.errors import DataError
from trainer_rank.training.data_files import scan_data
from trainer_rank.training.data_summary import DataSummary, summarise
from trainer_rank.training.formats import Words
from trainer_rank.training.rollouts import Limits, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class DataReport:
    """What a check found.

    Attributes:
        path: The file.
        faults: The first faults, in file order, one per line that has one.
        num_faults: Faults in all.
        summary: Of the lines without a fault; None when there is none.
    """

    path: Path
    faults: tuple[DataError, ...]
    num_faults: int
    summary: DataSummary | None


def check_data(path: Path, limits: Limits, words: Words, *, most_faults: int) -> DataReport:
    """Return what is wrong with ``path`` and what it holds; at most ``most_faults`` faults are kept.

    Raises:
        DataError: The file as a whole cannot be read.
        ConfigError: A line holds words and there is no tokenizer, or pyarrow is not installed.
    """
    rollouts: list[Rollout] = []
    faults: list[DataError] = []
    count = 0
    for found in scan_data(path, limits, words):
        if isinstance(found, Rollout):
            rollouts.append(found)
            continue
        count += 1
        if count <= most_faults:
            faults.append(found)
    if not rollouts and not count:
        count, faults = 1, [DataError("holds no request; write one JSON document per line or row", path=path)]
    return DataReport(
        path=path, faults=tuple(faults), num_faults=count, summary=summarise(rollouts) if rollouts else None
    )
