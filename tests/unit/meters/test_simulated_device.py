"""GPUs that are not there: their table, their counters, and the whole loop on ``meta`` against one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from peft import LoraConfig
from transformers import Qwen3Config

from tests.builders import completions, negative_sum
from trainer_rank import TrainerRank, TrainerRankMemoryError, TransformersRuntime
from trainer_rank.errors import ConfigError, MeterError
from trainer_rank.executor.recorder import AllocationRecorder
from trainer_rank.memory import AllocatorSettings, CachingAllocator, replay
from trainer_rank.meters import DEVICES, Device, Simulated, find_device
from trainer_rank.meters.simulated_device import paused
from trainer_rank.meters.waste import CUT_SEGMENTS, EXPANDABLE_SEGMENTS, SEGMENTS_BYTES
from trainer_rank.units import GIB, KIB, MIB

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
        ("a100-40", "A100 40GB"),
        ("A100 80GB", "A100 80GB"),
        ("H200 141GB", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("Tesla V100-SXM2-32GB", "V100 32GB"),
        ("tesla t4", "T4"),
    ],
)
def test_a_device_is_found_under_the_names_people_use(said: str, meant: str) -> None:
    """Case, vendor and form factor do not matter."""
    assert find_device(said).name == meant


def test_an_unknown_device_is_refused_with_the_nearest_names() -> None:
    """The next step is in the message."""
    with pytest.raises(ConfigError, match=r"'H2000'; nearest: .*H200.*in bytes"):
        find_device("H2000")


@pytest.mark.parametrize("said", ["A40", "A10", "RTX 4080", "", "MI300X"])
def test_a_device_that_only_looks_like_one_is_not_taken_for_it(said: str) -> None:
    """An A40 is no A6000 and an A10 no A10G."""
    with pytest.raises(ConfigError, match="nearest: "):
        find_device(said)


def test_the_table_says_where_its_figures_are_from() -> None:
    """Two devices were measured; the others quote what was seen, and lie at or below all of it."""
    assert {one.name for one in DEVICES if one.measured} == {"A100 40GB", "L4"}
    quoted = 0
    for one in DEVICES:
        assert one.usable_source != gpu(GIB).usable_source
        _, _, errors = one.usable_source.partition("errors: ")
        for figure in errors.partition(" GiB")[0].split(", ") if errors else []:
            assert one.usable_bytes <= float(figure) * GIB
            quoted += 1
    assert quoted > 20


def test_the_table_is_sane() -> None:
    """A name with a size in it offers a little less than that size."""
    assert len({one.name for one in DEVICES}) == len(DEVICES) == 16
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
    with Simulated(gpu(140 * GIB), waste_fraction=0.0) as meter:
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


def test_free_plus_cached_is_never_admitted() -> None:
    """40 GiB live, 130 reserved, 8 free, no cached block above 3: the cache cannot serve 9 GiB, nor be released."""
    total, mib = 139 * GIB + MIB, 1024
    with Simulated(gpu(total)) as meter:
        whole = [torch.empty(4 * mib, MIB, dtype=torch.uint8, device="meta") for _ in range(30)]
        whole.clear()
        split = [torch.empty(n * mib, MIB, dtype=torch.uint8, device="meta") for _ in range(30) for n in (1, 3)]
        live = split[::2]
        split.clear()
        live.append(torch.empty(10 * mib, MIB, dtype=torch.uint8, device="meta"))
        meter.occupy(139 * GIB - 130 * GIB - 8 * GIB)
        reading = meter.read()
        assert (reading.allocated_bytes, reading.reserved_bytes) == (40 * GIB, 130 * GIB)
        assert reading.available_bytes == 8 * GIB - reading.reserve_bytes
        asked = meter.prepare(9 * GIB)
        assert (asked.reserved_bytes, asked.available_bytes) == (130 * GIB, reading.available_bytes)
        with pytest.raises(torch.OutOfMemoryError, match=r"9\.00 GiB.*8\.00 GiB is free.*130\.00 GiB reserved"):
            live.append(torch.empty(9 * mib, MIB, dtype=torch.uint8, device="meta"))
        assert meter.num_alloc_retries == 1
        live.append(torch.empty(6 * mib, MIB, dtype=torch.uint8, device="meta"))
        assert meter.read().available_bytes < 2 * GIB


def test_a_retry_releases_the_cache_first() -> None:
    """As torch's allocator does: 10 MiB cached are given back when 12 are asked for and 4 are free."""
    with Simulated(gpu(15 * MIB)) as meter:
        cached = torch.empty(10 * MIB, dtype=torch.uint8, device="meta")
        del cached
        kept = torch.empty(12 * MIB, dtype=torch.uint8, device="meta")
        assert (meter.num_alloc_retries, meter.read().reserved_bytes) == (1, kept.nbytes)


