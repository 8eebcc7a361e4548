"""What observations add to a price: a one-sided fit of the difference, with an intercept, slopes and a margin.

A price comes from a trace of the code that will run, so what is left to learn is small: what kernels allocate inside,
what a library keeps. It is learned as ``observed - predicted`` of joint observations, never as a ratio of two maxima
seen in different passes: a fixed cost then stays a fixed cost, and one small pass with a large one says nothing about
a large pass.

    extra(rows, tokens) = max(0, intercept + per_row * rows + per_token * tokens) + margin

is, of all such functions with coefficients that are not negative and that no observation exceeds, the one that exceeds
the observations least in sum (``memory.upper_fit``). The margin is what one more observation may be expected to lie
above the highest of n: the range of what the fit leaves over, divided by the n - 3 observations that three coefficients
leave free to differ. Three or fewer leave nothing over, and have none.

Outside what was seen little is known, so little is claimed. A larger pass is charged the same intercept: one small pass
says nothing about growth. A pass with fewer rows or tokens than any that was seen is charged its share of intercept and
margin: one large pass says nothing about what is fixed, and the same tokens on a third of the rows are smaller work.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from trainer_rank.memory.keep import KEPT, fit_of, keep
from trainer_rank.memory.seen import Seen


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """What is added to the price of passes of one signature: a function of the observations it keeps.

    Attributes:
        seen: Those observations, oldest first, at most ``KEPT``.
        intercept, per_row, per_token: Bytes, bytes per packed row and per logical token; none of them negative.
        margin: Bytes for the next observation.
        smallest: Fewest rows and fewest tokens of any.
        enough: Rows, tokens and price of each, and the largest peak of those no larger than it, the least peak first.
    """

    seen: tuple[Seen, ...] = ()
    intercept: float = 0.0
    per_row: float = 0.0
    per_token: float = 0.0
    margin: float = 0.0
    smallest: tuple[int, int] = (0, 0)
    enough: tuple[tuple[int, int, int, int], ...] = ()

    @property
    def is_short(self) -> bool:
        """Whether any observation was short of anything."""
        return bool(self.intercept or self.per_row or self.per_token)

    def extra_bytes(self, packed_rows: int, logical_tokens: int, predicted_bytes: int) -> int:
        """Return what is added for a pass of this size and this price; 0 when no observation was short of anything.

        No pass is charged more than a larger one, or any smaller than that, was seen to need: what ran once is not
        refused when it, or something smaller, comes again. (A larger one is no smaller in rows, tokens and price.)
        """
        if not self.is_short:
            return 0
        rows, tokens = self.smallest
        share = min(1.0, packed_rows / max(1, rows), logical_tokens / max(1, tokens))
        growing = self.per_row * packed_rows + self.per_token * logical_tokens
        extra = math.ceil(growing + share * (self.intercept + self.margin))
        enough = self.enough_bytes(packed_rows, logical_tokens, predicted_bytes)
        return extra if enough is None else min(extra, max(0, enough - predicted_bytes))

    def enough_bytes(self, packed_rows: int, logical_tokens: int, predicted_bytes: int) -> int | None:
        """Return what a pass of this size and this price was seen to have enough with; None when none as large ran."""
        for rows, tokens, predicted, peak in self.enough:
            if rows >= packed_rows and tokens >= logical_tokens and predicted >= predicted_bytes:
                return peak
        return None

    def observe(self, *more: Seen) -> Residual:
        """Return the residual with more observations."""
        return _resting_on(keep(self.seen, more))

    def to_json(self) -> list[list[int]]:
        """Return the observations as plain values."""
        return [one.values for one in self.seen]

    @classmethod
    def from_json(cls, values: Iterable[Sequence[int]]) -> Residual:
        """Return the residual that gave ``values`` as its ``to_json``, the same to the last bit.

        Raises:
            ValueError: One of them is no observation.
        """
        seen = tuple(map(Seen.of, values))
        return _resting_on(seen if len(seen) <= KEPT else keep((), seen))


def fit(seen: Iterable[Seen]) -> Residual:
    """Return the residual of observations."""
    return Residual().observe(*seen)


def _resting_on(seen: tuple[Seen, ...]) -> Residual:
    """Return the residual of observations that ``keep`` returned."""
    if not seen:
        return Residual()
    intercept, per_row, per_token = (float(value) for value in fit_of(seen).coefficients)
    # What was settled or joined is no pass that ran, so it has no share in how far passes differ.
    left = [
        intercept + per_row * one.packed_rows + per_token * one.logical_tokens - max(0, one.missing_bytes)
        for one in seen
        if not one.settled_bytes
    ]
    free = len(left) - 3
    margin = (max(left) - min(left)) / free if (intercept or per_row or per_token) and free > 0 else 0.0
    sizes = np.array([one.size for one in seen], dtype=np.int64)
    peaks = np.array([one.peak_bytes for one in seen], dtype=np.int64)
    most = np.where((sizes[:, None] >= sizes[None]).all(2), peaks, 0).max(1)
    return Residual(
        seen=seen,
        intercept=intercept,
        per_row=per_row,
        per_token=per_token,
        margin=margin,
        smallest=tuple(sizes[:, :2].min(0).tolist()),
        enough=tuple(tuple(row) for row in np.column_stack([sizes, most])[np.argsort(most, kind="stable")].tolist()),
    )
