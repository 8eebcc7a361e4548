"""JSON files of a run: lines added one by one, lines that are whole, records. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer_rank.errors import TrainingError


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """Add a record as one line.

    Raises:
        TrainingError: The file cannot be written.
    """
    line = json.dumps(record, separators=(",", ":"), allow_nan=False)
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    except OSError as error:
        raise _stopped(path, error) from error


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record as the whole file, indented for people.

    Raises:
        TrainingError: The file cannot be written.
    """
    text = json.dumps(record, indent=2, allow_nan=False) + "\n"
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _stopped(path, error) from error


def whole_lines(path: Path) -> list[bytes]:
    """Return the lines of a file without a last one that was cut off; none when there is no file."""
    if not path.is_file():
        return []
    return path.read_bytes().split(b"\n")[:-1]


def _stopped(path: Path, error: OSError) -> TrainingError:
    return TrainingError(
        f"{path}: cannot be written ({error.strerror}), so the run stops; make room there, then continue from the last "
        "checkpoint with --resume"
    )
