"""Units in tree order, and the packed rows of any set of them in time linear in the set.

Of units in depth-first order, two share what the least of the common prefixes between neighbours on the way is. A set
therefore packs to the lengths of its units, less what each shares with the one before it in the set. Ranges of any
length are answered at once from a table of minima over ranges of 1, 2, 4, 8, ... units.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np


class Sharing:
    """Lengths and common prefixes of N units.

    Args:
        lengths: Rows of each unit alone.
        shared: Rows that each unit has in common with the one before it; entry 0 counts for nothing.

    Raises:
        ValueError: The two differ in number, or a unit shares more than it or the one before it has.
    """

    def __init__(self, lengths: Sequence[int], shared: Sequence[int]) -> None:
        if len(lengths) != len(shared):
            raise ValueError(f"lengths and shared must have one entry per unit, got {len(lengths)} and {len(shared)}")
        self.lengths = tuple(lengths)
        self.shared = (0, *shared[1:])
        for unit, common in enumerate(self.shared):
            if common > min(self.lengths[unit], self.lengths[unit - 1]):
                raise ValueError(
                    f"unit {unit} cannot share {common} rows with the one before it: they have {self.lengths[unit]} "
                    f"and {self.lengths[unit - 1]}"
                )
        self._minima: list[list[int]] = [list(self.shared)]
        level = np.array(self.shared, dtype=np.int64)
        width = 1
        while 2 * width <= level.size + width - 1:
            level = np.minimum(level[:-width], level[width:])
            self._minima.append(level.tolist())
            width *= 2

    def __len__(self) -> int:
        return len(self.lengths)

    def of(self, units: Sequence[int]) -> Sharing:
        """Return some of the units, given in ascending order, as units of their own."""
        return Sharing(
            [self.lengths[unit] for unit in units], [0, *(self.common(a, b) for a, b in pairwise(units))][: len(units)]
        )

    def common(self, a: int, b: int) -> int:
        """Return the rows that two units share, ``a`` before ``b`` in tree order."""
        exponent = (b - a).bit_length() - 1
        level = self._minima[exponent]
        first, last = level[a + 1], level[b + 1 - (1 << exponent)]
        return first if first < last else last

    def rows(self, units: Sequence[int]) -> int:
        """Return the packed rows of units in ascending order, under full sharing."""
        total = sum(self.lengths[unit] for unit in units)
        return total - sum(self.common(a, b) for a, b in pairwise(units))

    def rows_beside(self, unit: int, before: int | None, after: int | None) -> int:
        """Return the rows that a unit adds between its neighbours in a set, None where it has none."""
        rows = self.lengths[unit]
        if before is not None:
            rows -= self.common(before, unit)
        if after is not None:
            rows -= self.common(unit, after)
            if before is not None:
                rows += self.common(before, after)
        return rows
