"""Passes that fit, when only asking tells what fits: the search for how many rows a pass may have.

Memory is close to affine in packed rows, but not the same for every pass: labels, lengths and the shape of the tree
count too. So passes are planned (``planner.passes``) for a number of rows that is estimated from what was asked so far,
and each of them is asked about. The estimate goes down when one does not fit, and up when all leave room and wider
passes would score better. What still does not fit after a few rounds is planned again by itself.

Every pass that is returned was asked about and fits. A question may cost a dry run, so there are few.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from trainer_rank.planner.pass_bound import bound_passes
from trainer_rank.planner.passes import PASS_ROWS, PassPlan, plan_passes
from trainer_rank.planner.sharing import Sharing

Fill = Callable[[Sequence[int]], float]
"""``fill(units)``: what one pass of these units takes of the room there is, as a fraction. It fits up to 1."""

ROUNDS: Final = 5
"""Plans that are asked about before what does not fit is planned by itself."""

FULL: Final = 0.98
"""Fraction of the room from which on a pass counts as full: wider ones are not looked for."""

MARGIN: Final = 0.995
"""What is taken of an estimate that follows a pass that did not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanQuality:
    """How good a plan is known to be; plans of several groups add up.

    Attributes:
        passes, rows: Of the plan, rows under full sharing.
        bound_passes, bound_rows: What no plan falls below whose passes have at most as many rows as was found to fit.
    """

    passes: int = 0
    rows: int = 0
    bound_passes: int = 0
    bound_rows: int = 0

    @property
    def gap(self) -> float:
        """How far the packed rows may be above the least, as a fraction."""
        return self.rows / self.bound_rows - 1 if self.bound_rows else 0.0

    def __add__(self, other: PlanQuality) -> PlanQuality:
        return PlanQuality(
            passes=self.passes + other.passes,
            rows=self.rows + other.rows,
            bound_passes=self.bound_passes + other.bound_passes,
            bound_rows=self.bound_rows + other.bound_rows,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedPasses:
    """Passes that fit.

    Attributes:
        passes: Units of each, ascending; the passes by their first unit.
        capacity: Packed rows a pass may have, by what was asked; None when everything fits into one.
    """

    passes: tuple[tuple[int, ...], ...]
    capacity: int | None

    def quality(self, units: Sharing) -> PlanQuality:
        """Return how good the passes are, measured against the bound for their capacity."""
        rows = sum(units.rows(one) for one in self.passes)
        if self.capacity is None:
            return PlanQuality(passes=1, rows=rows, bound_passes=1, bound_rows=rows)
        bound = bound_passes(units, self.capacity)
        return PlanQuality(
            passes=len(self.passes), rows=rows, bound_passes=bound.passes, bound_rows=min(rows, bound.rows)
        )


def fit_passes(
    units: Sharing, fill: Fill, *, most_rows: int | None = None, pass_rows: int = PASS_ROWS
) -> FittedPasses | int:
    """Return passes over all units, each of which fits, or a unit that does not fit alone.

    Args:
        units: At least one.
        fill: Asked about units in ascending order.
        most_rows: Hard cap on the packed rows of a pass, which ``fill`` keeps to as well; None for none.
        pass_rows: Rows that a pass counts for beside its own.
    """
    everything = tuple(range(len(units)))
    taken = fill(everything)
    if taken <= 1:
        return FittedPasses(passes=(everything,), capacity=None)
    if len(units) == 1:
        return 0
    return _Search(units, fill, most_rows, pass_rows, taken).run()


class _Search:
    def __init__(self, units: Sharing, fill: Fill, most_rows: int | None, pass_rows: int, taken: float) -> None:
        self._units = units
        self._fill = fill
        self._pass_rows = pass_rows
        whole = units.rows(range(len(units)))
        # Rows with which everything fits, and with which something does not.
        self._low, self._high = 0, whole if most_rows is None else min(whole, most_rows + 1)
        self._cap = self._high
        self._seen: list[tuple[int, float]] = []
        self._note(whole, taken)

    def run(self) -> FittedPasses | int:
        """Return passes that fit, or a unit that cannot."""
        best: PassPlan | None = None
        rejected: PassPlan | None = None
        for _ in range(ROUNDS):
            capacity = self._estimate()
            plan = plan_passes(self._units, capacity, pass_rows=self._pass_rows)
            if best is not None and plan.score >= best.score:
                break
            found = self._ask(plan)
            if isinstance(found, int):
                return found
            if found > 1:
                self._high, rejected = min(self._high, capacity), plan
                continue
            self._low, best = capacity, plan
            if found >= FULL:
                break
        if best is not None:
            return FittedPasses(passes=best.passes, capacity=max(self._low, *best.rows))
        assert rejected is not None, "the first plan either fits or does not"
        return self._repaired(rejected)

    def _ask(self, plan: PassPlan) -> float | int:
        """Return the largest fill of a plan's passes, the first above 1, or a unit that cannot fit alone."""
        fullest = 0.0
        for rows, one in sorted(zip(plan.rows, plan.passes, strict=True), key=lambda pair: (-pair[0], pair[1])):
            taken = self._fill(one)
            self._note(rows, taken)
            if taken > 1 and len(one) == 1:
                return one[0]
            fullest = max(fullest, taken)
            if taken > 1:
                break
        return fullest

    def _note(self, rows: int, taken: float) -> None:
        if math.isfinite(taken) and taken > 0 and rows:
            self._seen.append((rows, taken))

    def _estimate(self) -> int:
        """Return the rows to plan for: where the line through what was asked meets 1, between what is known."""
        low, high = self._low, self._high
        if not self._seen:
            # A cap on rows is all there is to go by; should that not be enough, halves.
            return max(1, high - 1 if high == self._cap else (low + high) // 2)
        # Near the edge passes differ little in anything but their rows.
        near = sorted(self._seen, key=lambda pair: abs(math.log(pair[1])))[:8]
        rows, taken = max(near[:2], key=lambda pair: pair[1] / pair[0])
        estimate = rows / taken
        far_rows, far_taken = near[-1]
        if far_rows != rows and (slope := (far_taken - taken) / (far_rows - rows)) > 0:
            estimate = rows + (1 - taken) / slope
        if self._high and any(taken > 1 for _, taken in self._seen):
            estimate *= MARGIN
        return max(1, min(int(estimate), high - 1) if estimate > low else (low + high) // 2)

    def _repaired(self, plan: PassPlan) -> FittedPasses | int:
        """Return a plan with each of its passes that does not fit planned by itself."""
        passes: list[tuple[int, ...]] = []
        pending = list(plan.passes)
        while pending:
            one = pending.pop()
            if self._fill(one) <= 1:
                passes.append(one)
            elif len(one) == 1:
                return one[0]
            elif len(one) == len(self._units):
                # Its units add no rows of their own, so that no cap on rows takes them apart.
                half = len(one) // 2
                pending += [one[:half], one[half:]]
            else:
                found = fit_passes(self._units.of(one), self._fill_of(one), pass_rows=self._pass_rows)
                if isinstance(found, int):
                    return one[found]
                passes += [tuple(one[number] for number in some) for some in found.passes]
        capacity = max(self._units.rows(one) for one in passes)
        return FittedPasses(passes=tuple(sorted(passes)), capacity=capacity)

    def _fill_of(self, chosen: Sequence[int]) -> Fill:
        """Return the fill of some of these units, by their place among them."""
        return lambda places: self._fill([chosen[place] for place in places])
