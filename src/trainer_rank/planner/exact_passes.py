"""The best passes over a few units, by dynamic programming over subsets.

The best plan of a set is one pass with its first unit and the best plan of the others. With n units that is
3 ** (n - 1) pairs of a set and a pass in it.
"""

from __future__ import annotations

from typing import Final

from trainer_rank.planner.sharing import Sharing

MOST_EXACT: Final = 9
"""Units up to which all plans are compared: some ten milliseconds."""


def exact_passes(units: Sharing, capacity: int, pass_rows: int) -> list[list[int]]:
    """Return passes with the least rows plus ``pass_rows`` per pass, each within ``capacity`` unless of one unit."""
    count = len(units)
    members = [[unit for unit in range(count) if chosen >> unit & 1] for chosen in range(1 << count)]
    cost = [units.rows(one) + pass_rows for one in members]
    allowed = [len(one) == 1 or cost[number] - pass_rows <= capacity for number, one in enumerate(members)]
    best = [0] * (1 << count)
    first_pass = [0] * (1 << count)
    for left in range(1, 1 << count):
        lowest = left & -left
        others = rest = left ^ lowest
        least = -1
        while True:
            one = rest | lowest
            if allowed[one]:
                score = cost[one] + best[others ^ rest]
                if least < 0 or score < least:
                    least, first_pass[left] = score, one
            if not rest:
                break
            rest = (rest - 1) & others
        best[left] = least
    passes = []
    left = (1 << count) - 1
    while left:
        passes.append(members[first_pass[left]])
        left ^= first_pass[left]
    return passes
