"""Micro-batches for losses: made of plain log-probabilities, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer_rank.requests import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeScores:
    """What came back for a request."""

    logprobs: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeBatch:
    """A micro-batch of real requests and made-up scores."""

    requests: list[Request]
    results: list[FakeScores]
    coefficients: list[float]


def request(trained: Sequence[bool | int], payload: Any = None, weight: float = 1.0) -> Request:
    """Return a request whose position i is scored where ``trained[i]``."""
    labels = np.where(np.asarray(trained, dtype=bool), 1, -100)
    return Request(tokens=np.ones(len(labels), dtype=np.int64), labels=labels, weight=weight, payload=payload)


def leaf(values: Sequence[float], dtype: torch.dtype = torch.float64) -> Tensor:
    """Return log-probabilities that a gradient can be asked of."""
    return torch.tensor(values, dtype=dtype, requires_grad=True)


def batch(requests: Sequence[Request], logprobs: Sequence[Tensor], coefficients: Sequence[float]) -> FakeBatch:
    """Return a micro-batch of all of them."""
    return FakeBatch(
        requests=list(requests),
        results=[FakeScores(logprobs=one) for one in logprobs],
        coefficients=list(coefficients),
    )


def gradient(tensor: Tensor) -> list[float]:
    """Return a leaf's gradient, which must be there."""
    assert tensor.grad is not None
    found: list[float] = tensor.grad.tolist()
    return found


def partitions(members: tuple[int, ...]) -> list[list[tuple[int, ...]]]:
    """Return every way to part the members."""
    if not members:
        return [[]]
    first, rest = members[0], members[1:]
    found = []
    for size in range(len(rest) + 1):
        for others in combinations(rest, size):
            left = tuple(one for one in rest if one not in others)
            found += [[(first, *others), *tail] for tail in partitions(left)]
    return found
