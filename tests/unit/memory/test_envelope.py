"""Prices as the largest of affine functions: monotone by construction, itemised, pruned without a change."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from trainer_rank.errors import EnvelopeError
from trainer_rank.memory import CALL_SIZES, TOTALS, Call, Envelope, PassFeatures, Piece
from trainer_rank.memory.envelope import COLUMNS, prune

CATEGORIES = ("kept", "at work")

coefficients = st.lists(st.integers(0, 5), min_size=2 * len(COLUMNS), max_size=2 * len(COLUMNS))
counts = st.integers(0, 50)


def piece(terms: list[int] | NDArray[np.int64], *, call: str = "", phase: str = "forward") -> Piece:
    return Piece(phase=phase, layer=None, call=call, terms=np.array(terms, dtype=np.int64).reshape(2, len(COLUMNS)))


@st.composite
def pieces(draw: st.DrawFn) -> list[Piece]:
    found = []
    for call in ["", *draw(st.lists(st.sampled_from(["", "root", "view"]), max_size=5))]:
        terms = np.array(draw(coefficients)).reshape(2, len(COLUMNS))
        if not call:
            terms[:, 1 + len(TOTALS) :] = 0
        found.append(piece(terms, call=call, phase=draw(st.sampled_from(["forward", "loss", "backward"]))))
    return found


@st.composite
def features(draw: st.DrawFn) -> PassFeatures:
    made = []
    for kind in draw(st.lists(st.sampled_from(["root", "view"]), max_size=3)):
        made.append(Call(kind=kind, **{name: draw(counts) for name in CALL_SIZES}))
    return PassFeatures(**{name: draw(counts) for name in TOTALS}, calls=tuple(made))


def envelope(pieces: list[Piece]) -> Envelope:
    known = {piece.call for piece in pieces}
    blank = [piece([0] * 2 * len(COLUMNS), call=kind) for kind in ("root", "view") if kind not in known]
    return Envelope(categories=CATEGORIES, pieces=(*pieces, *blank), retained=np.ones(len(COLUMNS), dtype=np.int64))


def naive(pieces: tuple[Piece, ...], one: PassFeatures) -> int:
    """The twin: every piece at every call it belongs to, in plain integers."""
    best = 0
    for piece in pieces:
        for sizes in (
            [(0,) * len(CALL_SIZES)] if not piece.call else [c.sizes for c in one.calls if c.kind == piece.call]
        ):
            row = (1, *one.totals, *sizes)
            best = max(best, sum(int(a) * b for a, b in zip(piece.total.tolist(), row, strict=True)))
    return best


@given(pieces(), st.lists(features(), max_size=4))
def test_many_candidates_at_once_cost_what_each_costs_alone(pieces: list[Piece], found: list[PassFeatures]) -> None:
    """Three ways to the same number: one by one, vectorised, and the naive twin."""
    made = envelope(pieces)
    alone = [made.price(one).required_bytes for one in found]
    assert alone == made.required_bytes(found).tolist() == [naive(made.pieces, one) for one in found]


@given(pieces(), features())
def test_terms_sum_to_the_price_and_retained_lies_within_it(pieces: list[Piece], one: PassFeatures) -> None:
    """The winning piece itemises the price; nothing is summed over pieces."""
    price = envelope(pieces).price(one)
    assert sum(term.num_bytes for term in price.terms) == price.required_bytes
    assert 0 <= price.retained_bytes <= price.required_bytes


@given(pieces(), features(), st.sampled_from(TOTALS), st.integers(1, 9))
def test_the_price_never_falls_when_a_count_of_the_pass_grows(
    pieces: list[Piece], one: PassFeatures, name: str, more: int
) -> None:
    """Hence a bound on features is a bound on the price."""
    made = envelope(pieces)
    larger = replace(one, **{name: getattr(one, name) + more})
    assert made.at_least(one) <= made.at_least(larger)
    assert made.price(larger).required_bytes <= made.at_most(larger).num_bytes


@given(pieces(), features(), st.sampled_from(CALL_SIZES), st.integers(1, 9))
def test_the_price_never_falls_when_a_call_grows_or_is_added(
    pieces: list[Piece], one: PassFeatures, name: str, more: int
) -> None:
    """The same for the sizes of calls."""
    made = envelope(pieces)
    grown = tuple(replace(call, **{name: getattr(call, name) + more}) for call in one.calls)
    added = (*one.calls, Call(kind="root", rows=3))
    for larger in (replace(one, calls=grown), replace(one, calls=added)):
        assert made.price(one).required_bytes <= made.price(larger).required_bytes


@given(pieces(), features())
def test_pruning_changes_no_price(pieces: list[Piece], one: PassFeatures) -> None:
    """Only pieces that can never win go."""
    made = envelope(pieces)
    kept = prune(made.pieces)
    assert naive(kept, one) == naive(made.pieces, one)


def test_pruning_drops_what_another_moment_reaches_everywhere() -> None:
    """Of two equal pieces one stays; a piece of a call goes when one outside calls reaches it at any size."""
    small, large = np.zeros((2, len(COLUMNS)), dtype=np.int64), np.zeros((2, len(COLUMNS)), dtype=np.int64)
    small[0, 1], large[0, 1] = 3, 4
    assert len(prune([piece(large), piece(large), piece(small), piece(small, call="root")])) == 1
    grows = small.copy()
    grows[0, -1] = 1
    assert len(prune([piece(large), piece(grows, call="root")])) == 2


def test_a_kind_of_call_that_was_never_traced_is_refused_by_name() -> None:
    """Nothing is guessed about code that never ran."""
    made = envelope([piece([1] * 2 * len(COLUMNS))])
    one = PassFeatures(**dict.fromkeys(TOTALS, 1), calls=(Call(kind="unheard of"),))
    assert not made.covers(one)
    with pytest.raises(EnvelopeError, match="unheard of"):
        made.price(one)
    with pytest.raises(EnvelopeError, match="unheard of"):
        made.required_bytes([one])


def test_the_callers_bytes_count_from_the_loss_on() -> None:
    """They are in no forward, and they are named."""
    zeros = np.zeros((2, len(COLUMNS)), dtype=np.int64)
    forward, loss = zeros.copy(), zeros.copy()
    forward[0, 0], loss[0, 0] = 1000, 990
    made = envelope([piece(forward), piece(loss, phase="loss")]).with_caller(7)
    one = PassFeatures(**{**dict.fromkeys(TOTALS, 0), "logical_tokens": 10})
    price = made.price(one)
    assert (price.phase, price.required_bytes) == ("loss", 990 + 70)
    assert price.terms[-1].num_bytes == 70
    assert made.price(replace(one, logical_tokens=1)).required_bytes == 1000
