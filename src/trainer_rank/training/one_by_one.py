"""The speed-up of packed over one-by-one training, measured on the spot through the same rank.

One by one means one request per call, so nothing is shared; kernels, recompute, head and loss are the same, and so are
log-probabilities and gradients up to rounding, which is measured too.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from trainer_rank.requests import Request, normaliser
from trainer_rank.session import TrainerRank
from trainer_rank.training.losses import Loss
from trainer_rank.training.records import ComparisonRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    seconds: float
    packed_rows: int
    logprobs: tuple[Tensor, ...]
    gradients: tuple[Tensor | None, ...]


def compare(rank: TrainerRank, requests: Sequence[Request], loss: Loss, *, normalisation: str) -> ComparisonRecord:
    """Return how packed and one-by-one training of ``requests`` compare; gradients are cleared, weights unchanged.

    Packed runs before and after, and its mean time counts: what else the machine does meanwhile, and whatever still has
    to warm up, then weighs on both.
    """
    coefficients = normaliser(requests, normalisation).coefficients
    # With the coefficient as weight and plain sums, every call computes its share of the whole batch's loss.
    weighted = [
        dataclasses.replace(request, weight=coefficient)
        for request, coefficient in zip(requests, coefficients, strict=True)
    ]
    packed = _run(rank, [weighted], loss)
    alone = _run(rank, [[request] for request in weighted], loss)
    again = _run(rank, [weighted], loss)
    packed_seconds = (packed.seconds + again.seconds) / 2
    return ComparisonRecord(
        requests=len(requests),
        logical_tokens=sum(request.num_tokens for request in requests),
        packed_rows=packed.packed_rows,
        packed_seconds=packed_seconds,
        one_by_one_seconds=alone.seconds,
        speed_up=alone.seconds / packed_seconds,
        logprob_difference=max(
            float((one - other).abs().max()) for one, other in zip(packed.logprobs, alone.logprobs, strict=True)
        ),
        gradient_difference=max(
            _relative(one, other) for one, other in zip(packed.gradients, alone.gradients, strict=True)
        ),
    )


def _run(rank: TrainerRank, calls: Sequence[Sequence[Request]], loss: Loss) -> _Outcome:
    rank.zero_grad()
    rows, logprobs, begin = 0, [], time.perf_counter()
    for requests in calls:
        scored: dict[int, Tensor] = {}
        for micro_batch in rank.forward_micro_batches(requests, normalisation="sum"):
            loss(micro_batch).backward()
            rows += micro_batch.stats.packed_rows
            for index, result in zip(micro_batch.indices, micro_batch.results, strict=True):
                if result.logprobs is not None:
                    scored[index] = result.logprobs.detach()
        logprobs += [scored[index] for index in sorted(scored)]
    seconds = time.perf_counter() - begin
    gradients = tuple(
        None if parameter.grad is None else parameter.grad.detach().clone()
        for parameter in rank.runtime.trainable_parameters()
    )
    rank.zero_grad()
    return _Outcome(seconds=seconds, packed_rows=rows, logprobs=tuple(logprobs), gradients=gradients)


def _relative(one: Tensor | None, other: Tensor | None) -> float:
    """Norm of the difference over the norm of ``other``; 0 when both are 0 or absent, infinite when one is."""
    if one is None or other is None:
        return 0.0 if one is other else math.inf
    difference = float((one - other).norm())
    if not difference:
        return 0.0
    norm = float(other.norm())
    return difference / norm if norm else math.inf
