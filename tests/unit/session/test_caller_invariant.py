"""What the ``profile`` pricer supposes of head and caller, measured: 6 KiB per logical token covers both.

On the counting CPU allocator, which counts bytes as asked for, and on a simulated GPU, whose blocks are multiples of
512 bytes. ``tests/gpu/test_caller_invariant.py`` is the same on a real one.

Measured here, bytes per duplicate one-token request at the peak: 164 on the counting allocator (with 32 of them live
after the forward) and 549 on the simulated GPU, nearly all the caller's. Published for
another head, on an H200: 4,616 at the end of its forward and 3,080 live into backward. This library scores the labels
of a chunk together, whichever request they are of, so a request has no blocks of its own but those of the caller.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import Qwen3Config

from tests.builders import tiny_runtime
from tests.callers import Loss, duplicates, holding, importance_weighted, observe, slopes, summed
from trainer_rank import LoraConfig, TrainerRank, TransformersRuntime
from trainer_rank.memory.profile import LOGICAL_CHARGE
from trainer_rank.meters import Simulated, open_meter


def on_the_counting_allocator() -> Iterator[TrainerRank]:
    with open_meter("cpu") as meter:
        assert meter.name == "cpu-counting"
        runtime = tiny_runtime(dtype=torch.float32, recompute="full")
        yield TrainerRank(runtime, meter=meter, verify_backend=False, pricing="profile")


def on_a_simulated_gpu() -> Iterator[TrainerRank]:
    config = Qwen3Config(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=160, vocab_size=64, tie_word_embeddings=False,
    )  # fmt: skip
    runtime = TransformersRuntime.from_config(config, lora=LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    with Simulated("H200") as meter:
        meter.place([*runtime.model.parameters(), *runtime.model.buffers()])
        yield TrainerRank(runtime, meter=meter, pricing="profile")


@pytest.fixture(params=[on_the_counting_allocator, on_a_simulated_gpu], ids=["counting", "simulated"])
def profile_rank(request: pytest.FixtureRequest) -> Iterator[TrainerRank]:
    yield from request.param()


@pytest.mark.parametrize(
    ("loss", "length", "counts"),
    [(summed, 1, (500, 1500)), (importance_weighted, 64, (20, 60)), (importance_weighted, 512, (4, 12)),
     (holding, 64, (10, 30))],
    ids=["head-1", "cispo-64", "cispo-512", "fixed-64"],
)  # fmt: skip
def test_a_further_request_stays_within_the_charge(
    profile_rank: TrainerRank, loss: Loss, length: int, counts: tuple[int, int]
) -> None:
    """Head, loss and backward of a duplicate, which adds no packed row."""
    peak, kept = slopes(profile_rank, length, loss, counts)
    assert 0 < kept <= peak <= LOGICAL_CHARGE * length


def test_a_fixed_cost_on_one_token_requests_exceeds_it(profile_rank: TrainerRank) -> None:
    """Which is why short requests are not priced by packed rows."""
    peak, _ = slopes(profile_rank, 1, holding, (10, 30))
    assert peak > LOGICAL_CHARGE


def test_a_profile_of_long_shared_requests_covers_short_ones(profile_rank: TrainerRank) -> None:
    """16 shared requests of 4,096 tokens teach; 20 shared ones of 64 are admitted above what they then need."""
    observe(profile_rank, duplicates(16, 4096), holding)
    short = duplicates(20, 64)
    (planned,) = profile_rank.plan(short)
    assert planned.admission.price.terms[1].name == "learned rows"
    assert planned.admission.price.required_bytes >= observe(profile_rank, short, holding).peak_bytes
