"""Schedules of the learning rate, against hand values and torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainer_rank.training.config import OptimizerSection
from trainer_rank.training.learning_rate import learning_rate


def rates(num_steps: int, **entries: Any) -> list[float]:
    """Return the learning rate of each step of a run."""
    section = OptimizerSection.model_validate({"lr": 0.4, **entries})
    return [learning_rate(section, step, num_steps=num_steps) for step in range(num_steps)]


def test_a_constant_rate_warms_up_and_stays() -> None:
    """With three warm-up steps the rate rises by quarters."""
    assert rates(5, warmup_steps=3) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4])


def test_linear_falls_in_equal_steps() -> None:
    """Five steps from the full rate, the sixth of which would be at the minimum of a fifth."""
    assert rates(5, schedule="linear", min_lr_ratio=0.2) == pytest.approx([0.4, 0.336, 0.272, 0.208, 0.144])


def test_cosine_is_torch_s_own() -> None:
    """The same values as CosineAnnealingLR over the run."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=9, eta_min=0.04)
    wanted = []
    for _ in range(9):
        wanted.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert rates(9, schedule="cosine", min_lr_ratio=0.1) == pytest.approx(wanted)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_fall_begins_at_the_full_rate_after_the_warm_up(schedule: str) -> None:
    """The warm-up leads up to the rate, and nothing after it is higher or 0."""
    found = rates(8, schedule=schedule, warmup_steps=3)
    assert found[:4] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert found[3:] == sorted(found[3:], reverse=True)
    assert found[-1] > 0


def test_a_warm_up_as_long_as_the_run_never_falls() -> None:
    """There is no step left to fall in."""
    assert rates(2, schedule="cosine", warmup_steps=2) == pytest.approx([0.4 / 3, 0.8 / 3])
