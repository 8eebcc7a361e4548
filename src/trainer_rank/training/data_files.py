"""Reading data of every format from JSON Lines and Parquet: all of it, or line by line with the faults of each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer_rank.errors import ConfigError, DataError
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
        ConfigError: A line holds words and there is no tokenizer, pyarrow is not installed, or ``words.train_on`` is
            ``last`` and the file holds no conversation whose messages it could tell apart.
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
    lines = 0
    for number, entries in _entries(path):
        lines += 1
        yield entries if isinstance(entries, DataError) else _checked(path, number, entries, chosen, source)
    if lines and source.train_on == "last" and not source.conversations:
        raise ConfigError(
            f"train_on is 'last', and {path} holds no line with messages, so it would change nothing; "
            "leave it out: token ids say themselves what is trained, and of a prompt and completion the completion is"
        )


def _entries(path: Path) -> Iterator[tuple[int, dict[str, Any] | DataError]]:
    if path.suffix == ".parquet":
        yield from enumerate(parquet_rows(path), start=1)
        return
    for number, raw in raw_lines(path):
        try:
            yield number, parse_line(path, number, raw)
        except DataError as error:
            yield number, error


def _checked(path: Path, number: int, entries: dict[str, Any], limits: Limits, words: Words) -> Rollout | DataError:
    try:
        return rollout_of(path, number, token_entries(Where(path=path, line=number), entries, words), limits)
    except DataError as error:
        return error
