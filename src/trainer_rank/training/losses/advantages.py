"""Advantages from rewards, relative to the group they were sampled in. Imports no torch.

    A_i = (r_i - mean(r)) / (std(r) + 1e-4)

Source: DeepSeekMath (arXiv 2402.03300, section 4.1.2), which does not say which standard deviation it means; here it is
that of a sample (n - 1 in the denominator), as in the usual implementations, and so is the 1e-4, which bounds an
advantage where rewards hardly differ.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import warnings
from collections.abc import Sequence
from typing import Final

from trainer_rank.training.rollouts import Rollout
from trainer_rank.training.schedule import group_rollouts

FLOOR: Final = 1e-4
"""Added to the standard deviation."""


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """Return the advantages of the members of one whole group; exactly 0 when all rewards are equal, or there is one.

    Raises:
        ValueError: A reward is not finite.
    """
    for reward in rewards:
        if not math.isfinite(reward):
            raise ValueError(f"rewards must be finite, got {reward}")
    if len(set(rewards)) < 2:
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    spread = statistics.stdev(rewards) + FLOOR
    return [(reward - mean) / spread for reward in rewards]


def with_group_advantages(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Return all rollouts of a data file with advantages from their rewards, in the same order.

    The whole file is looked at, so a group is never seen in part, wherever its lines stand; and its requests stay in
    one optimizer step. Warns once if a group has a single member, whose advantage is 0 whatever its reward.
    """
    groups = group_rollouts(rollouts)
    alone = [group[0].line for group in groups if len(group) == 1]
    if alone:
        warnings.warn(
            f"single_member_groups: {len(alone)} of {len(groups)} groups have one request, the first in line "
            f"{alone[0]}; its advantage is 0 and it trains nothing but the penalty. Name the group of its siblings",
            RuntimeWarning,
            stacklevel=2,
        )
    advantages: dict[int, float] = {}
    for group in groups:
        found = group_advantages([_reward(rollout) for rollout in group])
        advantages.update(zip(map(id, group), found, strict=True))
    return [dataclasses.replace(one, advantage=advantages[id(one)], advantages=None) for one in rollouts]


def _reward(rollout: Rollout) -> float:
    assert rollout.reward is not None, "the reader of the data demands it"
    return rollout.reward
