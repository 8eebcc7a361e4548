"""Which rollouts make which step."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainer_rank.training.config import TrainConfig
from trainer_rank.training.rollouts import Rollout
from trainer_rank.training.schedule import group_rollouts, plan_steps


def rollouts(*groups: str | None) -> list[Rollout]:
    """Return one rollout per entry, told apart by its line."""
    return [
        Rollout(
            tokens=np.asarray([1, 2], dtype=np.int64),
            trained=np.asarray([False, True]),
            group=group,
            weight=1.0,
            advantage=None,
            old_logprobs=None,
            line=line,
        )
        for line, group in enumerate(groups, start=1)
    ]


def config(**entries: Any) -> TrainConfig:
    """Return a configuration with the given top-level entries."""
    data = {"path": "d", "shuffle_seed": entries.pop("shuffle_seed", None)}
    return TrainConfig.model_validate({"model": {"path": "m"}, "data": data, **entries})


def lines(steps: list[list[Rollout]]) -> list[list[int]]:
    """Return the lines of every step."""
    return [[rollout.line for rollout in step] for step in steps]


def test_a_group_is_gathered_from_anywhere_in_the_file() -> None:
    """Groups come in order of first appearance; a rollout without one stands alone."""
    groups = group_rollouts(rollouts("a", None, "b", "a", None))
    assert lines(groups) == [[1, 4], [2], [3], [5]]


def test_without_a_seed_the_order_of_the_file_is_kept() -> None:
    """Steps take groups in order, and the last step of an epoch may be smaller."""
    groups = group_rollouts(rollouts("a", "b", "c"))
    assert lines(plan_steps(groups, config(epochs=2, groups_per_step=2))) == [[1, 2], [3], [1, 2], [3]]


def test_steps_run_over_the_end_of_the_data() -> None:
    """A run of more steps than the data has goes on with the next epoch, every step full."""
    groups = group_rollouts(rollouts("a", "b", "c"))
    assert lines(plan_steps(groups, config(steps=2, groups_per_step=2))) == [[1, 2], [3, 1]]


def test_a_step_may_be_larger_than_the_data() -> None:
    """Groups repeat within a step if the configuration asks for more than there are."""
    assert lines(plan_steps(group_rollouts(rollouts("a", "b")), config(steps=1, groups_per_step=5))) == [
        [1, 2, 1, 2, 1]
    ]


@given(
    names=st.lists(st.sampled_from("abcde"), min_size=1, max_size=12),
    seed=st.integers(0, 3),
    per_step=st.integers(1, 4),
    epochs=st.integers(1, 3),
)
def test_every_epoch_visits_every_rollout_once_with_groups_whole(
    names: list[str], seed: int, per_step: int, epochs: int
) -> None:
    """Over the run each line occurs once per epoch, and a group's lines are always in the same step."""
    chosen = config(epochs=epochs, groups_per_step=per_step, shuffle_seed=seed)
    groups = group_rollouts(rollouts(*names))
    steps = plan_steps(groups, chosen)
    assert Counter(line for step in lines(steps) for line in step) == {line + 1: epochs for line in range(len(names))}
    for step in steps:
        present = Counter(rollout.group for rollout in step)
        assert all(count % names.count(str(name)) == 0 for name, count in present.items())


def test_the_same_seed_gives_the_same_steps_and_another_another_order() -> None:
    """A run repeats exactly."""
    groups = group_rollouts(rollouts(*"abcdefgh"))
    first, again, other = (lines(plan_steps(groups, config(epochs=1, shuffle_seed=seed))) for seed in (1, 1, 2))
    assert first == again
    assert first != other
