"""A focal loss: tokens that the model already knows count less, so that training goes where it is still wrong.

    - sum_i c_i sum_t (1 - p_it)^2 log p_it

(Lin and others, "Focal Loss for Dense Object Detection", arXiv 1708.02002, with gamma = 2.) In tool calls most tokens
are copied from the prompt and known from the start; the few that choose a tool or an argument are not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer_rank.session import MicroBatch

GAMMA = 2.0


def focal(micro_batch: MicroBatch) -> Tensor:
    """Return the loss of a micro-batch, a scalar with graph.

    ``logprobs`` is exactly 0 where nothing is trained, and so is each term there. The coefficients are fixed over the
    whole step, so the losses of its micro-batches add up to the same however it is split.
    """
    terms = []
    for coefficient, result in zip(micro_batch.coefficients, micro_batch.results, strict=True):
        # None only for a request without labels, of which training data have none.
        assert result.logprobs is not None
        terms.append(-coefficient * ((1.0 - result.logprobs.exp()) ** GAMMA * result.logprobs).sum())
    return torch.stack(terms).sum()
