"""A caller's own loss, priced from a run without data."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.builders import completions, negative_sum, tiny_runtime
from trainer_rank import TrainerRank
from trainer_rank.errors import ConfigError
from trainer_rank.meters.simulated import SimulatedMeter
from trainer_rank.session import MicroBatch

BATCH = completions([40, 33, 25], prompt=30)
WIDTH = 500


def greedy_loss(micro_batch: MicroBatch) -> Tensor:
    """Keep ``WIDTH`` float64 values per token until backward."""
    parts = []
    for result in micro_batch.results:
        assert result.logprobs is not None
        wide = result.logprobs.unsqueeze(-1).expand(-1, WIDTH).exp()
        parts.append((wide * wide).sum())
    return torch.stack(parts).sum()


@pytest.fixture
def rank() -> TrainerRank:
    return TrainerRank(tiny_runtime(), meter=SimulatedMeter("1TiB"), caller_bytes_per_token=0, verify_backend=False)


def test_a_traced_loss_is_in_every_later_price(rank: TrainerRank) -> None:
    """By name, and at least what it keeps."""
    (before,) = rank.plan(BATCH)
    per_token = rank.trace_loss(greedy_loss, BATCH)
    assert 2 * WIDTH * 8 <= per_token <= 6 * WIDTH * 8
    (after,) = rank.plan(BATCH)
    terms = {term.name: term.num_bytes for term in after.admission.price.terms}
    tokens = sum(one.num_tokens for one in BATCH)
    assert terms["caller's loss"] >= per_token * tokens
    assert after.admission.price.required_bytes > before.admission.price.required_bytes


def test_the_price_with_a_traced_loss_covers_what_is_observed() -> None:
    """The promise: the loss the user really runs stays within the price, which is not far above it."""
    with TrainerRank(tiny_runtime(), verify_backend=False).meter as meter:
        rank = TrainerRank(tiny_runtime(), meter=meter, caller_bytes_per_token=0, verify_backend=False)
        rank.trace_loss(greedy_loss, BATCH)
        for micro_batch in rank.forward_micro_batches(BATCH):
            greedy_loss(micro_batch).backward()
            required = micro_batch.stats.required_bytes
        assert rank.last_observation is not None
        assert 0.5 * required <= rank.last_observation.peak_bytes <= required


def test_a_loss_that_needs_little_is_charged_little(rank: TrainerRank) -> None:
    """Far less than the default allowance."""
    assert rank.trace_loss(negative_sum, BATCH) <= 64


def test_a_loss_that_looks_at_values_is_refused_with_the_reason(rank: TrainerRank) -> None:
    """And with what to do instead."""

    def looks(micro_batch: MicroBatch) -> Tensor:
        loss = negative_sum(micro_batch)
        return loss * 2 if loss.item() > 0 else loss

    with pytest.raises(ConfigError, match=r"cannot be traced without data.*caller_bytes_per_token"):
        rank.trace_loss(looks, BATCH)


def test_without_an_active_request_there_is_nothing_to_trace(rank: TrainerRank) -> None:
    """An empty list would price every loss at nothing."""
    with pytest.raises(ConfigError, match="active request"):
        rank.trace_loss(negative_sum, [])
