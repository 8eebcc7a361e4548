"""A run priced by what it learns: its records, its checkpoint, and how it goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.training.test_loop import config, lines
from tests.unit.training.test_resume import at, numbers, press_ctrl_c, weights
from trainer_rank.errors import TrainingInterruptedError
from trainer_rank.training.checkpoint import Checkpoints
from trainer_rank.training.loop import train
from trainer_rank.training.progress import Silent

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

SETTINGS: dict[str, Any] = {"steps": 4, "groups_per_step": 2, "checkpoint_every": 2, "pricing": "profile"}


def profiles(folder: Path) -> list[Any]:
    """What was known of each admitted pass with graph, in the order of the steps."""
    forwards = [
        forward
        for line in lines(folder, "decisions.jsonl")
        if line["kind"] == "admission"
        for forward in line["pricing"]["forwards"]
        if forward["signature"]["grad_modes"] == [True]
    ]
    return [forward["profile"] for forward in forwards]


def test_a_run_learns_and_a_resumed_one_goes_on_with_what_it_knew(tiny_model: Path, rollouts_file: Path) -> None:
    """Numbers are those of the run that was not interrupted, and the first pass after the checkpoint is not cold."""
    settings = config(tiny_model, rollouts_file, **SETTINGS)
    whole = train(settings, progress=Silent())
    assert profiles(whole)[0] is None
    assert all(one is not None for one in profiles(whole)[1:])
    with pytest.raises(TrainingInterruptedError):
        train(settings, progress=Silent(), callbacks=[at(2, press_ctrl_c)])
    checkpoint = Checkpoints(rollouts_file.parent / "runs" / "002", keep=2).newest()
    assert checkpoint is not None
    assert checkpoint.state["learned"]["name"] == "profile"
    assert checkpoint.state["learned"]["profiles"]
    folder = train(settings, progress=Silent(), resume="latest")
    assert numbers(folder) == numbers(whole)
    assert weights(folder) == weights(whole)
    assert [one is None for one in profiles(folder)] == [one is None for one in profiles(whole)]
