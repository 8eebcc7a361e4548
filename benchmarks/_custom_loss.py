"""A loss of one's own, as docs/losses.md shows it: policy gradient with the reward itself, and no clip."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer_rank import MicroBatch


def reinforce(micro_batch: MicroBatch) -> Tensor:
    """Return - sum_i c_i reward_i sum_t logp_it; a custom loss finds the rollout in the payload."""
    terms = [
        -coefficient * request.payload.reward * result.logprobs.sum()
        for coefficient, request, result in zip(
            micro_batch.coefficients, micro_batch.requests, micro_batch.results, strict=True
        )
        if result.logprobs is not None
    ]
    return torch.stack(terms).sum()
