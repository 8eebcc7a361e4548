"""Losses that need a known amount of memory, and the slope of a peak in requests that add no packed row.

Duplicates of one request are computed once, so what each further one adds is the head's and the caller's alone.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.builders import tokens
from trainer_rank.memory import Observation
from trainer_rank.requests import Request
from trainer_rank.session import MicroBatch, Result, TrainerRank
from trainer_rank.training.losses.policy import Sampled, cispo
from trainer_rank.units import KIB

Loss = Callable[[MicroBatch], Tensor]

FIXED_BYTES = 256 * KIB


def summed(micro_batch: MicroBatch) -> Tensor:
    """The sum of all log-probs: next to no memory of the caller's own."""
    return torch.stack([_logprobs(result).sum() for result in micro_batch.results]).sum()


def importance_weighted(micro_batch: MicroBatch) -> Tensor:
    """CISPO, as the library has it."""
    return cispo(micro_batch)


class _Hold(torch.autograd.Function):
    """Keeps ``FIXED_BYTES`` from its forward to its backward."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        ctx.save_for_backward(values.new_empty(FIXED_BYTES, dtype=torch.uint8))
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        assert ctx.saved_tensors
        return grads[0]


def holding(micro_batch: MicroBatch) -> Tensor:
    """A sum that keeps 256 KiB per request until backward."""
    kept: list[Tensor] = [_Hold.apply(_logprobs(result)).sum() for result in micro_batch.results]  # type: ignore[no-untyped-call]
    return torch.stack(kept).sum()


def duplicates(count: int, length: int) -> list[Request]:
    """Return ``count`` times one request of ``length`` tokens with a label each, as sampled for CISPO."""
    ids = tokens(0, length)
    payload = Sampled(advantage=1.0, old_logprobs=np.full(length, -1.0, dtype=np.float32))
    return [Request(tokens=ids, labels=np.roll(ids, -1), payload=payload) for _ in range(count)]


def observe(rank: TrainerRank, requests: list[Request], loss: Loss) -> Observation:
    """Return what one micro-batch of all the requests is measured to need."""
    gc.collect()
    with warnings.catch_warnings():
        # A caller above the charge is what some tests are about.
        warnings.filterwarnings("ignore", message="caller_above_declaration")
        found = []
        for micro_batch in rank.forward_micro_batches(requests):
            loss(micro_batch).backward()
            found.append(micro_batch.stats.requests)
            del micro_batch
    rank.zero_grad()
    assert found == [len(requests)], f"one micro-batch was wanted, got {found}"
    assert rank.last_observation is not None
    return rank.last_observation


def slopes(rank: TrainerRank, length: int, loss: Loss, counts: tuple[int, int]) -> tuple[float, float]:
    """Return bytes per duplicate request, at the peak and live after the forward."""
    fewer, more = (observe(rank, duplicates(count, length), loss) for count in counts)
    assert fewer.packed_rows == more.packed_rows == length
    assert fewer.retained_bytes is not None
    assert more.retained_bytes is not None
    added = counts[1] - counts[0]
    return (more.peak_bytes - fewer.peak_bytes) / added, (more.retained_bytes - fewer.retained_bytes) / added


def _logprobs(result: Result) -> Tensor:
    assert result.logprobs is not None
    return result.logprobs
