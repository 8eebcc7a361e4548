"""GPUs that are not there: their table, their counters, and the whole loop on ``meta`` against one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from peft import LoraConfig
from transformers import Qwen3Config

from tests.builders import completions, negative_sum
from trainer_rank import TrainerRank, TrainerRankMemoryError, TransformersRuntime
from trainer_rank.errors import ConfigError
from trainer_rank.meters.devices import DEVICES, Device, find_device
from trainer_rank.meters.simulated_device import Simulated
from trainer_rank.units import GIB, MIB

BATCH = completions([30, 20, 10], prompt=40)


def gpu(capacity: int) -> Device:
    return Device(name="a small one", usable_bytes=capacity, multiprocessors=8, context_bytes=MIB, cublas_bytes=0)


@pytest.fixture(scope="module")
def runtime() -> TransformersRuntime:
    config = Qwen3Config(
        hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        intermediate_size=160, vocab_size=500, tie_word_embeddings=False,
    )  # fmt: skip
    return TransformersRuntime.from_config(config, lora=LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))


def weights(runtime: TransformersRuntime) -> list[torch.Tensor]:
    return [*runtime.model.parameters(), *runtime.model.buffers()]


@pytest.fixture
def device(runtime: TransformersRuntime) -> Iterator[Simulated]:
    for parameter in runtime.trainable_parameters():
        parameter.grad = None
    with Simulated(gpu(64 * MIB)) as meter:
        meter.place(weights(runtime))
        yield meter


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("H200", "H200"),
        ("nvidia h200", "H200"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("a100", "A100 80GB"),
        ("NVIDIA-L4", "L4"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("h100 pcie", "H100 PCIe"),
    ],
)
def test_a_device_is_found_under_the_names_people_use(said: str, meant: str) -> None:
    """Case, vendor and form factor do not matter."""
    assert find_device(said).name == meant


def test_an_unknown_device_is_refused_with_the_nearest_names() -> None:
    """The next step is in the message."""
    with pytest.raises(ConfigError, match=r"'H2000'; nearest: .*H200.*in bytes"):
        find_device("H2000")


def test_the_table_is_sane() -> None:
    """A name with a size in it offers a little less than that size."""
    for one in DEVICES:
        assert 0 < one.context_bytes < GIB < one.usable_bytes
        digits = "".join(c for c in one.name.split()[-1] if c.isdigit())
        if one.name.endswith("GB"):
            assert 0.9 * int(digits) * GIB < one.usable_bytes < int(digits) * GIB


def test_a_device_of_so_many_bytes_needs_no_name() -> None:
    """For a GPU that is not in the table."""
    with Simulated("24GiB") as meter:
        assert meter.read().budget_bytes == 24 * GIB


def test_storages_on_meta_are_allocations() -> None:
    """Once per storage, rounded as the allocator rounds, cached when freed, gone when released."""
    with Simulated(gpu(64 * MIB)) as meter:
        one = torch.empty(1000, dtype=torch.float32, device="meta")
        view = one[:10]
        assert meter.read().allocated_bytes == 4096
        del one
        assert meter.read().allocated_bytes == 4096
        del view
        reading = meter.read()
        assert (reading.allocated_bytes, reading.reserved_bytes) == (0, 2 * MIB)
        assert reading.peak_allocated_bytes == 4096
        meter.release_cached()
        assert meter.read().reserved_bytes == 0


def test_available_is_what_is_physically_free_and_cached_blocks_go_at_most_once() -> None:
    """40 live, 90 cached, 8 free: a need of 6 GiB is met by what is free, one of 50 only after a release."""
    with Simulated(gpu(140 * GIB)) as meter:
        live = torch.empty(40 * GIB, dtype=torch.uint8, device="meta")
        cached = torch.empty(90 * GIB, dtype=torch.uint8, device="meta")
        del cached
        free = meter.read().available_bytes
        assert free < 10 * GIB
        assert meter.prepare(6 * GIB).reserved_bytes == 130 * GIB
        after = meter.prepare(50 * GIB)
        assert after.reserved_bytes == 40 * GIB
        assert after.available_bytes == free + 90 * GIB
        del live


def test_too_much_is_out_of_memory_as_on_a_device() -> None:
    """The class a real device raises, and nothing is left allocated."""
    with Simulated(gpu(16 * MIB)) as meter:
        with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 32\.0 MiB"):
            torch.empty(32 * MIB, dtype=torch.uint8, device="meta")
        assert meter.read().allocated_bytes == 0


def train(rank: TrainerRank) -> int:
    count = 0
    for micro_batch in rank.forward_micro_batches(BATCH):
        negative_sum(micro_batch).backward()
        count += 1
    rank.optim_step(lr=1e-3, max_grad_norm=1.0)
    return count


def test_the_whole_loop_runs_on_meta(runtime: TransformersRuntime, device: Simulated) -> None:
    """Weights, forward, loss, backward and optimizer are all on the device's counters; the price holds."""
    facts = runtime.facts
    resting = device.read().allocated_bytes
    assert facts.weight_bytes <= resting < 1.2 * facts.weight_bytes + MIB
    rank = TrainerRank(runtime, meter=device, head_chunk_rows=16)
    assert train(rank) == 1
    assert rank.last_observation is not None
    assert rank.last_observation.peak_bytes > facts.trainable_bytes
    grown = device.read().allocated_bytes - resting
    assert 2 * facts.trainable_bytes <= grown <= 2 * facts.trainable_bytes + 2 * 512 * facts.num_trainable


def test_a_small_device_splits_and_a_smaller_one_refuses(runtime: TransformersRuntime, device: Simulated) -> None:
    """The same admission as on a real device."""
    resting = device.read().resident_bytes
    whole = TrainerRank(runtime, meter=device, head_chunk_rows=16)
    required = next(iter(whole.forward_micro_batches(BATCH))).stats.required_bytes
    device.close()
    for share, outcome in ((0.9, "split"), (0.1, "refused")):
        pending = 3 * runtime.facts.trainable_bytes
        with Simulated(gpu(int(1.01 * (resting + share * required + pending)))) as meter:
            meter.place(weights(runtime))
            rank = TrainerRank(runtime, meter=meter, head_chunk_rows=16)
            if outcome == "refused":
                with pytest.raises(TrainerRankMemoryError, match="Nothing ran"):
                    train(rank)
            else:
                assert train(rank) > 1


def test_memory_that_vanishes_after_admission_is_out_of_memory_in_a_phase(
    runtime: TransformersRuntime, device: Simulated
) -> None:
    """Another process takes the device: the error keeps the admission's numbers and the device's error as cause."""
    rank = TrainerRank(runtime, meter=device, head_chunk_rows=16)
    micro_batch = next(rank.forward_micro_batches(BATCH))
    loss = negative_sum(micro_batch)
    thief: list[torch.Tensor] = []
    with pytest.raises(torch.OutOfMemoryError):
        thief.extend(torch.empty(MIB, dtype=torch.uint8, device="meta") for _ in range(100))
    with pytest.raises(TrainerRankMemoryError) as caught:
        loss.backward()
    assert not caught.value.refused
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
