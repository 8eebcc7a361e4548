"""How many layers of a pass run again in backward: a choice between memory and time.

Recomputed layers keep their input only; the others keep all activations. The first layers are the recomputed ones:
backward begins with the last, whose activations are there, and frees them before the first recomputation needs room.
"""

from __future__ import annotations

from typing import Final

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
