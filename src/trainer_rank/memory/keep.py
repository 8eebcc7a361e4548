"""A bounded few observations that stand for all that were made.

The latest are kept as they were, and of the others those that the upper fit cannot do without. What the rest was short
of follows from these; their sizes and peaks are kept, and where there are too many, the two that are most alike become
one. So no observation ever lies above the fit, however many there were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trainer_rank.memory.seen import Seen
from trainer_rank.memory.upper_fit import UpperFit, upper_fit

KEPT: Final = 128
"""Observations kept per signature."""

LATEST: Final = 16
"""Of them, the latest, as they were; and the most older ones that still have a say in the fit."""


def keep(known: Sequence[Seen], more: Iterable[Seen]) -> tuple[Seen, ...]:
    """Return at most ``KEPT`` observations, oldest first, that stand for ``known``, which this returned, and more."""
    kept, waiting = list(known), list(more)
    while waiting:
        # A few at a time: the fit's work grows with the cube of what has a say in it.
        kept = _reduced(_by_size([*kept, *waiting[:LATEST]]))
        waiting = waiting[LATEST:]
    return tuple(kept)


def fit_of(seen: Sequence[Seen]) -> UpperFit:
    """Return the upper fit of what passes were short of."""
    rows, tokens, missing = (
        np.array(values, dtype=np.float64)
        for values in (
            [one.packed_rows for one in seen],
            [one.logical_tokens for one in seen],
            [one.missing_bytes for one in seen],
        )
    )
    return upper_fit(rows, tokens, missing)


def _by_size(seen: Iterable[Seen]) -> list[Seen]:
    """Return the observations with those of one size as one, in the place of the latest."""
    found: dict[tuple[int, int, int], Seen] = {}
    for one in seen:
        known = found.pop(one.size, None)
        found[one.size] = one if known is None else known.join(one)
    return list(found.values())


def _reduced(seen: list[Seen]) -> list[Seen]:
    old, latest = seen[:-LATEST], seen[-LATEST:]
    if old:
        essential = fit_of(seen).essential
        old = [one if needed else one.settle() for one, needed in zip(old, essential[: len(old)], strict=True)]
    while sum(map(_has_a_say, old)) > LATEST:
        old = _with_two_joined(old, _has_a_say)
    while len(old) + len(latest) > KEPT:
        old = _with_two_joined(old, lambda one: not _has_a_say(one))
    return [*old, *latest]


def _has_a_say(one: Seen) -> bool:
    return one.missing_bytes > 0


def _with_two_joined(seen: list[Seen], which: Callable[[Seen], bool]) -> list[Seen]:
    """Return the list with two ``which`` are as one: those nearest by ratio of sizes and by what they were short of."""
    places = [place for place, one in enumerate(seen) if which(one)]
    sizes = np.log(np.maximum(1, np.array([seen[place].size for place in places], dtype=np.float64)))
    missing = np.maximum(0, np.array([seen[place].missing_bytes for place in places], dtype=np.float64))
    points = np.column_stack([sizes, missing / max(1.0, missing.max())])
    distances: NDArray[np.float64] = np.abs(points[:, None] - points[None]).sum(-1)
    distances[np.tril_indices(len(places))] = np.inf
    first, second = (places[int(place)] for place in divmod(int(distances.argmin()), len(places)))
    joined = seen[first].join(seen[second])
    return [joined if place == first else one for place, one in enumerate(seen) if place != second]
