"""The function of a pass's size that no observation exceeds and that exceeds the observations least.

    extra(rows, tokens) = intercept + per_row * rows + per_token * tokens        with no negative coefficient

It is a linear programme in three unknowns, solved by trying its corners. An observation that no corner touches follows
from the others: whatever function covers those covers it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import combinations
from typing import Final

import numpy as np
from numpy.typing import NDArray

_ROUNDING: Final = 1e-9
"""Of numbers near 1, which sizes and bytes are scaled to."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UpperFit:
    """The fit, and what it rests on.

    Attributes:
        coefficients: (3,) float64 intercept, bytes per row and bytes per token.
        essential: (N,) bool, the observations that do not follow from the others.
    """

    coefficients: NDArray[np.float64]
    essential: NDArray[np.bool_]


def upper_fit(rows: NDArray[np.float64], tokens: NDArray[np.float64], missing: NDArray[np.float64]) -> UpperFit:
    """Return the fit of (N,) float64 bytes that passes of (N,) sizes were short of; of equally good ones, that which
    grows least. Negative bytes count as 0: a price that was more than enough teaches nothing."""
    missing = np.maximum(0.0, missing)
    if not missing.any():
        return UpperFit(coefficients=np.zeros(3), essential=np.zeros(missing.size, dtype=bool))
    scale = np.array([1.0, max(1.0, rows.max()), max(1.0, tokens.max())])
    unit = float(missing.max())
    sizes = np.column_stack([np.ones(rows.size), rows, tokens]) / scale
    claims = np.column_stack([sizes, missing / unit])
    bounds = _undominated(np.unique(claims[missing > 0], axis=0))
    corners = _corners(bounds)
    exceeded = np.round(corners @ sizes.sum(0), 9)
    growth = np.round(corners[:, 1:].sum(1), 9)
    best = corners[np.lexsort((growth, exceeded))[0]]
    # What rounding leaves below an observation is lifted, so that none is short of a byte.
    best[0] += max(0.0, float((claims[:, 3] - sizes @ best).max()))
    touched = bounds[(np.abs(corners @ bounds[:, :3].T - bounds[:, 3]) < _ROUNDING * 1000).any(0)]
    essential = (claims[:, None] == touched[None]).all(2).any(1)
    return UpperFit(coefficients=best * unit / scale, essential=essential)


def _corners(bounds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return (K, 3), the corners of what satisfies (N, 4) bounds from below and has no negative coefficient."""
    sides = np.vstack([bounds, np.column_stack([np.eye(3), np.zeros(3)])])
    first, second, third = sides[_triples(len(sides))].transpose(1, 0, 2)
    # Where three sides meet, by Cramer's rule: a library's solver takes ten times as long for so many so small ones.
    crosses = [np.cross(one[:, :3], other[:, :3]) for one, other in ((second, third), (third, first), (first, second))]
    determinants = (first[:, :3] * crosses[0]).sum(1)
    meet = np.abs(determinants) > _ROUNDING
    weighed = sum(side[:, 3:] * cross for side, cross in zip((first, second, third), crosses, strict=True))
    corners = weighed[meet] / determinants[meet, None]
    feasible = (corners @ sides[:, :3].T >= sides[:, 3] - _ROUNDING).all(1)
    found: NDArray[np.float64] = np.maximum(corners[feasible], 0.0)
    return found


@cache
def _triples(count: int) -> NDArray[np.intp]:
    """Return (K, 3), the ways to choose three of so many, at most a few dozen."""
    return np.array(list(combinations(range(count), 3)))


def _undominated(claims: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return those of (N, 4) distinct claims that no other makes of no larger size for no fewer bytes."""
    sizes, missing = claims[:, 1:3], claims[:, 3]
    dominated = (sizes[None] <= sizes[:, None]).all(2) & (missing[None] >= missing[:, None])
    # Every claim dominates itself, and claims differ, so no two dominate each other.
    found: NDArray[np.float64] = claims[dominated.sum(1) == 1]
    return found
