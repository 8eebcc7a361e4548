"""What observations add to a price: a one-sided fit of the difference, with an intercept, slopes and a margin.

A price comes from a trace of the code that will run, so what is left to learn is small: what kernels allocate inside,
what a library keeps. It is learned as ``observed - predicted`` of joint observations, never as a ratio of two maxima
seen in different passes: a fixed cost then stays a fixed cost, and one small pass with a large one says nothing about
a large pass.

    extra(rows, tokens) = max(0, intercept + per_row * rows + per_token * tokens) + margin

is, of all such functions with coefficients that are not negative and that no observation exceeds, the one that exceeds
the observations least in sum; of several, the one that grows least. (A linear programme in three unknowns; it is solved
by trying its corners.) The margin is what one more observation may be expected to lie above the highest of n: the range
of what the fit leaves over, divided by the n - 3 observations that three coefficients leave free to differ. Three or
fewer leave nothing over, and have none.

Outside what was seen little is known, so little is claimed. A larger pass is charged the same intercept: one small pass
says nothing about growth. A pass with fewer rows or tokens than any that was seen is charged its share of intercept and
margin: one large pass says nothing about what is fixed, and the same tokens on a third of the rows are smaller work.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Final

import numpy as np
from numpy.typing import NDArray

KEPT: Final = 32
"""Observations kept per signature: those that hold the fit up, and the latest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One pass as it was predicted and as it was observed, together.

    Attributes:
        packed_rows, logical_tokens: Its size.
        predicted_bytes: Price without anything learned.
        peak_bytes: Measured peak of new memory.
    """

    packed_rows: int
    logical_tokens: int
    predicted_bytes: int
    peak_bytes: int

    @property
    def size(self) -> tuple[int, int, int]:
        """Rows, tokens and price."""
        return self.packed_rows, self.logical_tokens, self.predicted_bytes

    @property
    def values(self) -> list[int]:
        """Its fields as plain values, in order."""
        return [self.packed_rows, self.logical_tokens, self.predicted_bytes, self.peak_bytes]

    @property
    def missing_bytes(self) -> int:
        """What the price was short of; negative when it was more than enough."""
        return self.peak_bytes - self.predicted_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """What is added to the price of passes of one signature.

    Attributes:
        seen: The observations it rests on, oldest first, at most ``KEPT``.
        intercept, per_row, per_token: Bytes, bytes per packed row and per logical token; none of them negative.
        margin: Bytes for the next observation.
    """

    seen: tuple[Seen, ...] = ()
    intercept: float = 0.0
    per_row: float = 0.0
    per_token: float = 0.0
    margin: float = field(default=0.0)

    def extra_bytes(self, packed_rows: int, logical_tokens: int, predicted_bytes: int) -> int:
        """Return what is added for a pass of this size and this price; 0 when no observation was short of anything.

        No pass is charged more than a larger one was seen to need: what ran once is not refused when it, or something
        smaller, comes again. (A larger one is no smaller in rows, tokens and price. Of contradictory observations of
        the same size the highest counts.)
        """
        if not any(one.missing_bytes > 0 for one in self.seen):
            return 0
        smallest_rows = min(one.packed_rows for one in self.seen)
        smallest_tokens = min(one.logical_tokens for one in self.seen)
        share = min(1.0, packed_rows / max(1, smallest_rows), logical_tokens / max(1, smallest_tokens))
        growing = self.per_row * packed_rows + self.per_token * logical_tokens
        extra = int(np.ceil(growing + share * (self.intercept + self.margin)))
        asked = (packed_rows, logical_tokens, predicted_bytes)
        most = [
            max(below.peak_bytes for below in self.seen if _covers(one, below.size))
            for one in self.seen
            if _covers(one, asked)
        ]
        return min([extra, *(max(0, peak - predicted_bytes) for peak in most)])

    def observe(self, *more: Seen) -> Residual:
        """Return the residual with more observations; one that is there already counts once."""
        return fit(dict.fromkeys((*self.seen, *more)))

    def to_json(self) -> list[list[int]]:
        """Return the observations as plain values."""
        return [one.values for one in self.seen]

    @classmethod
    def from_json(cls, values: Iterable[Sequence[int]]) -> Residual:
        """Return the residual of the observations that ``to_json`` gave as ``values``."""
        return fit(Seen(packed_rows=a, logical_tokens=b, predicted_bytes=c, peak_bytes=d) for a, b, c, d in values)


def fit(seen: Iterable[Seen]) -> Residual:
    """Return the residual of observations, of which it keeps ``KEPT``."""
    known = tuple(seen)
    coefficients = _upper_fit(known)
    left = _left_over(known, coefficients)
    kept = _kept(known, left)
    short = [one.missing_bytes for one in known if one.missing_bytes > 0]
    free = len(known) - 3
    margin = float(left.max() - left.min()) / free if short and free > 0 else 0.0
    intercept, per_row, per_token = (float(value) for value in coefficients)
    return Residual(seen=kept, intercept=intercept, per_row=per_row, per_token=per_token, margin=margin)


def _covers(one: Seen, size: tuple[int, int, int]) -> bool:
    """Return whether an observation is no smaller than a size in any respect."""
    return all(own >= asked for own, asked in zip(one.size, size, strict=True))


def _design(seen: Sequence[Seen]) -> NDArray[np.float64]:
    return np.array([[1, one.packed_rows, one.logical_tokens] for one in seen], dtype=np.float64).reshape(-1, 3)


def _missing(seen: Sequence[Seen]) -> NDArray[np.float64]:
    # A price that was more than enough teaches nothing: the fit is not pulled below 0.
    return np.array([max(0, one.missing_bytes) for one in seen], dtype=np.float64)


def _left_over(seen: Sequence[Seen], coefficients: NDArray[np.float64]) -> NDArray[np.float64]:
    left: NDArray[np.float64] = _design(seen) @ coefficients - _missing(seen)
    return left


def _upper_fit(seen: Sequence[Seen]) -> NDArray[np.float64]:
    """Return (3,) intercept and slopes: the corner of the feasible set that exceeds the observations least."""
    missing = _missing(seen)
    if not missing.any():
        return np.zeros(3)
    scale = np.array([1.0, max(one.packed_rows for one in seen) or 1, max(one.logical_tokens for one in seen) or 1])
    unit = float(missing.max())
    rows = _undominated(np.unique(np.column_stack([_design(seen) / scale, missing / unit]), axis=0))
    # Each observation from below, and each coefficient from below by 0.
    sides = np.vstack([rows, np.column_stack([np.eye(3), np.zeros(3)])])
    chosen = np.array(list(combinations(range(len(sides)), 3)))
    matrices, values = sides[chosen][:, :, :3], sides[chosen][:, :, 3]
    solvable = np.abs(np.linalg.det(matrices)) > 1e-9
    corners = np.linalg.solve(matrices[solvable], values[solvable][..., None])[..., 0]
    feasible = (corners @ sides[:, :3].T >= sides[:, 3] - 1e-9).all(1)
    corners = np.maximum(corners[feasible], 0.0)
    exceeded = np.round(corners @ (_design(seen) / scale).sum(0), 9)
    growth = np.round(corners[:, 1:].sum(1), 9)
    best = corners[np.lexsort((growth, exceeded))[0]]
    found: NDArray[np.float64] = best * unit / scale
    return found


def _undominated(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the observations (N, 4) that bind: none is short of as much at no larger size."""
    sizes, missing = rows[:, 1:3], rows[:, 3]
    smaller = (sizes[None] <= sizes[:, None]).all(2) & (missing[None] >= missing[:, None])
    # Every row dominates itself, and rows differ, so no two dominate each other.
    found: NDArray[np.float64] = rows[smaller.sum(1) == 1]
    return found


def _kept(seen: Sequence[Seen], left: NDArray[np.float64]) -> tuple[Seen, ...]:
    """Return what is kept of the observations: first those that hold the fit up, then the latest, in order."""
    if len(seen) <= KEPT:
        return tuple(seen)
    number = np.arange(len(seen))
    tightest = set(np.lexsort((-number, np.round(left, 3)))[: KEPT // 2].tolist())
    latest = [index for index in reversed(number.tolist()) if index not in tightest]
    chosen = sorted(tightest | set(latest[: KEPT - len(tightest)]))
    return tuple(seen[index] for index in chosen)
