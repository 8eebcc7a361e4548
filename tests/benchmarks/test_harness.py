"""The benchmarks' shared harness."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

HARNESS = Path(__file__).resolve().parents[2] / "benchmarks" / "_harness.py"


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The harness, run without options."""
    spec = importlib.util.spec_from_file_location("_harness", HARNESS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", ["benchmark.py"])
    return module


@pytest.mark.parametrize(
    ("op", "figure", "status"), [("le", 2, 0), ("le", 3, 1), ("ge", 2, 0), ("ge", 1, 1), ("eq", 2, 0), ("eq", 3, 1)]
)
def test_exit_status_says_whether_the_targets_are_met(
    harness: ModuleType, capsys: pytest.CaptureFixture[str], op: str, figure: int, status: int
) -> None:
    """A missed target exits 1 and says so in the object."""
    with pytest.raises(SystemExit) as exited:
        harness.finish("demo", {"figure": figure}, [harness.target("figure", op, 2)])
    assert exited.value.code == status
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["targets"] == [{"key": "figure", "op": op, "value": 2, "met": status == 0}]


def test_a_target_without_a_figure_is_an_error(harness: ModuleType) -> None:
    """A misspelt key does not pass silently."""
    with pytest.raises(KeyError):
        harness.finish("demo", {}, [harness.target("figure", "le", 1)])


def test_a_quick_run_names_no_targets(
    harness: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Figures of shrunken sizes are not judged."""
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "--quick"])
    with pytest.raises(SystemExit) as exited:
        harness.finish("demo", {"figure": 9}, [harness.target("figure", "le", 1)])
    assert exited.value.code == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["targets"] == []


def test_paired_runs_take_turns(harness: ModuleType) -> None:
    """After one uncounted run of each, the two alternate."""
    calls: list[str] = []
    harness.paired_medians(
        lambda: calls.append("a") or sum(range(10**5)), lambda: calls.append("b") or sum(range(10**5)), 3
    )
    assert "".join(calls) == "ab" * 4
