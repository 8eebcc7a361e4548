"""Which units go into which pass: the least predicted time, in packed rows, under a cap on the rows of a pass.

    score = packed rows of all passes + PASS_ROWS * passes

Bottom-up in the prefix tree. At a node, what lies below it comes as pieces, each to stay in one pass. They are put into
as few bins as can be (``planner.bins``), of the room that the path to the node leaves in a pass; each bin goes up as
one piece, with the segment above it, which its pass computes once. Fewer bins at a node are fewer copies of its path;
at the root, bins are passes. A segment that is worth less than a pass binds its pieces only loosely, into bins of an
eighth, as what it saves must not cost a pass further up.

A few units are solved exactly instead (``planner.exact_passes``), and what is put together bottom-up is improved by
moves of units and merges of passes. The result does not depend on the order in which requests arrive, and is never
worse than cutting tree order greedily. With it comes how far it may be from the best (``planner.pass_bound``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from trainer_rank.planner.bins import fill_bins
from trainer_rank.planner.exact_passes import MOST_EXACT, exact_passes
from trainer_rank.planner.improve import improve_passes
from trainer_rank.planner.pass_bound import PassBound, bound_passes
from trainer_rank.planner.sharing import Sharing
from trainer_rank.planner.speed import Speed

PASS_ROWS: Final = Speed().pass_rows
"""Packed rows whose time a pass costs by itself, by convention."""

_LOOSELY: Final = 8

Nested = int | list["Nested"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassPlan:
    """Passes over units, and how good they are known to be.

    Attributes:
        passes: Units of each pass, ascending; the passes by their first unit.
        rows: Packed rows of each pass under full sharing.
        bound: What no plan falls below.
        pass_rows: Rows that a pass counts for beside its own.
        exact: Whether all plans were compared.
    """

    passes: tuple[tuple[int, ...], ...]
    rows: tuple[int, ...]
    bound: PassBound
    pass_rows: int
    exact: bool

    @property
    def score(self) -> int:
        """Predicted time in packed rows."""
        return sum(self.rows) + self.pass_rows * len(self.passes)

    @property
    def bound_score(self) -> int:
        """Predicted time that no plan falls below."""
        return self.bound.rows + self.pass_rows * self.bound.passes

    @property
    def optimal(self) -> bool:
        """Whether no plan is better, as far as is known."""
        return self.exact or self.score == self.bound_score

    @property
    def gap(self) -> float:
        """How far the score may be above the best, as a fraction of the bound; 0 when no plan is better."""
        return 0.0 if self.optimal or not self.bound_score else self.score / self.bound_score - 1


def plan_passes(units: Sharing, capacity: int, *, pass_rows: int = PASS_ROWS, most_exact: int = MOST_EXACT) -> PassPlan:
    """Return passes over all units, each of at most ``capacity`` packed rows under full sharing.

    A unit that exceeds the capacity has a pass of its own, for the caller to refuse. Up to ``most_exact`` units, all
    plans are compared.

    Raises:
        ValueError: ``capacity`` is below 1, or ``pass_rows`` negative.
    """
    if capacity < 1 or pass_rows < 0:
        raise ValueError(f"capacity must be >= 1 and pass_rows >= 0, got {capacity} and {pass_rows}")
    bound = bound_passes(units, capacity)
    exact = len(units) <= most_exact
    if exact:
        passes = exact_passes(units, capacity, pass_rows)
    else:
        passes = improve_passes(units, _bottom_up(units, capacity, pass_rows), capacity, pass_rows)
        greedy = cut_in_order(units, capacity)
        if _score(units, greedy, pass_rows) < _score(units, passes, pass_rows):
            passes = improve_passes(units, greedy, capacity, pass_rows)
    passes = sorted(passes)
    return PassPlan(
        passes=tuple(tuple(one) for one in passes),
        rows=tuple(units.rows(one) for one in passes),
        bound=bound,
        pass_rows=pass_rows,
        exact=exact,
    )


def cut_in_order(units: Sharing, capacity: int) -> list[list[int]]:
    """Return passes as contiguous runs of tree order, each as long as the capacity allows: the anchor."""
    passes: list[list[int]] = []
    rows = 0
    for unit, length in enumerate(units.lengths):
        own = length - units.shared[unit]
        if passes and rows + own <= capacity:
            passes[-1].append(unit)
            rows += own
        else:
            passes.append([unit])
            rows = length
    return passes


def _score(units: Sharing, passes: list[list[int]], pass_rows: int) -> int:
    return sum(units.rows(one) for one in passes) + pass_rows * len(passes)


def _bottom_up(units: Sharing, capacity: int, pass_rows: int) -> list[list[int]]:
    # Open nodes on the path to the unit before, as (depth, pieces); a piece is (rows below the node, units).
    path: list[tuple[int, list[tuple[int, Nested]]]] = [(0, [])]

    def close(common: int) -> None:
        while path[-1][0] > common:
            depth, pieces = path.pop()
            segment = depth - max(path[-1][0], common)
            room = capacity - depth
            pieces = _bound_together(pieces, room if segment >= pass_rows else room // _LOOSELY)
            if path[-1][0] < common:
                path.append((common, []))
            path[-1][1].extend((rows + segment, members) for rows, members in pieces)

    for unit, length in enumerate(units.lengths):
        close(units.shared[unit])
        if path[-1][0] < length:
            path.append((length, []))
        path[-1][1].append((0, unit))
    close(0)
    return [sorted(_flat(members)) for _, members in _bound_together(path[0][1], capacity)]


def _bound_together(pieces: list[tuple[int, Nested]], room: int) -> list[tuple[int, Nested]]:
    if len(pieces) < 2:
        return pieces
    bins = fill_bins([rows for rows, _ in pieces], room)
    return [(sum(pieces[number][0] for number in one), [pieces[number][1] for number in one]) for one in bins]


def _flat(members: Nested) -> list[int]:
    flat: list[int] = []
    pending = [members]
    while pending:
        one = pending.pop()
        if isinstance(one, int):
            flat.append(one)
        else:
            pending += one
    return flat
