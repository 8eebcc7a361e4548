"""Loss normalisation over the whole batch."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_rank.errors import RequestError
from trainer_rank.requests import IGNORED, NORMALISATIONS, Request, normaliser


def request(scored: int, weight: float = 1.0) -> Request:
    """Return a request with ``scored`` scored labels and one ignored one."""
    return Request(tokens=[1] * (scored + 1), labels=[2] * scored + [IGNORED], weight=weight)


def test_token_mean_counts_every_token_the_same() -> None:
    """Constant loss 1 per token gives 1; a long request counts by its length."""
    rule = normaliser([request(1), request(3)])
    assert (rule.kind, rule.coefficients, rule.num_trained) == ("token-mean", (0.25, 0.25), 4)


def test_sequence_mean_counts_every_sequence_the_same() -> None:
    """A sequence's tokens share its part."""
    assert normaliser([request(1), request(4)], "sequence-mean").coefficients == (0.5, 0.125)


def test_sum_is_the_weight() -> None:
    """Nothing is divided."""
    assert normaliser([request(1, 2.0), request(4)], "sum").coefficients == (2.0, 1.0)


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [("token-mean", (3 / 5, 1 / 5)), ("sequence-mean", (3 / 4, 1 / 8)), ("sum", (3.0, 1.0))],
)
def test_weights_shift_the_share(kind: str, wanted: tuple[float, ...]) -> None:
    """A request of weight 3 counts as three of its like."""
    assert normaliser([request(1, 3.0), request(2)], kind).coefficients == pytest.approx(wanted)


@pytest.mark.parametrize("kind", NORMALISATIONS)
def test_requests_that_score_nothing_count_in_no_denominator(kind: str) -> None:
    """Inactive and all-masked requests have coefficient 0 and change no other."""
    idle = [Request(tokens=[1, 2]), Request(tokens=[1], labels=[IGNORED])]
    alone, beside = normaliser([request(2), request(3)], kind), normaliser([*idle, request(2), request(3)], kind)
    assert beside.coefficients == (0.0, 0.0, *alone.coefficients)


@pytest.mark.parametrize("kind", NORMALISATIONS)
@pytest.mark.parametrize("requests", [[], [Request(tokens=[1])], [request(0)], [request(2, 0.0)]])
def test_a_batch_without_a_share_has_zero_coefficients(kind: str, requests: list[Request]) -> None:
    """No request, nothing scored or no weight: exact zeros, never a division by zero."""
    rule = normaliser(requests, kind)
    assert rule.coefficients == (0.0,) * len(requests)


@given(
    batch=st.lists(st.tuples(st.integers(0, 5), st.sampled_from([0.0, 0.5, 1.0, 3.0])), min_size=1, max_size=8),
    kind=st.sampled_from(["token-mean", "sequence-mean"]),
)
def test_a_mean_of_ones_is_one(batch: list[tuple[int, float]], kind: str) -> None:
    """With loss 1 on each scored token a mean is 1, whatever the lengths and weights."""
    rule = normaliser([request(*item) for item in batch], kind)
    total = math.fsum(c * scored for c, (scored, _) in zip(rule.coefficients, batch, strict=True))
    assert total == pytest.approx(1.0 if any(scored and weight for scored, weight in batch) else 0.0)
    assert rule.num_trained == sum(scored for scored, _ in batch)


def test_an_unknown_rule_is_refused() -> None:
    """The message lists the rules."""
    with pytest.raises(RequestError, match="one of token-mean, sequence-mean, sum, got 'mean'") as caught:
        normaliser([], "mean")
    assert caught.value.field == "normalisation"
