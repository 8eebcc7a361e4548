"""Greedy split into wide passes that fit, cut where little is shared.

Units come in tree order, so neighbours share the most, and a cut between two units computes what they share twice. From
the widest range that fits, the cut therefore moves back, by at most half the range, to the place where the least is
shared: between two conversations rather than inside one.

Only ``fits`` admits. A guess of how far a range may reach saves questions (each can cost a dry run). Every range that
is used was asked for, so a wrong guess or a ``fits`` that is not monotone makes passes narrower, but never one that
does not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Fits = Callable[[int, int], bool]
"""``fits(start, stop)``: whether the units ``[start, stop)`` fit as one pass."""

Guess = Callable[[int], int]
"""``guess(start)``: the stop up to which a range from ``start`` probably fits."""


def split_greedily(
    num_units: int, fits: Fits, *, shared: Sequence[int] | None = None, guess: Guess | None = None
) -> list[tuple[int, int]] | int:
    """Return ranges that cover ``[0, num_units)`` in order, each of which fits, or the unit that cannot fit alone.

    Args:
        num_units: Units to cover.
        fits: Answers whether a range fits.
        shared: Entry i is what units i - 1 and i share, in rows; None cuts at the widest range.
        guess: Where to ask first, asked again after each answer (an answer may have taught it more); None searches for
            the widest range that fits.
    """
    ranges: list[tuple[int, int]] = []
    start = 0
    while start < num_units:
        stop = _widest(start, num_units, fits, guess)
        if stop == start:
            return start
        if shared is not None and stop < num_units:
            stop = _shallowest(start, stop, fits, shared)
        ranges.append((start, stop))
        start = stop
    return ranges


def _widest(start: int, end: int, fits: Fits, guess: Guess | None) -> int:
    """Return a large stop for which ``[start, stop)`` fits, the largest without a guess; ``start`` when none does."""
    low, high = start, end + 1
    probe = end if guess is None else min(end, max(start + 1, guess(start)))
    while high - low > 1:
        if fits(start, probe):
            low = probe
            if guess is not None and min(high - 1, guess(start)) <= low:
                break
        else:
            high = probe
        middle = (low + high) // 2
        probe = middle if guess is None else min(high - 1, max(low + 1, guess(start)))
        # A guess that was wrong once is trusted no further than halving.
        if high <= end:
            probe = min(probe, max(middle, low + 1))
    return low


def _shallowest(start: int, stop: int, fits: Fits, shared: Sequence[int]) -> int:
    """Return the cut in the far half of ``[start, stop)`` that shares least, the widest of equals."""
    candidates = range(stop, start + (stop - start) // 2, -1)
    best = min(candidates, key=lambda cut: (shared[cut], -cut))
    return best if best == stop or fits(start, best) else stop
