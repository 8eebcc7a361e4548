"""What a run prints, for people and for programs."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from trainer_rank.cli.display import JsonLines, Table
from trainer_rank.training.progress import Progress
from trainer_rank.training.records import ComparisonRecord, EvaluationRecord, RunSummary, StepRecord

COMPARISON = ComparisonRecord(
    requests=4,
    logical_tokens=4_000,
    packed_rows=1_100,
    packed_seconds=5.0,
    one_by_one_seconds=15.0,
    speed_up=3.0,
    logprob_difference=1e-6,
    gradient_difference=2e-6,
)


def step(number: int) -> StepRecord:
    """Return a step with every column distinct."""
    return StepRecord(
        step=number,
        requests=13,
        logical_tokens=14_321,
        packed_rows=3_456,
        sharing_ratio=4.14,
        passes=2,
        predicted_peak_bytes=1_610_612_736,
        observed_peak_bytes=1_503_238_553,
        budget_bytes=2 * 1024**3,
        trained_tokens=261,
        trained_tokens_per_second=12.34,
        loss=0.98765,
        grad_norm=1.5,
        lr=1e-3,
        seconds=21.0,
    )


def summary() -> RunSummary:
    """Return the summary of a run of two steps."""
    return RunSummary(
        steps=2,
        seconds=42.0,
        packed_rows=6_912,
        trained_tokens=522,
        first_evaluation_loss=1.5,
        last_evaluation_loss=0.5,
        peak_resident_bytes=1_800_000_000,
        budget_bytes=2 * 1024**3,
        comparison=COMPARISON,
    )


def tell(progress: Progress, folder: Path) -> None:
    """Tell a display a whole run."""
    (folder / "steps.jsonl").touch()
    progress.loading(requests=26, model="m")
    progress.started(steps=2, packed_rows=6_912, budget_bytes=2 * 1024**3, run_folder=folder)
    progress.evaluated(EvaluationRecord(step=0, requests=14, trained_tokens=283, loss=1.5, seconds=3.0))
    for number in (1, 2):
        progress.advanced(step=number, packed_rows=3_456)
        progress.stepped(step(number))
    progress.evaluated(EvaluationRecord(step=2, requests=14, trained_tokens=283, loss=0.5, seconds=3.0))
    progress.comparing(requests=4)
    progress.compared(COMPARISON)
    progress.finished(summary(), run_folder=folder)


def printed(folder: Path, *, terminal: bool) -> str:
    """Return what a table prints of a whole run."""
    text = io.StringIO()
    with Table(Console(file=text, force_terminal=terminal, width=200, highlight=False)) as table:
        tell(table, folder)
    return text.getvalue()


def test_a_step_is_one_line_under_its_head(tmp_path: Path) -> None:
    """Every column of a step stands under its name, right-aligned, and the head comes once."""
    lines = printed(tmp_path, terminal=False).splitlines()
    heads = [index for index, line in enumerate(lines) if line.startswith("step  requests")]
    assert len(heads) == 1
    head, first = lines[heads[0]], lines[heads[0] + 1]
    cells = ["1/2", "13", "14,321", "3,456", "4.14", "2", "1.50 GiB", "1.40 GiB", "2.00 GiB", "12.3", "0.9877"]
    assert re.split(r"\s{2,}", first.strip()) == cells
    assert len(head) == len(first)


def test_the_end_names_the_folder_what_is_in_it_and_the_speed_up(tmp_path: Path) -> None:
    """A run ends with its path and the files that are really there."""
    text = printed(tmp_path, terminal=False)
    assert f"run folder: {tmp_path}" in text
    assert "steps.jsonl        one line per optimizer step" in text
    assert "adapter" not in text.partition("run folder")[2]
    assert "3.00x faster" in text
    assert "evaluation loss 1.5000 -> 0.5000" in text
    assert "1.68 GiB of 2.00 GiB" in text


def test_a_terminal_gets_a_bar_over_packed_tokens(tmp_path: Path) -> None:
    """The live bar counts packed tokens and the time that remains; a pipe gets none."""
    assert "of 6,912 packed tokens, about" in printed(tmp_path, terminal=True)
    assert "of 6,912 packed tokens, about" not in printed(tmp_path, terminal=False)


def test_an_unmeasured_peak_is_a_dash(tmp_path: Path) -> None:
    """No observation is not an observation of 0."""
    import dataclasses

    text = io.StringIO()
    with Table(Console(file=text, width=200)) as table:
        table.stepped(dataclasses.replace(step(1), observed_peak_bytes=None))
    assert "1.50 GiB           -    2.00 GiB" in text.getvalue()


def test_json_lines_are_one_document_per_event(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A program reads the run line by line, and nothing else is on stdout."""
    with JsonLines() as lines:
        tell(lines, tmp_path)
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["event"] for event in events] == [
        "loading",
        "started",
        "evaluation",
        "advanced",
        "step",
        "advanced",
        "step",
        "evaluation",
        "comparing",
        "comparison",
        "finished",
    ]
    assert events[4]["packed_rows"] == 3_456
    assert events[-1]["comparison"]["speed_up"] == 3.0
