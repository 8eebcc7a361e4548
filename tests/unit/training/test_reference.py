"""The reference's log-probabilities: twins with the adapter off, put back where they belong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from trainer_rank.requests import Request
from trainer_rank.training.losses import Preference, Sampled, reference_logprobs
from trainer_rank.training.losses.reference import BASE, with_references


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scores:
    logprobs: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    indices: tuple[int, ...]
    results: list[_Scores]


@dataclass(slots=True)
class OneByOneRank:
    """A rank that scores each label by the sum of the request's tokens, last request first."""

    seen: list[Request] = field(default_factory=list)

    def forward_micro_batches(self, requests: Sequence[Request], *, normalisation: str) -> Iterator[Any]:
        self.seen = list(requests)
        for index in reversed(range(len(requests))):
            labels = requests[index].labels
            assert labels is not None
            scored = torch.where(torch.from_numpy(labels != -100), -float(requests[index].tokens.sum()), 0.0)
            yield _Part(indices=(index,), results=[_Scores(logprobs=scored.double())])


def sequence(*tokens: int, trained: Sequence[int], payload: object = None) -> Request:
    """Return a next-token request."""
    return Request.next_token(list(tokens), trained=list(trained), payload=payload)


def test_twins_run_without_graph_and_adapter() -> None:
    """In the caller's order whatever order they come back in; what scores nothing never runs."""
    rank: Any = OneByOneRank()
    requests = [
        sequence(1, 2, trained=[0, 1], payload="mine"),
        sequence(3, 3, trained=[0, 0]),
        sequence(5, 5, 5, trained=[0, 0, 1]),
        Request(tokens=np.asarray([1, 1])),
    ]
    found = reference_logprobs(rank, requests)
    assert [one.tolist() for one in found] == [[-3.0, 0.0], [0.0, 0.0], [0.0, -15.0, 0.0], [0.0, 0.0]]
    assert {one.dtype for one in found} == {np.dtype(np.float32)}
    assert [(twin.no_grad, twin.adapter, twin.payload) for twin in rank.seen] == [(True, BASE, None)] * 2


def test_nothing_scored_runs_nothing() -> None:
    """Not even an empty call, which would warn."""
    rank: Any = OneByOneRank()
    assert [one.tolist() for one in reference_logprobs(rank, [sequence(1, 2, trained=[0, 0])])] == [[0.0, 0.0]]
    assert rank.seen == []


def test_payloads_receive_them_and_keep_the_rest() -> None:
    """Preferences and samples have a place for them; another payload is refused."""
    rank: Any = OneByOneRank()
    preference = sequence(1, 2, trained=[0, 1], payload=Preference(pair="p", chosen=True))
    old = np.asarray([-1.0, 0.0], dtype=np.float32)
    sample = sequence(4, 4, trained=[0, 1], payload=Sampled(advantage=2.0, old_logprobs=old))
    first, second = (one.payload for one in with_references(rank, [preference, sample]))
    assert (first.pair, first.chosen, first.ref_logprobs.tolist()) == ("p", True, [-3.0, 0.0])
    assert (second.advantage, second.old_logprobs, second.ref_logprobs.tolist()) == (2.0, old, [-8.0, 0.0])
    with pytest.raises(TypeError, match="payload with ref_logprobs is needed, got NoneType"):
        with_references(rank, [sequence(1, 2, trained=[0, 1])])
