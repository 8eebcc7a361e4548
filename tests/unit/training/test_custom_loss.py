"""A loss of the user's own: found by name, called, and checked for what it returns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.training.loss_batches import batch, leaf, request
from trainer_rank.errors import ConfigError, TrainingError
from trainer_rank.training.config import LossSection
from trainer_rank.training.losses import objective_for
from trainer_rank.training.losses.custom import checked, load_function

GOOD = """
from dataclasses import dataclass

import torch

NUMBER = 3


@dataclass
class Settings:
    scale: float = 2.0


def twice(micro_batch):
    parts = [-c * r.logprobs.sum() for c, r in zip(micro_batch.coefficients, micro_batch.results)]
    return Settings().scale * torch.stack(parts).sum()


def two_arguments(micro_batch, other):
    return other
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return a file with a loss, and with what is none."""
    path = tmp_path / "mine.py"
    path.write_text(GOOD, encoding="utf-8")
    return path


def test_a_function_of_a_file_is_the_loss(file: Path) -> None:
    """It gets the micro-batch and returns a scalar; annotations and dataclasses of the file work."""
    objective = objective_for(LossSection.model_validate({"name": "custom", "function": f"{file}:twice"}))
    micro_batch = batch([request([1, 1])], [leaf([-1.0, -2.0])], [0.5])
    loss = objective.checked(objective.loss(micro_batch), micro_batch, step=1)
    assert loss.item() == pytest.approx(3.0)
    assert objective.needs == frozenset()


def test_a_function_of_a_module_is_found(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Python finds the module."""
    monkeypatch.syspath_prepend(str(file.parent))
    assert load_function("mine:twice").__name__ == "twice"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("{folder}/none.py:loss", r"there must be a file .*none\.py', and there is none; relative paths count"),
        ("no_such_module_here:loss", "the module 'no_such_module_here' cannot be imported .* PYTHONPATH, or name a"),
        ("{folder}/mine.py:thrice", r"must have the name 'thrice'; its functions are twice, two_arguments"),
        ("{folder}/mine.py:NUMBER", "must be a function, got a value of type int"),
        ("{folder}/mine.py:two_arguments", r"must take a micro-batch as its only required argument \(missing a req"),
        ("{folder}/broken.py:loss", r"importing .*broken\.py' failed: ZeroDivisionError: .*; correct it first"),
        ("{folder}/half.py:loss", r"importing .*half\.py' failed: SyntaxError"),
        ("{folder}/empty.py:loss", "must have the name 'loss'; it has no functions"),
    ],
)
def test_what_cannot_be_loaded_is_refused(file: Path, spec: str, message: str) -> None:
    """Before the model is loaded, with the next step."""
    for name, text in (("broken", "1 / 0\n"), ("half", "def loss(\n"), ("empty", "")):
        (file.parent / f"{name}.py").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message) as caught:
        load_function(spec.format(folder=file.parent))
    assert str(caught.value).startswith("loss.function: ")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "must return a scalar tensor of floats, got None of type NoneType; sum it up"),
        (1.5, "got 1.5 of type float"),
        (torch.ones(2, requires_grad=True), r"got a tensor of shape \(2,\) and torch.float32"),
        (torch.tensor(1), r"got a tensor of shape \(\) and torch.int64"),
        (torch.tensor(1.0), "must return a value with a graph, got .* with requires_grad False; use result.logprobs"),
        (torch.tensor(float("nan"), requires_grad=True), "must return a finite value, got nan; look for"),
        (torch.tensor(float("-inf"), requires_grad=True), "must return a finite value, got -inf"),
    ],
)
def test_what_cannot_be_trained_on_stops_the_run(value: Any, message: str) -> None:
    """Function, step and what was returned are named."""
    with pytest.raises(TrainingError, match=message) as caught:
        checked(value, batch([request([1])], [leaf([-1.0])], [1.0]), function="mine.py:loss", step=7)
    assert str(caught.value).startswith("step 7: loss.function 'mine.py:loss' must return")


def test_without_anything_scored_a_loss_needs_no_graph() -> None:
    """There is nothing it could have one over."""
    value = torch.tensor(0.0)
    assert checked(value, batch([request([0])], [leaf([0.0])], [0.0]), function="f", step=1) is value


def test_only_custom_losses_are_checked() -> None:
    """The loop itself stops at a built-in loss that is not finite, once the step is summed."""
    objective = objective_for(LossSection.model_validate({"name": "sft"}))
    value = torch.tensor(float("nan"))
    assert objective.checked(value, batch([request(np.ones(1))], [leaf([-1.0])], [1.0]), step=1) is value
