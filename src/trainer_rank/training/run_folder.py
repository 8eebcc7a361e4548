"""The folder a run leaves behind.

    <run_dir>/001/
        config.yaml         the configuration with every default filled in
        environment.json    versions, hardware and threads; no host name, no path
        decisions.jsonl     one line per admission decision
        steps.jsonl         one line per optimizer step
        evaluations.jsonl   one line per evaluation, when there is evaluation data
        summary.json        the run in one record, written last
        adapter/            the trained adapter

Lines are flushed as they are written, so a run that dies leaves everything up to its death.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from trainer_rank.errors import ConfigError
from trainer_rank.training.config import TrainConfig
from trainer_rank.training.environment import environment
from trainer_rank.training.load_config import dump_config
from trainer_rank.training.records import EvaluationRecord, RunSummary, StepRecord

CONTENTS: Final = {
    "config.yaml": "the configuration with every default filled in",
    "environment.json": "versions, hardware and threads",
    "decisions.jsonl": "one line per admission decision",
    "steps.jsonl": "one line per optimizer step",
    "evaluations.jsonl": "one line per evaluation",
    "summary.json": "the run in one record",
    "adapter": "the trained adapter",
}


class RunFolder:
    """A new, numbered folder under ``run_dir``; its path is ``path``."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, config: TrainConfig, *, threads: int) -> RunFolder:
        """Return a new folder with the configuration and the environment written.

        Raises:
            ConfigError: ``run_dir`` cannot be written.
        """
        parent = Path(config.run_dir)
        try:
            parent.mkdir(parents=True, exist_ok=True)
            path = _next_number(parent)
            (path / "config.yaml").write_text(dump_config(config), encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"run_dir: cannot write to {config.run_dir!r} ({error.strerror}); name another"
            ) from error
        folder = cls(path)
        folder._write("environment.json", environment(threads=threads))
        return folder

    def decision(self, record: Mapping[str, Any]) -> None:
        """Append one admission decision."""
        self._append("decisions.jsonl", record)

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
        return {name: meaning for name, meaning in CONTENTS.items() if (self.path / name).exists()}

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        line = json.dumps(record, separators=(",", ":"), allow_nan=False)
        with (self.path / name).open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def _write(self, name: str, record: Mapping[str, Any]) -> None:
        (self.path / name).write_text(json.dumps(record, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _next_number(parent: Path) -> Path:
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
