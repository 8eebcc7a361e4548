"""Prices and how they combine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_rank.memory import ModelFacts, Price, Term, combine


def price(retained: int, transient: int, phase: str = "backward") -> Price:
    """Return a price of two terms."""
    return Price(
        required_bytes=retained + transient,
        retained_bytes=retained,
        terms=(Term(name="kept", num_bytes=retained), Term(name="at work", num_bytes=transient)),
        phase=phase,
    )


prices = st.lists(st.builds(price, st.integers(0, 1000), st.integers(0, 1000)), min_size=1, max_size=6)


def naive(parts: list[Price]) -> int:
    """Return the peak of running each pass with the others' retained bytes beside it, all together at the end."""
    retained = sum(part.retained_bytes for part in parts)
    return max(retained - part.retained_bytes + part.required_bytes for part in parts)


@given(prices)
def test_the_price_of_several_passes_is_the_worst_one_beside_what_the_others_keep(parts: list[Price]) -> None:
    """Retained bytes add, transients do not, and the terms still sum."""
    total = combine(parts)
    assert total.required_bytes == naive(parts)
    assert total.retained_bytes == sum(part.retained_bytes for part in parts)
    assert sum(term.num_bytes for term in total.terms) == total.required_bytes


def test_one_pass_costs_what_it_costs() -> None:
    """A single price comes back as it is."""
    one = price(5, 6)
    assert combine([one]) is one


def test_the_phase_is_that_of_the_pass_with_the_largest_transient() -> None:
    """The peak falls where the worst pass has it."""
    assert combine([price(500, 1, "head"), price(1, 50, "backward")]).phase == "backward"


def test_terms_that_do_not_sum_are_a_programming_error() -> None:
    """A price cannot be made that contradicts itself."""
    with pytest.raises(AssertionError, match="terms must sum"):
        Price(required_bytes=3, retained_bytes=0, terms=(Term(name="a", num_bytes=2),), phase="head")


def test_more_retained_than_required_is_a_programming_error() -> None:
    """What stays is part of the peak."""
    with pytest.raises(AssertionError, match="retained"):
        Price(required_bytes=2, retained_bytes=3, terms=(Term(name="a", num_bytes=2),), phase="head")


def test_the_largest_term_is_named() -> None:
    """Errors point at it."""
    assert price(5, 6).largest_term.name == "at work"


def test_adam_keeps_two_moments_and_a_counter_per_parameter() -> None:
    """Two copies of what is trained, and a float32 step counter for each tensor."""
    facts = ModelFacts(
        family="llama", num_layers=1, hidden_size=1, num_heads=1, num_key_value_heads=1, head_size=1,
        vocabulary_size=1, max_positions=1, dtype="float32", weight_bytes=1000, trainable_bytes=100, num_trainable=3,
        largest_trainable_bytes=60, adapter=None,
    )  # fmt: skip
    assert facts.adam_state_bytes == 2 * 100 + 3 * 4
