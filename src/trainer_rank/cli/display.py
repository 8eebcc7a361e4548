"""What ``trainer-rank train`` prints: a table with a live bar for people, or JSON lines for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from trainer_rank.training.records import ComparisonRecord, EvaluationRecord, RunSummary, StepRecord
from trainer_rank.training.run_folder import RunFolder
from trainer_rank.units import format_bytes

COLUMNS: Final = (
    ("step", 4),
    ("requests", 8),
    ("logical", 8),
    ("packed", 8),
    ("ratio", 5),
    ("passes", 6),
    ("predicted", 10),
    ("observed", 10),
    ("budget", 10),
    ("trained tok/s", 13),
    ("loss", 8),
)


class Table:
    """One line per step, under it a bar over packed rows with the time that remains (on a terminal)."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console if console is not None else Console(highlight=False)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:,.0f} of {task.total:,.0f} packed tokens, about"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task: TaskID | None = None
        self._steps = 0
        self._headed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def loading(self, *, requests: int, model: str) -> None:
        """Say what is being waited for."""
        self._say(f"{requests:,} requests read; loading {model} and comparing packed with alone on this machine ...")

    def started(self, *, steps: int, packed_rows: int, budget_bytes: int, run_folder: Path) -> None:
        """Print what is about to run and start the bar."""
        self._steps = steps
        self._say(
            f"{steps} steps, {packed_rows:,} packed tokens, memory budget {format_bytes(budget_bytes)} "
            f"(all bytes of the process, weights included)"
        )
        self._task = self._bar.add_task(f"step 1/{steps}", total=packed_rows)
        self._bar.start()

    def note(self, message: str) -> None:
        """Print it."""
        self._say(message)

    def advanced(self, *, step: int, packed_rows: int) -> None:
        """Move the bar."""
        if self._task is not None:
            self._bar.update(self._task, advance=packed_rows, description=f"step {step}/{self._steps}")

    def stepped(self, record: StepRecord) -> None:
        """Print the step's line, and the table's head before the first."""
        if not self._headed:
            self._headed = True
            self._say("  ".join(name.rjust(width) for name, width in COLUMNS))
        observed = "-" if record.observed_peak_bytes is None else format_bytes(record.observed_peak_bytes)
        cells = (
            f"{record.step}/{self._steps}",
            f"{record.requests:,}",
            f"{record.logical_tokens:,}",
            f"{record.packed_rows:,}",
            f"{record.sharing_ratio:.2f}",
            f"{record.passes}",
            format_bytes(record.predicted_peak_bytes),
            observed,
            format_bytes(record.budget_bytes),
            f"{record.trained_tokens_per_second:.1f}",
            f"{record.loss:.4f}",
        )
        self._say("  ".join(cell.rjust(width) for cell, (_, width) in zip(cells, COLUMNS, strict=True)))

    def evaluated(self, record: EvaluationRecord) -> None:
        """Print the evaluation loss."""
        after = "before training" if record.step == 0 else f"after step {record.step}"
        self._say(f"evaluation {after}: loss {record.loss:.4f} on {record.trained_tokens:,} tokens")

    def comparing(self, *, requests: int) -> None:
        """Say that the same requests now run one by one."""
        self._say(f"comparing with one-by-one training on one group of {requests} requests ...")

    def compared(self, record: ComparisonRecord) -> None:
        """Print the speed-up and how equal the numbers are."""
        self._say(
            f"packed {record.packed_seconds:.1f} s, one by one {record.one_by_one_seconds:.1f} s: "
            f"{record.speed_up:.2f}x faster ({record.logical_tokens:,} tokens as {record.packed_rows:,} packed); "
            f"largest difference of a log-probability {record.logprob_difference:.1e}, "
            f"of a gradient {record.gradient_difference:.1e} (relative)"
        )

    def finished(self, summary: RunSummary, *, run_folder: Path) -> None:
        """Stop the bar; print the run's totals and what its folder holds."""
        self._bar.stop()
        self._say(
            f"done: {summary.steps} steps in {summary.seconds:.0f} s, peak resident set "
            f"{format_bytes(summary.peak_resident_bytes)} of {format_bytes(summary.budget_bytes)}, "
            "no out-of-memory error"
        )
        if summary.first_evaluation_loss is not None and summary.last_evaluation_loss is not None:
            self._say(f"evaluation loss {summary.first_evaluation_loss:.4f} -> {summary.last_evaluation_loss:.4f}")
        self._say(f"run folder: {run_folder}")
        for name, meaning in RunFolder(run_folder).contents().items():
            self._say(f"  {name:<18} {meaning}")

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, soft_wrap=True)


class JsonLines:
    """One JSON document per event on stdout; its first key is ``event``."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None: ...

    def loading(self, *, requests: int, model: str) -> None:
        """Print the event."""
        self._write("loading", {"requests": requests, "model": model})

    def started(self, *, steps: int, packed_rows: int, budget_bytes: int, run_folder: Path) -> None:
        """Print the event."""
        self._write(
            "started",
            {"steps": steps, "packed_rows": packed_rows, "budget_bytes": budget_bytes, "folder": str(run_folder)},
        )

    def note(self, message: str) -> None:
        """Print the event."""
        self._write("note", {"message": message})

    def advanced(self, *, step: int, packed_rows: int) -> None:
        """Print the event."""
        self._write("advanced", {"step": step, "packed_rows": packed_rows})

    def stepped(self, record: StepRecord) -> None:
        """Print the event."""
        self._write("step", asdict(record))

    def evaluated(self, record: EvaluationRecord) -> None:
        """Print the event."""
        self._write("evaluation", asdict(record))

    def comparing(self, *, requests: int) -> None:
        """Print the event."""
        self._write("comparing", {"requests": requests})

    def compared(self, record: ComparisonRecord) -> None:
        """Print the event."""
        self._write("comparison", asdict(record))

    def finished(self, summary: RunSummary, *, run_folder: Path) -> None:
        """Print the event."""
        self._write("finished", {**asdict(summary), "folder": str(run_folder)})

    def _write(self, event: str, fields: Mapping[str, Any]) -> None:
        sys.stdout.write(json.dumps({"event": event, **fields}, separators=(",", ":")) + "\n")
        sys.stdout.flush()
