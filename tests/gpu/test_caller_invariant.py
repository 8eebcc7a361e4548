"""What the ``profile`` pricer supposes of head and caller, on a real CUDA device; see the unit test of this name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Qwen3Config

from tests.callers import Loss, duplicates, holding, importance_weighted, observe, slopes, summed
from tests.gpu.device import CUDA, needs_cuda
from trainer_rank.memory.profile import LOGICAL_CHARGE
from trainer_rank.runtime.transformers import TransformersRuntime
from trainer_rank.session import TrainerRank

pytestmark = needs_cuda


@pytest.fixture
def profile_rank() -> Iterator[TrainerRank]:
    config = Qwen3Config(
        hidden_size=1024, num_hidden_layers=2, num_attention_heads=16, num_key_value_heads=4, head_dim=64,
        intermediate_size=2816, vocab_size=32_000, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    with CUDA:
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj", "down_proj"]))
    rank = TrainerRank(TransformersRuntime(model, recompute="full"), pricing="profile")
    yield rank
    rank.meter.close()


@pytest.mark.parametrize(
    ("loss", "length", "counts"),
    [(summed, 1, (5000, 15_000)), (importance_weighted, 64, (100, 300)), (importance_weighted, 512, (20, 60)),
     (holding, 64, (50, 150))],
    ids=["head-1", "cispo-64", "cispo-512", "fixed-64"],
)  # fmt: skip
def test_a_further_request_stays_within_the_charge(
    profile_rank: TrainerRank, loss: Loss, length: int, counts: tuple[int, int]
) -> None:
    peak, kept = slopes(profile_rank, length, loss, counts)
    assert 0 < kept <= peak <= LOGICAL_CHARGE * length


def test_a_fixed_cost_on_one_token_requests_exceeds_it(profile_rank: TrainerRank) -> None:
    peak, _ = slopes(profile_rank, 1, holding, (50, 150))
    assert peak > LOGICAL_CHARGE


def test_a_profile_of_long_shared_requests_covers_short_ones(profile_rank: TrainerRank) -> None:
    observe(profile_rank, duplicates(16, 4096), holding)
    short = duplicates(20, 64)
    (planned,) = profile_rank.plan(short)
    assert planned.admission.price.required_bytes >= observe(profile_rank, short, holding).peak_bytes
