"""Price against budget."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainer_rank.admission import Admission, Budget, admit
from trainer_rank.memory import Price, Term
from trainer_rank.units import MIB


def verdict(price_bytes: int, available_bytes: int, *pending: int) -> Admission:
    """Return the admission of a one-term price."""
    price = Price(
        required_bytes=price_bytes,
        retained_bytes=0,
        terms=(Term(name="at work in head", num_bytes=price_bytes),),
        phase="head",
    )
    budget = Budget(budget_bytes=100 * MIB, resident_bytes=60 * MIB, available_bytes=available_bytes)
    return admit(price, budget, tuple(Term(name=f"pending {number}", num_bytes=n) for number, n in enumerate(pending)))


amounts = st.integers(0, 10**12)


@given(amounts, amounts, st.lists(amounts, max_size=3))
def test_a_pass_is_admitted_exactly_when_nothing_is_short(
    price_bytes: int, available_bytes: int, pending: list[int]
) -> None:
    """Charged is price plus pending; short is what of it is not available."""
    found = verdict(price_bytes, available_bytes, *pending)
    assert found.charged_bytes == price_bytes + sum(pending)
    assert found.admitted == (found.short_bytes == 0) == (found.charged_bytes <= available_bytes)
    assert found.short_bytes == max(0, found.charged_bytes - available_bytes)


@given(amounts, amounts, amounts, st.integers(0, 10**6))
def test_more_memory_never_turns_a_pass_away(price_bytes: int, available_bytes: int, pending: int, more: int) -> None:
    """Admission is monotone in what is available and in the price."""
    if verdict(price_bytes, available_bytes, pending).admitted:
        assert verdict(price_bytes, available_bytes + more, pending).admitted
        assert verdict(max(0, price_bytes - more), available_bytes, pending).admitted


def test_the_last_byte_counts() -> None:
    """Exactly what is available is admitted, one byte more is not."""
    assert verdict(70, 100, 30).admitted
    assert verdict(71, 100, 30).short_bytes == 1


def test_the_predicted_peak_is_everything_resident_plus_the_price() -> None:
    """What is pending is not part of this pass's peak."""
    assert verdict(5 * MIB, 40 * MIB, MIB).predicted_peak_bytes == 65 * MIB


def test_the_sum_is_explained_term_by_term() -> None:
    """Every term that costs something, the total, the phase, what is available and how that arose."""
    text = verdict(5 * MIB, 4 * MIB, MIB, 0).explain()
    for part in (
        "needs 6.0 MiB",
        "at work in head 5.0 MiB",
        "pending 0 1.0 MiB",
        "4.0 MiB available",
        "100.0 MiB budget",
    ):
        assert part in text
    assert "60.0 MiB resident" in text
    assert "pending 1" not in text


def test_the_largest_term_may_be_pending() -> None:
    """Optimizer state can be what does not fit."""
    assert verdict(1, 0, 5, 7).largest_term.name == "pending 1"
