"""Pruning by bounds: a sound one changes nothing, and one that lies is caught by what split admission then does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_rank.memory.bounds import LowerBound
from trainer_rank.planner.rungs import Rung, first_that_fits, first_that_fits_naive

BUDGET = 10_737_418_240
STATIC = 131_072
"""Bytes per packed row without anything learned."""

LEARNED = 4 * STATIC
PROFILE_ROWS = 1000


@dataclass(frozen=True)
class Child:
    """A pair of duplicates of 16,000 tokens in one grad mode, priced from a profile of 1,000 rows at ratio 1."""

    packed_rows: int
    logical_tokens: int = 32_000

    @property
    def output_bytes(self) -> int:
        return 4 * self.logical_tokens


Price = Callable[[Child], int]


def honest(child: Child) -> int:
    """The learned rate stays in force, by logical tokens at the profile's ratio."""
    learned = LEARNED * max(child.packed_rows, child.logical_tokens)
    return 11 * (child.output_bytes + max(STATIC * child.packed_rows, learned)) // 10


def broken(child: Child) -> int:
    """The learned rate ends at 8 times the profile's rows, and the sharing of the layout scales what is left.

    At a fixed ratio it never falls. At fixed tokens it falls as rows grow, so full sharing is no lower bound.
    """
    rows = min(child.packed_rows, 8 * PROFILE_ROWS)
    learned = LEARNED * rows * max(child.packed_rows, child.logical_tokens) // child.packed_rows
    return 11 * (child.output_bytes + max(STATIC * child.packed_rows, learned)) // 10


def ladder(price: Price) -> Iterator[Rung[list[Child]]]:
    """Both pairs unshared, which is the fastest, then both shared; bounded by the price under full sharing."""
    least = LowerBound(2 * price(Child(16_000)))
    for rows in (32_000, 16_000):
        yield Rung(least, lambda rows=rows: [Child(rows), Child(rows)])  # type: ignore[misc]


def total(price: Price) -> Callable[[list[Child]], int]:
    return lambda children: sum(price(child) for child in children)


def refused_by_a_bound(price: Price, budget: int = BUDGET) -> bool:
    """Whether split admission refuses what it admits without pruning: what every bound test asks."""
    pruned = first_that_fits(ladder(price), budget, total(price))
    naive = first_that_fits_naive(ladder(price), budget, total(price))
    return (pruned is None) != (naive is None)


def test_the_bound_that_lied_is_caught_through_split_admission() -> None:
    """9,227,750,400 bytes fit the budget; the full-sharing bound says 18,455,219,200 and would prune them."""
    assert total(broken)([Child(32_000), Child(32_000)]) == 9_227_750_400 < BUDGET
    assert next(ladder(broken)).at_least.num_bytes == 18_455_219_200
    assert refused_by_a_bound(broken)


def test_a_sweep_at_a_fixed_ratio_does_not_catch_it() -> None:
    """Which is why it was found late."""
    sweep = [broken(Child(rows, 2 * rows)) for rows in range(500, 40_000, 250)]
    assert sweep == sorted(sweep)


@pytest.mark.parametrize("budget", [BUDGET, 2 * BUDGET, 4 * BUDGET])
def test_a_price_that_never_falls_as_rows_grow_is_not_refused_by_its_bound(budget: int) -> None:
    """The same ladder, below, at and above what it needs."""
    assert not refused_by_a_bound(honest, budget)


@given(
    needs=st.lists(st.tuples(st.integers(0, 100), st.integers(0, 100)), max_size=6), budget=st.integers(0, 120)
)  # fmt: skip
def test_a_sound_bound_changes_nothing(needs: list[tuple[int, int]], budget: int) -> None:
    """Whatever the choices; with fewer of them worked out."""
    made: list[int] = []

    def rungs() -> Iterator[Rung[int]]:
        for number, (exact, below) in enumerate(needs):
            yield Rung(LowerBound(max(0, exact - below)), lambda number=number: made.append(number) or number)  # type: ignore[misc]

    found = first_that_fits(rungs(), budget, lambda number: needs[number][0])
    worked_out = len(made)
    assert found == first_that_fits_naive(rungs(), budget, lambda number: needs[number][0])
    assert worked_out <= len(made) - worked_out


def test_only_a_lower_bound_rules_a_choice_out() -> None:
    """A choice at the budget's edge is worked out."""
    assert first_that_fits([Rung(LowerBound(10), lambda: 10)], 10, int) == 10
    assert first_that_fits([Rung(LowerBound(11), lambda: pytest.fail("worked out"))], 10, int) is None
