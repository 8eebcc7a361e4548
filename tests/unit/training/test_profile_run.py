"""A run priced by what it learns: its records, its checkpoint, and how it goes on."""

from __future__ import annotations

import json
import shutil
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
    settings = config(tiny_model, rollouts_file, **SETTINGS, learned="run")
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


@pytest.mark.parametrize(("learned", "cold"), [("shared", False), ("run", True)])
def test_what_a_run_learned_is_there_for_the_next_one_if_it_is_shared(
    tiny_model: Path, rollouts_file: Path, learned: str, cold: bool
) -> None:
    """The next run of the same model on the same device begins where this one ended, or it does not look."""
    train(config(tiny_model, rollouts_file, **SETTINGS), progress=Silent())
    folder = train(config(tiny_model, rollouts_file, **SETTINGS, learned=learned), progress=Silent())
    assert (profiles(folder)[0] is None) == cold
    known = json.loads((folder / "learned.json").read_text(encoding="utf-8"))
    assert bool(known["profiles"]) != cold


def test_a_run_that_died_before_its_first_checkpoint_begins_again_with_what_it_knew(
    tiny_model: Path, rollouts_file: Path
) -> None:
    """What others, or it itself, taught the store in between does not count: its passes are priced as they were."""
    settings = config(tiny_model, rollouts_file, **SETTINGS)
    folder = train(settings, progress=Silent())
    for name in ("checkpoints", "adapter"):
        shutil.rmtree(folder / name)
    (folder / "summary.json").unlink()
    assert train(settings, progress=Silent(), resume="latest") == folder
    assert profiles(folder)[0] is None
