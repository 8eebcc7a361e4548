"""Pieces into as few bins as can be found, the bins as full as can be: exact fill, bin by bin.

The largest piece that is left opens a bin; of the others, those that fill what it leaves best are found exactly, by
subset sums. What stays in the last bins is small, which is what can still be put beside something else.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

MOST_CONSIDERED: Final = 48
"""Pieces among which a bin's fill is exact: the larger half of those that fit, and the smallest."""


def fill_bins(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Return bins of piece numbers, each of at most ``capacity`` in sum; a larger piece has a bin of its own.

    Args:
        sizes: Of each piece, not negative.
        capacity: Of each bin.
    """
    if sum(sizes) <= capacity:
        return [list(range(len(sizes)))] if sizes else []
    # Ascending, equals in reverse, so that taking from the end takes the largest and, of equals, the first.
    left = sorted(range(len(sizes)), key=lambda number: (sizes[number], -number))
    bins: list[list[int]] = []
    while left:
        first = left.pop()
        room = capacity - sizes[first]
        taken = _best_fill([sizes[number] for number in left], room) if room >= 0 else []
        bins.append([first, *(left[place] for place in taken)])
        for place in sorted(taken, reverse=True):
            del left[place]
    return bins


def _best_fill(ascending: Sequence[int], room: int) -> list[int]:
    """Return the places of pieces that fill ``room`` best, larger ones preferred."""
    fitting = bisect_right(ascending, room)
    places = list(range(fitting))
    if sum(ascending[:fitting]) <= room:
        return places
    if fitting > MOST_CONSIDERED:
        half = MOST_CONSIDERED // 2
        places = [*places[:half], *places[-half:]]
    # Bit r of ``reached[k]``: some of the first k pieces sum to r.
    mask = (1 << (room + 1)) - 1
    reached = [1]
    for place in places:
        reached.append((reached[-1] | reached[-1] << ascending[place]) & mask)
    total = reached[-1].bit_length() - 1
    taken = []
    for number in range(len(places) - 1, -1, -1):
        size = ascending[places[number]]
        if total >= size and reached[number] >> (total - size) & 1:
            taken.append(places[number])
            total -= size
    return taken
