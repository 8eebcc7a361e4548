"""Public reports of memory trouble, replayed: each with the configuration reported and the right behaviour."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.builders import completion, negative_sum, tiny_runtime
from trainer_rank import TrainerRank, TrainerRankMemoryError
from trainer_rank.executor.envelope_pricer import make_envelope
from trainer_rank.executor.pass_features import pass_features
from trainer_rank.meters.devices import Device
from trainer_rank.meters.simulated import SimulatedMeter
from trainer_rank.meters.simulated_device import Simulated
from trainer_rank.planner import pass_work
from trainer_rank.units import GIB


@pytest.mark.parametrize("seed", range(3))
def test_a_cap_on_packed_tokens_is_a_cap_and_the_head_is_priced_as_it_runs(seed: int) -> None:
    """A run died at a step between 20 and 50 on one 58 GiB tensor although its cap was 9,216 tokens.

    Every planned pass keeps to the cap; a lone request beyond it is refused by name.
    """
    draw = np.random.default_rng(seed)
    lengths = np.minimum(draw.lognormal(np.log(3400) - 0.3, 0.8, 64).astype(int) + 1, 11_000)
    prompts = [draw.integers(1, 64, 600) for _ in range(2)]
    batch = [completion(prompts[number % 2], draw.integers(1, 64, length)) for number, length in enumerate(lengths)]
    rank = TrainerRank(
        tiny_runtime(dtype=torch.float32), meter=SimulatedMeter("1TiB"), max_packed_tokens=9216, verify_backend=False
    )
    short = [one for one in batch if one.num_tokens <= 4096]
    planned = rank.plan(short)
    assert sum(len(one.indices) for one in planned) == len(short)
    for one in planned:
        assert one.stats.packed_rows <= 9216
        (work,) = one.works
        head = {term.name: term.num_bytes for term in one.admission.price.terms}["head"]
        assert one.admission.price.phase != "head" or head >= 4 * min(512, work.head.num_rows) * 64


def test_a_lone_request_above_the_cap_is_refused_by_name() -> None:
    """Not run as a pass of its own beyond the cap."""
    draw = np.random.default_rng(1)
    rank = TrainerRank(
        tiny_runtime(dtype=torch.float32), meter=SimulatedMeter("1TiB"), max_packed_tokens=1000, verify_backend=False
    )
    batch = [completion(draw.integers(1, 64, 20), draw.integers(1, 64, length)) for length in (50, 1500, 60)]
    with pytest.raises(TrainerRankMemoryError, match=r"request 1 of 1520 tokens.*max_packed_tokens is 1000") as caught:
        rank.plan(batch)
    assert caught.value.refused
    assert caught.value.term == "max_packed_tokens"


def test_a_metric_that_needs_no_gradient_keeps_nothing_per_vocabulary_entry() -> None:
    """An entropy that was only logged kept its graph: 5 to 6 GB per sample. Outputs carry no vocabulary at all."""
    runtime = tiny_runtime(dtype=torch.float32, vocabulary=3000, hidden=16)
    rank = TrainerRank(runtime, head_chunk_rows=32, verify_backend=False)
    batch = [completion(np.arange(20) % 60, np.arange(400) % 60)]
    peaks = []
    for metric in (False, True):
        rank.zero_grad()
        for micro_batch in rank.forward_micro_batches(batch):
            if metric:
                # What a caller can log from log-probs alone.
                (result,) = micro_batch.results
                assert result.logprobs is not None
                assert float(-result.logprobs.detach().mean()) > 0
            negative_sum(micro_batch).backward()
        assert rank.last_observation is not None
        peaks.append(rank.last_observation.peak_bytes)
    chunk = 32 * 3000 * 4
    assert peaks[1] - peaks[0] <= chunk
    rank.meter.close()


def test_what_the_cache_holds_is_not_what_a_pass_can_have() -> None:
    """40 GiB live, 130 reserved, 8 free: "free + cached" says 98. One release, counters read again, then a verdict."""
    with Simulated(Device(name="140", usable_bytes=140 * GIB, multiprocessors=8, context_bytes=2 * GIB)) as meter:
        live = [torch.empty(2 * GIB, dtype=torch.uint8, device="meta") for _ in range(65)]
        # Every third block stays, so that what is cached is cut into pieces of at most 4 GiB.
        kept = live[::3]
        del live
        reading = meter.read()
        free = reading.available_bytes
        assert free < 8 * GIB
        prepared = meter.prepare(60 * GIB)
        assert prepared.available_bytes <= meter.gpu.usable_bytes - prepared.reserved_bytes
        assert prepared.reserved_bytes < reading.reserved_bytes
        assert len(kept) == 22


def test_96_000_rows_need_no_memory_that_grows_with_their_square() -> None:
    """A dense 96k x 96k mask ran out of memory by itself. Here no mask exists: the price is affine in the rows."""
    runtime = tiny_runtime(dtype=torch.float32, layers=2, hidden=16)
    envelope = make_envelope(runtime)
    prices = []
    for rows in (12_000, 48_000, 96_000):
        prompt = np.arange(rows // 2) % 60
        leaf = rows // 16
        batch = [completion(prompt, np.full(leaf, number + 1)) for number in range(8)]
        work = pass_work(batch, range(8))
        assert work.batch.packed_rows == rows
        prices.append(envelope.price(pass_features(runtime, work, head_chunk_rows=512)).required_bytes)
    per_row = (prices[1] - prices[0]) / 36_000
    assert (prices[2] - prices[1]) / 48_000 == pytest.approx(per_row, rel=0.01)
    assert prices[2] < 0.2 * 96_000**2
