"""Reading data of every format from JSON Lines and Parquet: all of it, or line by line with the faults of each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer_rank.errors import DataError
from trainer_rank.training.formats import Words, token_entries
from trainer_rank.training.messages import Where
from trainer_rank.training.parquet import parquet_rows
from trainer_rank.training.rollouts import Limits, Rollout, parse_line, raw_lines, rollout_of


def read_data(path: Path, limits: Limits | None = None, words: Words | None = None) -> list[Rollout]:
    """Return the rollouts of a data file, in file order; at least one.

    Args:
        path: Parquet by its suffix ``.parquet``, JSON Lines else.
        limits: What model and loss demand of every line.
        words: Tokenizer for lines that hold words.

    Raises:
        DataError: The file cannot be read or holds no request, or a line is malformed; the first fault of the file.
        ConfigError: A line holds words and there is no tokenizer, or pyarrow is not installed.
    """
    rollouts = []
    for found in scan_data(path, limits, words):
        if isinstance(found, DataError):
            raise found
        rollouts.append(found)
    if not rollouts:
        raise DataError("holds no request; write one JSON document per line, or one row per request", path=path)
    return rollouts


def scan_data(path: Path, limits: Limits | None = None, words: Words | None = None) -> Iterator[Rollout | DataError]:
    """Yield for each line of a data file its rollout, or what is wrong with it.

    Raises:
        DataError: The file as a whole cannot be read.
        ConfigError: As ``read_data``.
    """
    chosen = limits if limits is not None else Limits()
    source = words if words is not None else Words()
    if path.suffix == ".parquet":
        for number, entries in enumerate(parquet_rows(path), start=1):
            yield _checked(path, number, entries, chosen, source)
        return
    for number, raw in raw_lines(path):
        try:
            entries = parse_line(path, number, raw)
        except DataError as error:
            yield error
            continue
        yield _checked(path, number, entries, chosen, source)


def _checked(path: Path, number: int, entries: dict[str, Any], limits: Limits, words: Words) -> Rollout | DataError:
    try:
        return rollout_of(path, number, token_entries(Where(path=path, line=number), entries, words), limits)
    except DataError as error:
        return error
