"""Predicted times: the convention, and coefficients found again in times made from them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer_rank.errors import ConfigError
from trainer_rank.planner.speed import MOST_ROWS, Speed, TimedPass, _non_negative, fit_speed


def timed(*, recomputed: float | None = 1.0, noise: float = 0.0, count: int = 24, **true: float) -> list[TimedPass]:
    """Passes whose seconds follow the model."""
    draw = np.random.default_rng(0)
    found = []
    for number in range(count):
        rows, segments, head = int(draw.integers(50, 4000)), int(draw.integers(1, 60)), int(draw.integers(1, 2000))
        share = recomputed if recomputed is not None else float(number % 3) / 2
        seconds = (
            true["per_pass"] + true["per_row"] * rows * (1 + true["again"] * share / 3)
            + true["per_segment"] * segments + true["per_head_row"] * head
        ) * (1 + noise * float(draw.standard_normal()))  # fmt: skip
        found.append(
            TimedPass(packed_rows=rows, segments=segments, head_rows=head, recomputed=share, no_grad=False,
                      seconds=seconds)
        )  # fmt: skip
    return found


TRUE = {"per_pass": 0.05, "per_row": 1e-3, "again": 0.7, "per_segment": 2e-3, "per_head_row": 4e-4}


def test_coefficients_are_found_again() -> None:
    """Exactly from exact times of passes that differ in how much is recomputed."""
    found = fit_speed(timed(recomputed=None, **TRUE))
    assert found.seconds_per_row == pytest.approx(1e-3, rel=1e-6)
    assert found.again == pytest.approx(0.7, rel=1e-6)
    assert found.seconds_per_head_row == pytest.approx(4e-4, rel=1e-6)
    assert (found.pass_rows, found.segment_rows) == (50, 2)
    assert found.error == pytest.approx(0, abs=1e-9)


def test_where_all_passes_recompute_alike_recompute_counts_by_convention() -> None:
    """It cannot be told from the rest."""
    found = fit_speed(timed(recomputed=1.0, **{**TRUE, "again": 1.0}))
    assert found.again == 1.0
    assert found.seconds_per_row == pytest.approx(1e-3, rel=1e-6)


def test_noise_moves_them_a_little() -> None:
    found = fit_speed(timed(recomputed=None, noise=0.03, count=60, **TRUE))
    assert found.seconds_per_row == pytest.approx(1e-3, rel=0.1)
    assert found.error is not None
    assert 0 < found.error < 0.06


def test_what_a_pass_counts_for_is_bounded() -> None:
    """A machine on which starting a pass takes seconds must not put everything into one."""
    assert fit_speed(timed(**{**TRUE, "per_pass": 100.0})).pass_rows == MOST_ROWS


def test_times_that_follow_nothing_are_refused() -> None:
    draw = np.random.default_rng(1)
    wild = [replace(one, seconds=float(draw.uniform(0.001, 10))) for one in timed(**TRUE)]
    with pytest.raises(ConfigError, match=r"do not follow their sizes .* on a machine that does nothing else"):
        fit_speed(wild)


def test_a_few_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 6 different sizes, got 1"):
        fit_speed([timed(count=1, **TRUE)[0]] * 30)


def test_a_speed_goes_to_json_and_back() -> None:
    found = fit_speed(timed(recomputed=None, **TRUE))
    assert Speed.from_json(found.to_json()) == found
    assert Speed.from_json(Speed().to_json()) == Speed()


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6))
def test_no_point_of_a_grid_has_less_squares(seed: int) -> None:
    """The naive twin: non-negative coefficients on a grid around the solution."""
    draw = np.random.default_rng(seed)
    design, seconds = draw.uniform(0, 1, (8, 2)), draw.uniform(0.1, 1, 8)
    found = _non_negative(design, seconds)
    assert (found >= 0).all()

    def squares(coefficients: np.ndarray) -> float:
        return float(((design @ coefficients / seconds - 1) ** 2).sum())

    grid = np.linspace(0, 3, 61)
    naive = min(squares(np.array([a, b])) for a in grid for b in grid)
    assert squares(found) <= naive + 1e-12
