"""How long passes are predicted to take: the score that plans are compared by, and its fit to measured times.

    rows = packed rows + pass_rows + segment_rows * segments
    time = rows * (3 + again * recomputed / layers)        with gradients: backward counts as two forwards
         = rows                                            without

in forwards of one row through the whole model. ``pass_rows``, ``segment_rows`` and ``again`` are conventions until they
are fitted to the times of this machine's own passes. A fit takes effect between runs, never within one, so that plans
stay reproducible.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from trainer_rank.errors import ConfigError
from trainer_rank.planner.work import PassWork

FEWEST_PASSES: Final = 6
"""Passes of different sizes without which nothing is fitted."""

MOST_ERROR: Final = 0.25
"""Median relative error, each pass predicted from the others, above which a fit is not used."""

MOST_ROWS: Final = 512
"""What a pass or a segment may count for at most: times of a few passes can say anything about what is small."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Predicted time of passes.

    Attributes:
        pass_rows: Packed rows whose time a pass costs by itself.
        segment_rows: Packed rows whose time a segment costs by itself.
        again: Time of recomputing a layer, in forwards of it.
        seconds_per_row: Seconds of one row with gradients and nothing recomputed; None before a fit.
        seconds_per_head_row: Seconds of one row of the vocabulary projection, with gradients; it is the same in every
            plan, so it decides nothing.
        error: Median relative error of the fit, each pass predicted from the others; None before a fit.
    """

    pass_rows: int = 16
    segment_rows: int = 16
    again: float = 1.0
    seconds_per_row: float | None = None
    seconds_per_head_row: float = 0.0
    error: float | None = None

    def time(self, works: Iterable[PassWork], num_layers: int) -> float:
        """Return the predicted time of passes, in forwards of one row through the model."""
        return sum(
            self.rows(work.batch.packed_rows, work.batch.num_segments) * forwards(work, num_layers, self.again)
            for work in works
        )

    def rows(self, packed_rows: int, segments: int) -> int:
        """Return the rows of one pass that its time goes with."""
        return packed_rows + self.pass_rows + self.segment_rows * segments

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Speed:
        """Return the speed that ``to_json`` gave as ``values``."""
        return cls(**{name: values[name] for name in cls.__slots__})


def forwards(work: PassWork, num_layers: int, again: float) -> float:
    """Return how many forwards of the model the time of one of its rows is."""
    if work.no_grad:
        return 1.0
    recomputed = num_layers if work.recomputed is None else work.recomputed
    return 3.0 + again * recomputed / num_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedPass:
    """One pass and how long it took.

    Attributes:
        packed_rows, segments, head_rows: Its size.
        recomputed: Share of its layers that ran again in backward.
        no_grad: Whether it had no backward.
        seconds: Forward, the caller's loss, backward.
    """

    packed_rows: int
    segments: int
    head_rows: int
    recomputed: float
    no_grad: bool
    seconds: float


def fit_speed(passes: Sequence[TimedPass]) -> Speed:
    """Return the speed fitted to measured passes: least relative squares with no negative coefficient.

    Recomputation is told apart where passes differ in it, else it counts as by convention.

    Raises:
        ConfigError: There are too few passes of different sizes, or their times do not follow their sizes.
    """
    sizes = {(one.packed_rows, one.segments, one.head_rows) for one in passes}
    if len(sizes) < FEWEST_PASSES:
        raise ConfigError(
            f"fit-speed: needs passes of at least {FEWEST_PASSES} different sizes, got {len(sizes)}; give it a longer "
            "run, or a configuration to measure with"
        )
    apart = len({one.recomputed for one in passes if not one.no_grad}) > 1
    design, seconds = _design(passes, apart), np.array([one.seconds for one in passes])
    coefficients = _non_negative(design, seconds)
    per_pass, per_row, per_again, per_head_row, per_segment = (float(value) for value in coefficients)
    error = _left_out_error(design, seconds)
    if error > MOST_ERROR or not per_row:
        raise ConfigError(
            f"fit-speed: the times of these {len(passes)} passes do not follow their sizes (median error {error:.0%}, "
            f"must be at most {MOST_ERROR:.0%}); measure on a machine that does nothing else"
        )
    # A segment or a pass costs its own time, whatever of its layers runs again.
    again = 3 * per_again / per_row if apart else 1.0
    return Speed(
        pass_rows=min(MOST_ROWS, round(per_pass / per_row)),
        segment_rows=min(MOST_ROWS, round(per_segment / per_row)),
        again=again,
        seconds_per_row=per_row,
        seconds_per_head_row=per_head_row,
        error=error,
    )


def _design(passes: Sequence[TimedPass], apart: bool) -> NDArray[np.float64]:
    """Return (N, 5): one, rows, recomputed rows, head rows and segments of each pass, a forward alone for a third."""
    rows = []
    for one in passes:
        weight = 1 / 3 if one.no_grad else 1.0
        again = 0.0 if one.no_grad else one.recomputed * one.packed_rows
        work = weight * one.packed_rows + (0.0 if apart else again / 3)
        rows.append([1.0, work, again if apart else 0.0, weight * one.head_rows, weight * one.segments])
    return np.array(rows)


def _non_negative(design: NDArray[np.float64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the coefficients with the least relative squares, none negative, by trying every set of columns.

    The solution is the plain least-squares one on the columns whose coefficients are positive.
    """
    relative, ones = design / seconds[:, None], np.ones(len(seconds))
    best, least = np.zeros(design.shape[1]), np.inf
    for count in range(1, design.shape[1] + 1):
        for columns in combinations(range(design.shape[1]), count):
            found, *_ = np.linalg.lstsq(relative[:, columns], ones, rcond=None)
            left = float(((relative[:, columns] @ found - ones) ** 2).sum())
            if (found >= 0).all() and left < least * (1 - 1e-6) - 1e-15:
                best, least = np.zeros(design.shape[1]), left
                best[list(columns)] = found
    return best


def _left_out_error(design: NDArray[np.float64], seconds: NDArray[np.float64]) -> float:
    """Return the median relative error of each pass predicted from all others."""
    errors = []
    for number in range(len(seconds)):
        others = np.arange(len(seconds)) != number
        predicted = float(design[number] @ _non_negative(design[others], seconds[others]))
        errors.append(abs(predicted / seconds[number] - 1))
    return float(np.median(errors))
