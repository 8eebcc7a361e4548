"""The greedy split against every possible one."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_rank.planner.greedy import split_greedily


def fewest_passes(num_units: int, costs: list[int], budget: int) -> int | None:
    """Return the least number of contiguous passes that fit, by trying all; None when some unit cannot fit alone."""
    best: list[int | None] = [0] + [None] * num_units
    for stop in range(1, num_units + 1):
        counts = [
            before + 1
            for start in range(stop)
            if (before := best[start]) is not None and sum(costs[start:stop]) <= budget
        ]
        best[stop] = min(counts, default=None)
    return best[num_units]


costs = st.lists(st.integers(0, 12), max_size=14)


@given(costs, st.integers(0, 30))
def test_no_contiguous_split_has_fewer_passes(costs: list[int], budget: int) -> None:
    """Greedy is optimal in passes when a range inside a fitting range fits."""
    found = split_greedily(len(costs), lambda start, stop: sum(costs[start:stop]) <= budget)
    wanted = fewest_passes(len(costs), costs, budget)
    if isinstance(found, int):
        assert wanted is None
        assert costs[found] > budget
        assert all(cost <= budget for cost in costs[:found])
    else:
        assert len(found) == wanted


@given(costs, st.integers(0, 30))
def test_every_unit_comes_exactly_once_in_order(costs: list[int], budget: int) -> None:
    """Ranges tile the units and each was asked for and fits."""
    asked: dict[tuple[int, int], bool] = {}

    def fits(start: int, stop: int) -> bool:
        asked[start, stop] = sum(costs[start:stop]) <= budget
        return asked[start, stop]

    found = split_greedily(len(costs), fits)
    if not isinstance(found, int):
        assert [unit for start, stop in found for unit in range(start, stop)] == list(range(len(costs)))
        assert all(asked[one] for one in found)


@given(st.integers(1, 12), st.randoms(use_true_random=False))
def test_a_fits_that_is_not_monotone_never_admits_what_it_refused(num_units: int, random: object) -> None:
    """Whatever the answers, a range that is used was answered yes, and a unit reported was answered no alone."""
    answers: dict[tuple[int, int], bool] = {}

    def fits(start: int, stop: int) -> bool:
        return answers.setdefault((start, stop), random.random() < 0.6)  # type: ignore[attr-defined]

    found = split_greedily(num_units, fits)
    if isinstance(found, int):
        assert not answers[found, found + 1]
    else:
        assert all(answers[one] for one in found)
        assert [unit for start, stop in found for unit in range(start, stop)] == list(range(num_units))


def test_nothing_makes_no_pass() -> None:
    """No units, no questions."""
    assert split_greedily(0, lambda start, stop: pytest.fail("asked about nothing")) == []


def test_all_that_fits_at_once_is_asked_once() -> None:
    """The usual case costs one price."""
    asked = []
    assert split_greedily(1000, lambda start, stop: not asked.append((start, stop))) == [(0, 1000)]
    assert asked == [(0, 1000)]


def test_equal_units_take_few_questions() -> None:
    """Each pass starts from the last one's width: a few questions per pass, not one per unit."""
    asked = []

    def fits(start: int, stop: int) -> bool:
        asked.append((start, stop))
        return stop - start <= 16

    ranges = split_greedily(1024, fits)
    assert isinstance(ranges, list)
    assert len(ranges) == 64
    assert len(asked) < 10 * len(ranges)


@given(costs, st.integers(0, 30), st.randoms(use_true_random=False))
def test_a_guess_changes_no_guarantee(costs: list[int], budget: int, random: Random) -> None:
    """Whatever is guessed, ranges tile the units and fit, and a unit is reported only when it cannot fit alone."""

    def fits(start: int, stop: int) -> bool:
        return sum(costs[start:stop]) <= budget

    found = split_greedily(len(costs), fits, guess=lambda start: random.randint(-2, len(costs) + 3))
    if isinstance(found, int):
        assert costs[found] > budget
    else:
        assert [unit for start, stop in found for unit in range(start, stop)] == list(range(len(costs)))
        assert all(fits(*one) for one in found)


@given(costs, st.integers(0, 30))
def test_an_exact_guess_finds_the_fewest_passes(costs: list[int], budget: int) -> None:
    """With a guess that is right, as few passes as without one."""

    def fits(start: int, stop: int) -> bool:
        return sum(costs[start:stop]) <= budget

    def guess(start: int) -> int:
        return max((stop for stop in range(start, len(costs) + 1) if fits(start, stop)), default=start)

    assert split_greedily(len(costs), fits, guess=guess) == split_greedily(len(costs), fits)


def test_a_cut_moves_back_to_where_little_is_shared() -> None:
    """Two conversations of four turns in a range of six turns: the cut falls between them."""
    shared = [0, 90, 120, 150, 10, 90, 120, 150]

    found = split_greedily(8, lambda start, stop: stop - start <= 6, shared=shared)

    assert found == [(0, 4), (4, 8)]


def test_a_cut_never_gives_up_more_than_half_a_range() -> None:
    """The least shared place is near the start of the range; the cut stays in its far half."""
    shared = [0, 1, 50, 40, 60, 60, 60, 60, 60]

    found = split_greedily(9, lambda start, stop: stop - start <= 4, shared=shared)

    assert isinstance(found, list)
    assert found[0] == (0, 3)
