"""Prices of passes on a real CUDA device: they cover what is needed, and running out all the same is no disaster."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Qwen3Config

from tests.gpu.device import CUDA, needs_cuda, peak_requested_bytes, requested_bytes
from trainer_rank.errors import TrainerRankMemoryError
from trainer_rank.executor.dry_run import DryRunPricer
from trainer_rank.memory import Price, Term
from trainer_rank.planner import PassWork
from trainer_rank.prefix import Layout
from trainer_rank.requests import Request
from trainer_rank.runtime.transformers import TransformersRuntime
from trainer_rank.session import MicroBatch, TrainerRank
from trainer_rank.units import MIB

pytestmark = needs_cuda

VOCABULARY = 32000


def small_runtime(dtype: torch.dtype, *, recompute: Any, lora: bool = True) -> TransformersRuntime:
    """Return four layers of a Qwen3 with grouped-query heads on the device."""
    config = Qwen3Config(
        hidden_size=1024,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        intermediate_size=2816,
        vocab_size=VOCABULARY,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    with CUDA:
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
        if lora:
            model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj", "down_proj"]))
    return TransformersRuntime(model, recompute=recompute)


def requests(prompt: int, *branches: int) -> list[Request]:
    """Return requests that share a random prompt."""
    draw = np.random.default_rng(0)
    head = draw.integers(0, VOCABULARY, prompt)
    return [Request.next_token(np.concatenate([head, draw.integers(0, VOCABULARY, length)])) for length in branches]


def step(rank: TrainerRank, batch: Sequence[Request]) -> MicroBatch:
    """Run one batch that fits in one micro-batch, forward and backward; return it."""
    (micro_batch,) = (_backward(each) for each in rank.forward_micro_batches(batch))
    return micro_batch


def _backward(micro_batch: MicroBatch) -> MicroBatch:
    found = [result.logprobs.sum() for result in micro_batch.results if result.logprobs is not None]
    torch.stack(found).sum().backward()
    return micro_batch


@pytest.mark.parametrize("recompute", ["full", "none"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("lora", [True, False], ids=["adapter", "all weights"])
def test_a_price_is_what_the_pass_needs(dtype: torch.dtype, recompute: Any, lora: bool) -> None:
    """Within 3 % of the bytes asked for, and, with 5 % for the rounding of blocks, of the bytes allocated."""
    rank = TrainerRank(
        small_runtime(dtype, recompute=recompute, lora=lora), layout=Layout.full_sharing(), caller_bytes_per_token=0
    )
    batch = requests(1024, *[256] * 6, 700)
    step(rank, batch)
    rank.zero_grad()
    gc.collect()
    before = requested_bytes()
    micro_batch = step(rank, batch)
    required = micro_batch.stats.required_bytes
    assert peak_requested_bytes() - before == pytest.approx(required, rel=0.03)
    assert micro_batch.observed is not None
    assert micro_batch.observed.peak_bytes <= required * 1.05


def test_running_out_inside_an_admitted_pass_is_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass admitted on too low a price raises the library's error and keeps gradients; a smaller one then runs."""
    runtime = small_runtime(torch.bfloat16, recompute="full")
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(CUDA)
    rank = TrainerRank(runtime, memory_budget=int((total - free + 512 * MIB) / 0.97), layout=Layout.full_sharing())
    step(rank, requests(64, 16, 16))
    grads = [parameter.grad.clone() for parameter in runtime.trainable_parameters() if parameter.grad is not None]
    honest = DryRunPricer.price

    def too_low(self: DryRunPricer, work: PassWork) -> Price:
        term = Term(name="too low", num_bytes=MIB)
        return replace(honest(self, work), required_bytes=MIB, retained_bytes=0, terms=(term,))

    with monkeypatch.context() as patch:
        patch.setattr(DryRunPricer, "price", too_low)
        with pytest.raises(TrainerRankMemoryError) as caught:
            step(rank, requests(24_000, *[512] * 16))
    assert not caught.value.refused
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    kept = [parameter.grad for parameter in runtime.trainable_parameters()]
    assert all(now is not None and torch.equal(now, then) for now, then in zip(kept, grads, strict=True))
    del caught
    step(rank, requests(64, 16, 16))
    rank.meter.close()
