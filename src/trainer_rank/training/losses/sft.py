"""Supervised fine-tuning: - sum_i c_i sum_t logp_it."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer_rank.training.losses.base import ScoredBatch


def sft(micro_batch: ScoredBatch) -> Tensor:
    """Return the normalised negative log-likelihood, a scalar with graph; exactly 0 when nothing is scored."""
    terms = [
        -coefficient * result.logprobs.sum()
        for coefficient, result in zip(micro_batch.coefficients, micro_batch.results, strict=True)
        if result.logprobs is not None
    ]
    return torch.stack(terms).sum()