def test_the_budget_is_a_cap_from_the_first_admission_on() -> None:
    """What is placed before may exceed it, as weights loaded before a meter opens; what comes after may not."""
    with Simulated(gpu(65 * MIB), "33MiB", waste_fraction=0.0) as meter:
        weights = torch.empty(20 * MIB, dtype=torch.uint8, device="meta")
        reading = meter.prepare()
        assert reading.budget_bytes == 33 * MIB
        assert reading.available_bytes == 33 * MIB - MIB - weights.nbytes - reading.reserve_bytes
        with pytest.raises(torch.OutOfMemoryError, match="allowed"):
            torch.empty(20 * MIB, dtype=torch.uint8, device="meta")
        assert torch.empty(10 * MIB, dtype=torch.uint8, device="meta").is_meta


def test_a_memory_fraction_is_honoured_in_what_is_available() -> None:
    """A setting of the allocator limits what an admission may hand out."""
    with Simulated(gpu(65 * MIB), settings=AllocatorSettings(memory_fraction=0.5), waste_fraction=0.0) as meter:
        assert meter.read().available_bytes == 32 * MIB - meter.read().reserve_bytes


@pytest.mark.parametrize(("expandable", "share"), [(False, CUT_SEGMENTS), (True, EXPANDABLE_SEGMENTS)])
def test_what_the_allocator_may_waste_is_not_offered(expandable: bool, share: float) -> None:
    """Live bytes up to what is offered, and the waste that goes with them, fill the device less its reserve."""
    settings = AllocatorSettings(expandable_segments=expandable)
    with Simulated(gpu(64 * MIB), settings=settings) as meter, Simulated(gpu(64 * MIB), waste_fraction=0.0) as bare:
        found, whole = meter.read(), bare.read()
        assert 0 <= whole.available_bytes - SEGMENTS_BYTES - found.available_bytes * (1 + share) < 2
        assert found.available_bytes + found.reserve_bytes == whole.available_bytes + whole.reserve_bytes


def test_a_library_workspace_is_kept_from_the_allocator() -> None:
    """The context is resident; cuBLAS's workspace is in the reserve, and no tensor can have it."""
    with Simulated("H200", waste_fraction=0.0) as meter:
        reading = meter.read()
        assert (reading.reserved_bytes, reading.resident_bytes) == (0, 512 * MIB)
        assert reading.available_bytes == reading.budget_bytes - reading.resident_bytes - reading.reserve_bytes
        assert reading.reserve_bytes == reading.budget_bytes // 100 + 32 * MIB
        left = reading.budget_bytes - reading.resident_bytes - 32 * MIB
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(left + MIB, dtype=torch.uint8, device="meta")
        assert torch.empty(left - 2 * MIB, dtype=torch.uint8, device="meta").is_meta


@pytest.mark.parametrize(
    ("device", "budget", "message"),
    [
        ("H200", "200GiB", r"memory_budget must not exceed the device's memory, got 200\.00 GiB on H200"),
        (-1, None, "device must not be negative"),
        ("24 apples", None, "device must be a number of bytes"),
        ("H200", "lots", "memory_budget must be a number of bytes"),
    ],
)
def test_malformed_sizes_are_refused(device: str | int, budget: str | None, message: str) -> None:
    """By name of the argument."""
    with pytest.raises(ValueError, match=message):
        Simulated(device, budget)


def test_a_device_that_its_context_fills_has_nothing_to_give() -> None:
    """No error before something is asked of it."""
    with Simulated("100MiB") as meter:
        assert meter.read().available_bytes == 0
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(1, device="meta")


def test_what_another_process_takes_is_gone_until_it_is_given_back() -> None:
    """It counts as resident, and only what is physically free can be taken."""
    with Simulated(gpu(64 * MIB), waste_fraction=0.0) as meter:
        free = meter.read().available_bytes
        meter.occupy(20 * MIB)
        assert (meter.read().available_bytes, meter.read().resident_bytes) == (free - 20 * MIB, 21 * MIB)
        with pytest.raises(torch.OutOfMemoryError, match=r"50\.0 MiB"):
            meter.occupy(50 * MIB)
        meter.occupy(-20 * MIB)
        assert meter.read().available_bytes == free


