"""How many layers of a pass run again in backward: a choice between memory and time.

Recomputed layers keep their input only; the others keep all activations. The first layers are the recomputed ones:
backward begins with the last, whose activations are there, and frees them before the first recomputation needs room.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from trainer_rank.planner.passes import PASS_ROWS
from trainer_rank.planner.work import PassWork

MOST_CHOICES: Final = 5
"""Besides none and all, a quarter, a half and three quarters: each has an envelope of its own to be solved."""

FEWEST_FOR_SOME: Final = 6
"""Layers below which only none and all are offered."""


def recompute_choices(num_layers: int) -> tuple[int, ...]:
    """Return how many layers may be recomputed, ascending: none first, all of them last."""
    if num_layers < FEWEST_FOR_SOME:
        return (0, num_layers)
    steps = MOST_CHOICES - 1
    return tuple(num_layers * step // steps for step in range(MOST_CHOICES))


def layer_rows(works: Iterable[PassWork], num_layers: int) -> int:
    """Return the predicted time of passes, in forwards of one row through one layer.

    A backward counts as two forwards (two products for each of the forward's), and each recomputed layer as one more.
    """
    total = 0
    for work in works:
        again = 0 if work.no_grad else num_layers if work.recomputed is None else work.recomputed
        forwards = num_layers if work.no_grad else 3 * num_layers + again
        total += (work.batch.packed_rows + PASS_ROWS) * forwards
    return total
