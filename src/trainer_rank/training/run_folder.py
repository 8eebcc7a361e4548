"""The folder a run leaves behind.

    <run_dir>/001/
        config.yaml         the configuration with every default filled in
        environment.json    versions, hardware and threads; no host name, no path
        learned.json        what was known of memory when the run began
        decisions.jsonl     one line per admission decision
        steps.jsonl         one line per optimizer step
        evaluations.jsonl   one line per evaluation, when there is evaluation data
        plans.jsonl         how each step was split
        checkpoints/        what a run goes on from (``training/checkpoint.py``)
        summary.json        the run in one record, written last
        adapter/            the trained adapter
        tensorboard/        figures for TensorBoard, when it is asked for
        interrupted/        what was cut off the files above when the run went on from a checkpoint, by resumption

Lines are flushed as they are written, so a run that dies leaves everything up to its death.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from trainer_rank.errors import ConfigError
from trainer_rank.training.config import TrainConfig
from trainer_rank.training.environment import environment
from trainer_rank.training.line_file import append_line, whole_lines, write_record
from trainer_rank.training.load_config import dump_config
from trainer_rank.training.records import EvaluationRecord, RunSummary, StepRecord

CONTENTS: Final = {
    "config.yaml": "the configuration with every default filled in",
    "environment.json": "versions, hardware and threads",
    "learned.json": "what was known of memory when the run began",
    "decisions.jsonl": "one line per admission decision",
    "steps.jsonl": "one line per optimizer step",
    "evaluations.jsonl": "one line per evaluation",
    "plans.jsonl": "how each step was split",
    "checkpoints": "what a run goes on from",
    "summary.json": "the run in one record",
    "adapter": "the trained adapter",
}

ON_OCCASION: Final = {
    "tensorboard": "figures for TensorBoard",
    "interrupted": "what was cut off when the run went on from a checkpoint",
}

LINE_FILES: Final = ("decisions.jsonl", "steps.jsonl", "evaluations.jsonl")
"""What a resumed run goes on writing from where it was at the checkpoint."""


class RunFolder:
    """A new, numbered folder under ``run_dir``; its path is ``path``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # Decisions of earlier processes: a rank numbers its own from 1.
        self._decisions = 0
        self.reopen()

    @classmethod
    def create(cls, config: TrainConfig, *, threads: int) -> RunFolder:
        """Return a new folder with the configuration and the environment written.

        Raises:
            ConfigError: ``run_dir`` cannot be written.
        """
        parent = Path(config.run_dir)
        try:
            parent.mkdir(parents=True, exist_ok=True)
            path = next_number(parent)
            (path / "config.yaml").write_text(dump_config(config), encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"run_dir: cannot write to {config.run_dir!r} ({error.strerror}); name another"
            ) from error
        folder = cls(path)
        folder._write("environment.json", environment(threads=threads))
        return folder

    def reopen(self) -> None:
        """Number decisions on from those in the folder; to be called when they were cut back."""
        self._decisions = max((json.loads(line)["decision"] for line in self._lines("decisions.jsonl")), default=0)

    def learned(self, values: Mapping[str, Any]) -> None:
        """Write what is known of memory as the run begins."""
        self._write("learned.json", values)

    def decision(self, record: Mapping[str, Any]) -> None:
        """Append one admission decision."""
        self._append("decisions.jsonl", {**record, "decision": record["decision"] + self._decisions})

    def step(self, record: StepRecord) -> None:
        """Append one optimizer step."""
        self._append("steps.jsonl", asdict(record))

    def evaluation(self, record: EvaluationRecord) -> None:
        """Append one evaluation."""
        self._append("evaluations.jsonl", asdict(record))

    def summary(self, record: RunSummary) -> None:
        """Write the run's summary."""
        self._write("summary.json", asdict(record))

    def contents(self) -> dict[str, str]:
        """Return what is in the folder and what it means, by name, in reading order."""
        known = {**CONTENTS, **ON_OCCASION}
        return {name: meaning for name, meaning in known.items() if (self.path / name).exists()}

    def steps(self) -> list[StepRecord]:
        """Return the steps written so far."""
        return [StepRecord(**json.loads(line)) for line in self._lines("steps.jsonl")]

    def evaluations(self) -> list[EvaluationRecord]:
        """Return the evaluations written so far."""
        return [EvaluationRecord(**json.loads(line)) for line in self._lines("evaluations.jsonl")]

    def lengths(self) -> dict[str, int]:
        """Return the bytes of each file of lines, forced onto the disk: to where a later resumption cuts it back."""
        found = {}
        for name in LINE_FILES:
            if (self.path / name).is_file():
                with (self.path / name).open("rb") as file:
                    os.fsync(file.fileno())
                    found[name] = os.fstat(file.fileno()).st_size
        return found

    def _lines(self, name: str) -> list[bytes]:
        return whole_lines(self.path / name)

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        append_line(self.path / name, record)

    def _write(self, name: str, record: Mapping[str, Any]) -> None:
        write_record(self.path / name, record)


def next_number(parent: Path) -> Path:
    """Create and return the folder after the highest number in use; safe against a run that starts at the same time."""
    number = max((int(entry.name) for entry in parent.iterdir() if entry.name.isdecimal()), default=0)
    while True:
        number += 1
        path = parent / f"{number:03d}"
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
