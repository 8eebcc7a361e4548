"""A dry run for a CUDA device on a machine that has none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Qwen3Config

from trainer_rank.executor.dry_run import DryRunPricer
from trainer_rank.memory import Price
from trainer_rank.planner import pass_work
from trainer_rank.prefix import Layout
from trainer_rank.requests import Request
from trainer_rank.runtime.transformers import TransformersRuntime


def price(dtype: torch.dtype, device: str, *branches: int) -> Price:
    """Return the price of a pass of one prompt and these branches, for a model that exists on ``meta`` only."""
    config = Qwen3Config(
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=64,
        vocab_size=100,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    runtime = TransformersRuntime(model, recompute="full", stands_for=torch.device(device))
    draw = np.random.default_rng(0)
    prompt = draw.integers(0, 100, 60)
    # Each branch begins with a token of its own and repeats it, so that none share more than the prompt.
    batch = [
        Request.next_token(np.concatenate([prompt, np.full(length, number)])) for number, length in enumerate(branches)
    ]
    work = pass_work(batch, range(len(batch)), Layout.full_sharing())
    return DryRunPricer(runtime, head_chunk_rows=64, caller_bytes_per_token=0).price(work)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_pass_for_cuda_has_a_price(dtype: torch.dtype) -> None:
    """Nothing of it needs the device."""
    assert price(dtype, "cuda", 9, 20, 70).required_bytes > 0


def test_the_price_is_that_of_the_devices_own_kernels() -> None:
    """CUDA's flash backward pads each short branch to 128 rows of 4 heads of 64 float32; the CPU's does not."""
    branches, padded_bytes = [2] * 100, 100 * 128 * 4 * 64 * 4
    assert price(torch.bfloat16, "cuda", *branches).required_bytes > padded_bytes
    assert price(torch.bfloat16, "cpu", *branches).required_bytes < padded_bytes
