"""Makes passes better by what is cheap to find: merging two, and moving one unit to a pass it shares more with.

Every change lowers the score and keeps to the capacity, so the result is never worse than the start. The work is
bounded: a unit is tried in the passes of its neighbours in tree order, a pass with the few that have the most room.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import Final

from trainer_rank.planner.sharing import Sharing

SWEEPS: Final = 3
"""Times all units are gone through at most."""

PARTNERS: Final = 8
"""Passes that a pass is tried with."""


def improve_passes(units: Sharing, start: list[list[int]], capacity: int, pass_rows: int) -> list[list[int]]:
    """Return passes at least as good as ``start``, which are lists of units in ascending order."""
    search = _Search(units, start, capacity, pass_rows)
    for _ in range(SWEEPS):
        changed = search.merge()
        changed = search.move() or changed
        if not changed:
            break
    return [list(one) for one in search.passes if one]


class _Search:
    def __init__(self, units: Sharing, start: list[list[int]], capacity: int, pass_rows: int) -> None:
        self._units = units
        self._capacity = capacity
        self._pass_rows = pass_rows
        self.passes = [list(one) for one in start]
        self._rows = [units.rows(one) for one in start]
        self._pass_of = [0] * len(units)
        for number, one in enumerate(start):
            for unit in one:
                self._pass_of[unit] = number

    def merge(self) -> bool:
        """Merge passes into others that have room for them, the smallest first; return whether any was."""
        changed = False
        order = sorted((number for number, one in enumerate(self.passes) if one), key=lambda one: self._rows[one])
        for number in order:
            if not self.passes[number]:
                continue
            beside = (near for unit in self.passes[number] for near in self._neighbours(unit))
            for other in dict.fromkeys((*_few(beside), *order[:PARTNERS])):
                if other == number or not self.passes[other]:
                    continue
                both = sorted(self.passes[number] + self.passes[other])
                rows = self._units.rows(both)
                if rows <= self._capacity and rows < self._rows[number] + self._rows[other] + self._pass_rows:
                    for unit in self.passes[number]:
                        self._pass_of[unit] = other
                    self.passes[number], self._rows[number] = [], 0
                    self.passes[other], self._rows[other] = both, rows
                    changed = True
                    break
        return changed

    def move(self) -> bool:
        """Move units to passes of their neighbours where they add fewer rows; return whether any was."""
        changed = False
        for unit in range(len(self._units)):
            number = self._pass_of[unit]
            saved = self._cost(unit, number)
            alone = len(self.passes[number]) == 1
            for other in self._neighbours(unit):
                added = self._cost(unit, other)
                better = added < saved + self._pass_rows * alone
                if better and self._rows[other] + added <= self._capacity:
                    self.passes[number].remove(unit)
                    self._rows[number] -= saved
                    insort(self.passes[other], unit)
                    self._rows[other] += added
                    self._pass_of[unit] = other
                    changed = True
                    break
        return changed

    def _neighbours(self, unit: int) -> list[int]:
        """Return the other passes of the units beside this one in tree order."""
        own = self._pass_of[unit]
        near = (self._pass_of[one] for one in (unit - 1, unit + 1) if 0 <= one < len(self._units))
        return [one for one in dict.fromkeys(near) if one != own]

    def _cost(self, unit: int, number: int) -> int:
        """Return the rows that a unit adds to a pass, whether it is in it or not."""
        members = self.passes[number]
        place = bisect_left(members, unit)
        after = place + (place < len(members) and members[place] == unit)
        return self._units.rows_beside(
            unit, members[place - 1] if place else None, members[after] if after < len(members) else None
        )


def _few(numbers: Iterable[int]) -> list[int]:
    found: list[int] = []
    for number in numbers:
        if number not in found:
            found.append(number)
        if len(found) == PARTNERS:
            break
    return found
