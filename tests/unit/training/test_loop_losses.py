"""Whole runs with every loss on a tiny model: data to payload to loss to record."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.training.test_loop import config, lines
from trainer_rank.errors import ConfigError, DataError, TrainingError
from trainer_rank.training.loop import train
from trainer_rank.training.progress import Silent

Write = Callable[[Callable[[int], dict[str, Any]]], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Return a function that writes six requests, two to a group, with fields of their own."""

    def file(fields: Callable[[int], dict[str, Any]]) -> Path:
        generator = random.Random(0)
        rows = []
        for number in range(6):
            tokens = [number // 2] * 6 + [generator.randrange(64) for _ in range(4)]
            trained = [0] * 6 + [1] * 4
            row = {"tokens": tokens, "trained": trained, "group": str(number // 2), "old_logprobs": [-4.0] * 10}
            rows.append({**row, **fields(number)})
        path = tmp_path / "data.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return file


def run(model: Path, data: Path, loss: dict[str, Any], **entries: Any) -> list[dict[str, Any]]:
    """Train for two steps and return the records of the steps."""
    settings = config(model, data, loss=loss, **{"data": {"path": str(data)}, **entries})
    return lines(train(settings, progress=Silent()), "steps.jsonl")


def test_grpo_trains_on_rewards(tiny_model: Path, write: Write) -> None:
    """Advantages come from the rewards of a group, the penalty from the data's reference."""
    path = write(lambda number: {"reward": number % 2, "ref_logprobs": [-4.5] * 10})
    steps = run(tiny_model, path, {"name": "grpo", "advantages": "group", "kl_coefficient": 0.1})
    assert all(step["grad_norm"] > 0 for step in steps)
    assert set(steps[0]["metrics"]) == {"clip_fraction", "ratio", "kl_old", "kl_reference"}
    assert steps[0]["metrics"]["kl_reference"] > 0


def test_equal_rewards_train_nothing(tiny_model: Path, write: Write) -> None:
    """Every advantage is 0, and so is the gradient."""
    steps = run(tiny_model, write(lambda number: {"reward": 1}), {"name": "grpo", "advantages": "group"})
    assert [(step["loss"], step["grad_norm"]) for step in steps] == [(0.0, 0.0)] * 2


def test_ppo_clip_trains_on_advantages_per_token(tiny_model: Path, write: Write) -> None:
    """One number for each token."""
    steps = run(tiny_model, write(lambda number: {"advantages": [0.5 - number % 2] * 10}), {"name": "ppo-clip"})
    assert all(step["grad_norm"] > 0 for step in steps)


def test_dpo_learns_what_was_preferred(tiny_model: Path, write: Write) -> None:
    """From log 2 at a margin of 0 the loss falls and every pair comes out right; pairs are drawn twice a step."""
    path = write(lambda number: {"chosen": number % 2 == 0, "ref_logprobs": [-4.2] * 10})
    entries = {"warm_up": "worst", "groups_per_step": 4, "steps": 6}
    steps = run(tiny_model, path, {"name": "dpo"}, **entries)
    assert [step["requests"] for step in steps] == [8] * 6
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert steps[-1]["metrics"]["accuracy"] == 1.0
    assert steps[-1]["metrics"]["margin"] > steps[0]["metrics"]["margin"]


def test_half_a_pair_is_refused_before_the_model_is_loaded(tiny_model: Path, write: Write, tmp_path: Path) -> None:
    """And no run folder is made."""
    path = write(lambda number: {"chosen": True, "ref_logprobs": [-4.0] * 10})
    with pytest.raises(DataError, match=r"data\.jsonl:1: pair '0' must have one chosen and one rejected member"):
        run(tiny_model, path, {"name": "dpo"})
    assert not (tmp_path / "runs").exists()


def test_a_custom_loss_gets_the_rollouts(tiny_model: Path, write: Write, tmp_path: Path) -> None:
    """Whatever fields they have; the run can be compared one by one as well."""
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "def loss(micro_batch):\n"
        "    rows = zip(micro_batch.coefficients, micro_batch.requests, micro_batch.results)\n"
        "    return torch.stack([-c * q.payload.reward * r.logprobs.sum() for c, q, r in rows]).sum()\n",
        encoding="utf-8",
    )
    path = write(lambda number: {"reward": 1 + number})
    loss = {"name": "custom", "function": f"{tmp_path / 'mine.py'}:loss"}
    steps = run(tiny_model, path, loss, compare_one_by_one=True)
    assert all(step["grad_norm"] > 0 for step in steps)
    assert steps[0]["metrics"] == {}


def test_a_custom_loss_that_is_no_number_stops_the_run(tiny_model: Path, write: Write, tmp_path: Path) -> None:
    """With the function and the step."""
    (tmp_path / "mine.py").write_text("def loss(m):\n    return m.results[0].logprobs.sum() * float('nan')\n")
    loss = {"name": "custom", "function": f"{tmp_path / 'mine.py'}:loss"}
    with pytest.raises(TrainingError, match=r"step 1: loss\.function '.*mine\.py:loss' must return a finite value"):
        run(tiny_model, write(lambda number: {}), loss)


def test_a_missing_custom_loss_is_refused_before_anything_is_read(tiny_model: Path, tmp_path: Path) -> None:
    """Not even the data."""
    with pytest.raises(ConfigError, match=r"loss\.function: there must be a file"):
        run(tiny_model, tmp_path / "none.jsonl", {"name": "custom", "function": "none.py:loss"})
