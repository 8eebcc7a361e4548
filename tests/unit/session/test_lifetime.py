"""What nobody needs any more is released before it costs anything: also what only the collector finds."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from tests.builders import completions, negative_sum, offering, tiny_runtime
from trainer_rank import TrainerRank
from trainer_rank.errors import TrainerRankMemoryError
from trainer_rank.meters import Meter
from trainer_rank.session import MicroBatch

BATCH = completions([40, 40, 40, 40], prompt=60)


@pytest.fixture(autouse=True)
def no_collection_by_chance() -> Iterator[None]:
    """Cycles stay until something collects them on purpose."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def leave_in_a_cycle(micro_batch: MicroBatch) -> None:
    """Keep outputs and graph in an object that refers to itself, and drop it, as a traceback or a callback does."""
    holder: dict[str, Any] = {"outputs": micro_batch.results, "loss": negative_sum(micro_batch)}
    holder["self"] = holder


def tight_rank(meter: Meter) -> tuple[TrainerRank, int]:
    """A rank with room for the whole batch once, and the bytes that its graph keeps."""
    runtime = tiny_runtime(recompute="none")
    whole = TrainerRank(runtime, meter=meter, verify_backend=False).plan(BATCH)[0].admission
    gc.collect()
    room = whole.charged_bytes + whole.price.retained_bytes // 4
    return TrainerRank(runtime, meter=offering(meter, room), verify_backend=False), whole.price.retained_bytes


def test_a_graph_in_a_cycle_does_not_narrow_the_next_call(meter: Meter) -> None:
    """It is resident when the call begins: collected, the batch fits into one pass again."""
    rank, kept = tight_rank(meter)
    for micro_batch in rank.forward_micro_batches(BATCH):
        leave_in_a_cycle(micro_batch)
        del micro_batch
    rank.zero_grad()
    assert meter.read().allocated_bytes > 0.8 * kept
    before = meter.read().allocated_bytes
    assert len(rank.plan(BATCH)) == 1
    assert before - meter.read().allocated_bytes > 0.8 * kept


def test_a_graph_in_a_cycle_does_not_refuse_the_next_micro_batch(meter: Meter) -> None:
    """Within a call as well: each of four passes leaves its graph in a cycle, and room is for little more than one."""
    runtime = tiny_runtime(recompute="none")
    apart = [completions([90], prompt=10, seed=number)[0] for number in range(4)]
    wide = TrainerRank(runtime, meter=meter, verify_backend=False, max_packed_tokens=100)
    largest = max(one.admission.charged_bytes for one in wide.plan(apart))
    gc.collect()
    rank = TrainerRank(runtime, meter=offering(meter, int(1.3 * largest)), verify_backend=False, max_packed_tokens=100)
    count = 0
    for micro_batch in rank.forward_micro_batches(apart):
        leave_in_a_cycle(micro_batch)
        del micro_batch
        count += 1
    assert count == 4


def test_what_the_caller_really_keeps_is_not_released(meter: Meter) -> None:
    """It is charged, and what does not fit beside it is refused, after collecting in vain."""
    rank, _ = tight_rank(meter)
    kept = [(one, negative_sum(one)) for one in rank.forward_micro_batches(BATCH)]
    with pytest.raises(TrainerRankMemoryError, match="request 3 of 260 tokens cannot fit alone"):
        rank.plan([*BATCH[:3], *completions([200], prompt=60)])
    assert len(kept) == 1
