"""Greedy split into the widest passes that fit, in the order given.

Requests come in tree order, so neighbours share the most and a cut costs one copy of the prefix they shared. The search
assumes that a range inside a fitting range fits too; the answer of every width that is used was asked for, so a wrong
assumption can only make passes narrower, never admit one that does not fit.
"""

from __future__ import annotations

from collections.abc import Callable

Fits = Callable[[int, int], bool]
"""``fits(start, stop)``: whether the units ``[start, stop)`` fit as one pass."""


def split_greedily(num_units: int, fits: Fits) -> list[tuple[int, int]] | int:
    """Return ranges that cover ``[0, num_units)`` in order, each of which fits, or the unit that cannot fit alone."""
    ranges: list[tuple[int, int]] = []
    start, width = 0, num_units
    while start < num_units:
        stop = _widest(start, num_units, fits, guess=start + width)
        if stop == start:
            return start
        ranges.append((start, stop))
        width, start = stop - start, stop
    return ranges


def _widest(start: int, end: int, fits: Fits, *, guess: int) -> int:
    """Return the largest stop for which ``[start, stop)`` fits; ``start`` when not even one unit does."""
    low, high = start, end + 1
    probe = min(guess, end)
    while high - low > 1:
        if fits(start, probe):
            low = probe
            probe = min(end, low + max(1, low - start)) if high == end + 1 else (low + high) // 2
            if low == end:
                break
        else:
            high = probe
            probe = (low + high) // 2
    return low
