"""What a display is told during a run. The loop knows this interface and no display."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from trainer_rank.training.records import ComparisonRecord, EvaluationRecord, RunSummary, StepRecord


class Progress(Protocol):
    """Told of everything that happens in a run, in order; must not raise."""

    def loading(self, *, requests: int, model: str) -> None:
        """The data are read and valid; the model is loaded and tested next."""

    def started(self, *, steps: int, packed_rows: int, budget_bytes: int, run_folder: Path) -> None:
        """The model is loaded; ``packed_rows`` is the whole run's, with every shared prefix counted once."""

    def note(self, message: str) -> None:
        """Something a person should know: where a run goes on, what changed, where a checkpoint is."""

    def advanced(self, *, step: int, packed_rows: int) -> None:
        """A pass of ``packed_rows`` rows went forward and backward."""

    def stepped(self, record: StepRecord) -> None:
        """An optimizer step is complete."""

    def evaluated(self, record: EvaluationRecord) -> None:
        """An evaluation is complete."""

    def comparing(self, *, requests: int) -> None:
        """A comparison with one-by-one training begins."""

    def compared(self, record: ComparisonRecord) -> None:
        """A comparison with one-by-one training is complete."""

    def finished(self, summary: RunSummary, *, run_folder: Path) -> None:
        """The run is complete and its folder written."""


class Silent:
    """A progress that says nothing."""

    def loading(self, *, requests: int, model: str) -> None: ...
    def started(self, *, steps: int, packed_rows: int, budget_bytes: int, run_folder: Path) -> None: ...
    def note(self, message: str) -> None: ...
    def advanced(self, *, step: int, packed_rows: int) -> None: ...
    def stepped(self, record: StepRecord) -> None: ...
    def evaluated(self, record: EvaluationRecord) -> None: ...
    def comparing(self, *, requests: int) -> None: ...
    def compared(self, record: ComparisonRecord) -> None: ...
    def finished(self, summary: RunSummary, *, run_folder: Path) -> None: ...
