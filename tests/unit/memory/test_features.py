"""Which calls of a pass can matter."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainer_rank.memory import CALL_SIZES, TOTALS, Call, PassFeatures, largest_calls, reaches

sizes = st.tuples(*(st.integers(0, 4) for _ in CALL_SIZES))
calls = st.lists(st.builds(lambda kind, found: call(kind, *found), st.sampled_from("ab"), sizes), max_size=8)


def call(kind: str, *found: int) -> Call:
    return Call(kind=kind, **dict(zip(CALL_SIZES, found, strict=False)))


def test_a_call_that_another_of_its_kind_reaches_in_every_size_is_dropped() -> None:
    """Sizes of different kinds are not compared: their bytes per row differ."""
    kept = largest_calls((call("a", 5, 5), call("a", 5, 3), call("a", 2, 9), call("b", 1, 1)))
    assert kept == (call("a", 5, 5), call("a", 2, 9), call("b", 1, 1))


def naive(found: list[Call]) -> set[Call]:
    """The twin: compare all pairs."""

    def beaten(one: Call) -> bool:
        return any(
            other != one and other.kind == one.kind and all(a >= b for a, b in zip(other.sizes, one.sizes, strict=True))
            for other in found
        )

    return {one for one in found if not beaten(one)}


@given(calls)
def test_the_largest_calls_are_those_of_the_naive_comparison(found: list[Call]) -> None:
    """Equal calls count once, and the order does not matter."""
    kept = largest_calls(tuple(found))
    assert set(kept) == naive(found)
    assert len(set(kept)) == len(kept)
    assert largest_calls(tuple(reversed(found))) == kept


def test_a_pass_reaches_another_in_every_count_and_call_by_call() -> None:
    """One count less, or one call that none of its kind reaches, and it does not."""

    def features(count: int, *found: Call) -> PassFeatures:
        return PassFeatures(**dict.fromkeys(TOTALS, count), calls=found)

    assert reaches(features(3, call("a", 5, 2), call("a", 1, 9)), features(3, call("a", 5, 1)))
    assert not reaches(features(2, call("a", 9, 9)), features(3))
    assert not reaches(features(3, call("a", 5, 2), call("a", 1, 9)), features(3, call("a", 5, 9)))
    assert not reaches(features(3, call("a", 9, 9)), features(3, call("b", 1, 1)))
