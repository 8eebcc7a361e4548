"""Outputs beside log-probs are priced: what a pass was predicted to need against what the allocator saw."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.builders import completion, tiny_runtime, tokens
from trainer_rank import Request, TrainerRank
from trainer_rank.session import MicroBatch

KINDS: list[dict[str, Any]] = [
    {"top_k": 7},
    {"logits": True, "at": list(range(0, 300, 4))},
    {"hidden_states": True},
    {"top_k": 3, "logits": True, "hidden_states": True, "at": [299, 5, 17, 18]},
]


class Used(torch.autograd.Function):
    """A loss of nothing whose gradient is a whole tensor."""

    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        ctx.like = output.shape, output.dtype
        return output.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        shape, dtype = ctx.like
        return torch.ones(shape, dtype=dtype)


def loss_of(micro_batch: MicroBatch) -> Tensor:
    """A loss that reads every output."""
    found = []
    for result in micro_batch.results:
        top = None if result.top_k is None else result.top_k.logprobs
        for tensor in (result.logprobs, top, result.logits, result.hidden_states):
            if tensor is not None:
                found.append(Used.apply(tensor))
    return torch.stack(found).sum()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(kind))
@pytest.mark.parametrize("labels", [True, False])
@pytest.mark.parametrize(
    ("lora", "recompute", "no_grad"), [(True, "full", False), (False, "none", False), (True, "none", True)]
)
def test_what_was_predicted_is_what_was_observed(
    kind: dict[str, Any], labels: bool, lora: bool, recompute: Any, no_grad: bool
) -> None:
    """With every kind of output, alone and beside labels, under the adapter and all weights: to half a percent."""
    runtime = tiny_runtime(lora=lora, dtype=torch.float32, layers=4, hidden=64, vocabulary=1500, recompute=recompute)
    prompt = tokens(0, 200, 1500)
    requests = []
    for number in range(3):
        row = completion(prompt, tokens(number + 1, 100 + number, 1500), no_grad=no_grad, **kind)
        requests.append(row if labels else Request(tokens=row.tokens, no_grad=no_grad, **kind))
    rank = TrainerRank(runtime, memory_budget="16GiB", caller_bytes_per_token=0, head_chunk_rows=64)
    for _ in range(2):
        for micro_batch in rank.forward_micro_batches(requests):
            predicted = micro_batch.stats.required_bytes
            if not no_grad:
                loss_of(micro_batch).backward()
            assert len(micro_batch.requests) == 3
            del micro_batch
        observed = rank.last_observation
        assert observed is not None
        rank.zero_grad()
    assert predicted >= observed.peak_bytes * 0.995
    assert predicted <= observed.peak_bytes * 1.005
