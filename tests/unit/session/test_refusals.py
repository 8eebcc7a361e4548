"""Requests that cannot fit, among others that do: refused whole, or left out by name; and the largest first."""

from __future__ import annotations

import pytest
import torch

from tests.builders import completion, completions, gradients, negative_sum, run, tokens
from tests.unit.session.conftest import NewRank
from trainer_rank.errors import RequestError, TrainerRankMemoryError
from trainer_rank.requests import AtomicGroup, Request

CAP = 60
FIT = completions([4, 6, 5, 7, 3])
LONG = completion(tokens(50, 40), tokens(51, 45))


def test_a_request_that_cannot_fit_refuses_the_call_unless_told_otherwise(new_rank: NewRank) -> None:
    """Nothing ran; the message names the request."""
    rank = new_rank(max_packed_tokens=CAP)
    batch = [*FIT[:2], LONG, *FIT[2:]]
    with pytest.raises(TrainerRankMemoryError, match="request 2 of 85 tokens cannot run alone") as caught:
        next(rank.forward_micro_batches(batch))
    assert caught.value.refused
    assert all(parameter.grad is None for parameter in rank.runtime.trainable_parameters())


@pytest.mark.parametrize("normalisation", ["token-mean", "sequence-mean", "sum"])
def test_skipped_requests_are_named_and_the_others_are_as_if_alone(new_rank: NewRank, normalisation: str) -> None:
    """Loss and gradient are those of the call without them; each has its index, its length and a reason."""
    rank = new_rank(max_packed_tokens=CAP)
    loss, grads, _ = run(rank, FIT, normalisation=normalisation)
    rank.zero_grad()
    batch = [LONG, *FIT[:3], LONG, *FIT[3:], LONG]
    found, seen = 0.0, []
    micro_batches = rank.forward_micro_batches(batch, on_refuse="skip", normalisation=normalisation)
    for micro_batch in micro_batches:
        part = negative_sum(micro_batch)
        part.backward()
        found += float(part.detach())
        seen += micro_batch.indices
        assert micro_batch.num_trained == sum(request.num_trained for request in FIT)
    assert [(one.index, one.num_tokens) for one in sorted(micro_batches.skipped, key=lambda one: one.index)] == [
        (0, 85), (4, 85), (7, 85),
    ]  # fmt: skip
    assert all("max_packed_tokens is 60" in one.reason for one in micro_batches.skipped)
    assert sorted(seen) == [1, 2, 3, 5, 6]
    assert found == pytest.approx(loss, rel=1e-12)
    for one, other in zip(gradients(rank), grads, strict=True):
        torch.testing.assert_close(one, other)


def test_an_atomic_group_is_skipped_whole(new_rank: NewRank) -> None:
    """Its short member goes with it."""
    rank = new_rank(max_packed_tokens=CAP)
    micro_batches = rank.forward_micro_batches([AtomicGroup([FIT[0], LONG]), FIT[1]], on_refuse="skip")
    assert [micro_batch.indices for micro_batch in micro_batches] == [(2,)]
    assert sorted(one.index for one in micro_batches.skipped) == [0, 1]


def test_a_call_whose_every_request_is_skipped_yields_nothing(new_rank: NewRank) -> None:
    """It says so in ``skipped``."""
    micro_batches = new_rank(max_packed_tokens=CAP).forward_micro_batches([LONG], on_refuse="skip")
    assert list(micro_batches) == []
    assert len(micro_batches.skipped) == 1


def test_another_word_is_refused(new_rank: NewRank) -> None:
    """The field and its values are named."""
    with pytest.raises(RequestError, match="on_refuse must be 'raise' or 'skip', got 'drop'"):
        new_rank().forward_micro_batches(FIT, on_refuse="drop")  # type: ignore[arg-type]


def test_the_largest_micro_batch_runs_first(new_rank: NewRank) -> None:
    """Whatever the order of arrival; indices still tell whose results they are."""
    rank = new_rank(max_packed_tokens=20)
    batch: list[Request] = [Request.next_token(tokens(number, length)) for number, length in enumerate([5, 19, 11, 16])]
    rows = []
    for micro_batch in rank.forward_micro_batches(batch):
        rows.append(micro_batch.stats.required_bytes)
        for index, request in zip(micro_batch.indices, micro_batch.requests, strict=True):
            assert request is batch[index]
    assert len(rows) > 2
    assert rows == sorted(rows, reverse=True)
