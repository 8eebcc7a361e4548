"""Passes are found by asking; every pass used was asked about and fits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer_rank.planner.fit import FULL, FittedPasses, fit_passes
from trainer_rank.planner.passes import plan_passes
from trainer_rank.planner.sharing import Sharing


def alone(lengths: Sequence[int]) -> Sharing:
    """Units that share nothing."""
    return Sharing(lengths, [0] * len(lengths))


def group(count: int, prompt: int, own: int) -> Sharing:
    """Units that share a prompt."""
    return Sharing([prompt + own] * count, [0, *[prompt] * (count - 1)])


def test_what_fits_whole_is_asked_about_once() -> None:
    asked: list[Sequence[int]] = []

    def fill(units: Sequence[int]) -> float:
        asked.append(units)
        return 1.0

    assert fit_passes(alone([3] * 1000), fill) == FittedPasses(passes=(tuple(range(1000)),), capacity=None)
    assert len(asked) == 1


@pytest.mark.parametrize("fixed", [0, 2_000, 20_000])
def test_affine_memory_takes_about_one_question_per_pass(fixed: int) -> None:
    """64 groups' worth of rows; whatever part of the room is the same for every pass, the passes are full."""
    units = group(1000, prompt=500, own=120)
    room, asked = fixed + 10_000, 0

    def fill(chosen: Sequence[int]) -> float:
        nonlocal asked
        asked += 1
        return (fixed + units.rows(chosen)) / room

    found = fit_passes(units, fill)
    assert isinstance(found, FittedPasses)
    best = plan_passes(units, 10_000)
    assert len(found.passes) == len(best.passes)
    assert asked <= 2 * len(found.passes) + 3
    assert max(fixed + units.rows(one) for one in found.passes) >= 0.97 * room


def test_a_unit_that_cannot_fit_alone_is_named() -> None:
    units = alone([5, 7, 40, 6])
    assert fit_passes(units, lambda chosen: units.rows(chosen) / 20) == 2
    assert fit_passes(alone([9]), lambda chosen: math.inf) == 0


def test_duplicates_that_add_no_rows_are_taken_apart_all_the_same() -> None:
    """Their outputs need memory, which no cap on rows tells."""
    units = Sharing([50] * 64, [0, *[50] * 63])
    found = fit_passes(units, lambda chosen: len(chosen) / 10)
    assert isinstance(found, FittedPasses)
    assert all(len(one) <= 10 for one in found.passes)
    assert sorted(unit for one in found.passes for unit in one) == list(range(64))


def test_a_cap_on_rows_needs_no_number_from_what_breaks_it() -> None:
    units = alone([7] * 8)
    found = fit_passes(units, lambda chosen: 0.5 if units.rows(chosen) <= 15 else math.inf, most_rows=15)
    assert isinstance(found, FittedPasses)
    assert sorted(map(len, found.passes)) == [2, 2, 2, 2]


@settings(max_examples=200, deadline=None)
@given(
    shape=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), min_size=1, max_size=24),
    per_row=st.integers(0, 5),
    per_unit=st.integers(0, 50),
    fixed=st.integers(0, 50),
    noise=st.integers(0, 30),
    room=st.integers(1, 400),
)
def test_whatever_memory_is_like_every_pass_fits_or_a_unit_does_not(
    shape: list[tuple[int, int]], per_row: int, per_unit: int, fixed: int, noise: int, room: int
) -> None:
    """Neither affine nor monotone: a sum that depends on the very units is part of it."""
    lengths = [length for length, _ in shape]
    shared = [0, *(min(one, *lengths[number - 1 : number + 1]) for number, (_, one) in enumerate(shape) if number)]
    units = Sharing(lengths, shared)
    asked: set[tuple[int, ...]] = set()

    def fill(chosen: Sequence[int]) -> float:
        asked.add(tuple(chosen))
        used = fixed + per_row * units.rows(chosen) + per_unit * len(chosen)
        return (used + sum(unit * unit for unit in chosen) % (noise + 1)) / room

    found = fit_passes(units, fill)
    if isinstance(found, int):
        assert fill([found]) > 1
        return
    assert sorted(unit for one in found.passes for unit in one) == list(range(len(units)))
    assert all(one in asked and fill(one) <= 1 for one in found.passes)


def test_full_is_less_than_all() -> None:
    """Passes are not widened for ever."""
    assert 0.9 < FULL < 1
