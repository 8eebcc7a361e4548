"""Which groups of requests make which optimizer step. Pure and seeded: the same configuration gives the same steps."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from trainer_rank.training.config import TrainConfig
from trainer_rank.training.rollouts import Rollout


def group_rollouts(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    """Return the rollouts by group, groups in order of first appearance; one without a group is a group of its own."""
    groups: dict[object, list[Rollout]] = {}
    for index, rollout in enumerate(rollouts):
        groups.setdefault(index if rollout.group is None else rollout.group, []).append(rollout)
    return list(groups.values())


def plan_steps(groups: Sequence[list[Rollout]], config: TrainConfig) -> list[list[Rollout]]:
    """Return the rollouts of every optimizer step of the run, in order.

    Every epoch visits each group once, in an order drawn anew from ``data.shuffle_seed`` (or in file order). With
    ``epochs``, the last step of an epoch may be smaller; with ``steps``, epochs follow each other without a seam.
    """
    if config.epochs is not None:
        return [
            _joined(order[start : start + config.groups_per_step])
            for order in _orders(groups, config.data.shuffle_seed, epochs=config.epochs)
            for start in range(0, len(order), config.groups_per_step)
        ]
    assert config.steps is not None
    wanted = config.steps * config.groups_per_step
    epochs = -(-wanted // len(groups))
    stream = [group for order in _orders(groups, config.data.shuffle_seed, epochs=epochs) for group in order]
    return [
        _joined(stream[start : start + config.groups_per_step]) for start in range(0, wanted, config.groups_per_step)
    ]


def _orders(groups: Sequence[list[Rollout]], seed: int | None, *, epochs: int) -> Iterator[list[list[Rollout]]]:
    generator = random.Random(seed)
    for _ in range(epochs):
        order = list(groups)
        if seed is not None:
            generator.shuffle(order)
        yield order


def _joined(groups: Sequence[list[Rollout]]) -> list[Rollout]:
    return [rollout for group in groups for rollout in group]