def test_a_dry_run_allocates_nothing() -> None:
    """What runs while the device is paused is not on it."""
    with Simulated(gpu(64 * MIB)) as meter, paused():
        assert torch.empty(MIB, device="meta").is_meta
        assert meter.read().peak_allocated_bytes == 0


def test_a_closed_device_says_so() -> None:
    """Reading after close is an error, closing twice is not."""
    with Simulated("24GiB") as meter:
        pass
    meter.close()
    with pytest.raises(MeterError, match="closed"):
        meter.read()


def step_with_tied_weights() -> None:
    """Two large gradients of one tensor, which autograd adds up in place."""
    weight, hidden = torch.ones(5120, 64, device="meta").requires_grad_(), torch.ones(16, 64, device="meta")
    ((hidden @ weight.t()) @ weight).sum().backward()


def test_the_device_sees_what_a_dry_run_records() -> None:
    """Same storages in the same order: the peaks are those of the replayed trace, gradients summed in place."""
    recorder = AllocationRecorder(torch.device("meta"), torch.device("cuda"))
    with recorder:
        step_with_tied_weights()
    expected = replay(recorder.trace(num_layers=1), CachingAllocator(GIB))
    with Simulated(gpu(GIB)) as meter:
        step_with_tied_weights()
        reading = meter.read()
    assert (reading.peak_allocated_bytes, reading.peak_reserved_bytes) == (
        expected.allocated_bytes,
        expected.reserved_bytes,
    )


def test_an_operator_that_fails_half_way_leaves_nothing() -> None:
    """Its first output fits and its second does not: both are gone while the error is still held."""
    with Simulated(gpu(41 * MIB)) as meter:
        x = torch.empty(4 * MIB, dtype=torch.bfloat16, device="meta")
        with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 32\.0 MiB") as caught:
            torch.topk(x, x.numel())
        assert meter.read().allocated_bytes == x.nbytes
        assert meter.read().peak_allocated_bytes == 2 * x.nbytes
        assert caught.value.__cause__ is not None


def test_importing_the_meters_loads_no_torch() -> None:
    """The table of devices is for planning too; ``Simulated`` loads torch when it is first used."""
    has = "'torch' in sys.modules"
    code = f"import sys, trainer_rank.meters as m; before = {has}; m.Simulated; print(before, {has})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


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
        with Simulated(gpu(int(1.01 * (resting + share * required + pending))), waste_fraction=0.0) as meter:
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


def test_memory_that_another_process_takes_is_out_of_memory_too(
    runtime: TransformersRuntime, device: Simulated
) -> None:
    """The capacity shrinks behind the rank's back, to nothing: the optimizer's first step names its phase, too."""
    rank = TrainerRank(runtime, meter=device, head_chunk_rows=16)
    for micro_batch in rank.forward_micro_batches(BATCH):
        negative_sum(micro_batch).backward()
    device.release_cached()
    device.occupy(64 * MIB - device.read().resident_bytes)
    thief: list[torch.Tensor] = []
    for size in (MIB, 64 * KIB, 512):
        with pytest.raises(torch.OutOfMemoryError):
            thief.extend(torch.empty(size, dtype=torch.uint8, device="meta") for _ in range(100_000))
    with pytest.raises(TrainerRankMemoryError) as caught:
        rank.optim_step(lr=1e-3)
    assert (caught.value.refused, caught.value.phase) == (False, "optimizer")
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


def test_a_budget_below_the_weights_is_refused_before_anything_runs(runtime: TransformersRuntime) -> None:
    """The rank says what is resident; nothing was allocated."""
    with Simulated(gpu(64 * MIB), memory_budget=runtime.facts.weight_bytes // 2) as meter:
        meter.place(weights(runtime))
        resting = meter.read().allocated_bytes
        with pytest.raises(TrainerRankMemoryError, match="memory_budget must exceed what is resident") as caught:
            TrainerRank(runtime, meter=meter)
        assert caught.value.refused
        assert meter.read().peak_allocated_bytes == resting


def test_weights_that_do_not_fit_are_out_of_memory(runtime: TransformersRuntime) -> None:
    """As loading them on a device of that size would be."""
    small = gpu(runtime.facts.weight_bytes // 2 + MIB)
    with Simulated(small) as meter, pytest.raises(torch.OutOfMemoryError):
        meter.place(weights(runtime))


def test_a_model_made_while_the_device_is_open_is_on_it() -> None:
    """No ``place`` is needed."""
    with Simulated(gpu(64 * MIB)) as meter:
        model = torch.nn.Linear(1024, 1024, bias=False, device="meta")
        assert meter.read().allocated_bytes == model.weight.nbytes
