"""Admit, split, refuse, fail: what a rank does with a real budget and a real out-of-memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.builders import (
    CountingRuntime,
    completion,
    completions,
    distance,
    gradients,
    negative_sum,
    offering,
    run,
    tiny_runtime,
    tokens,
)
from tests.unit.session.conftest import NewRank
from trainer_rank.errors import TrainerRankMemoryError
from trainer_rank.meters import Meter, open_meter
from trainer_rank.meters.counting_lib import load
from trainer_rank.meters.simulated import SimulatedMeter
from trainer_rank.report import AdmissionRecord, Record
from trainer_rank.session import TrainerRank
from trainer_rank.units import MIB

BATCH = completions([40, 33, 40, 25, 40, 38, 40, 12], prompt=60)


@pytest.fixture(scope="module")
def meter() -> Iterator[Meter]:
    """The counting meter: here out-of-memory must be real."""
    with open_meter("cpu", cpu="counting") as opened:
        yield opened


def forwards(rank: TrainerRank) -> int:
    """Return how often the live model ran."""
    assert isinstance(rank.runtime, CountingRuntime)
    return rank.runtime.forwards


# -- refusals ----------------------------------------------------------------------------------------------------


def test_a_budget_below_what_is_resident_is_refused_with_both_numbers() -> None:
    """What was given and what is there already; and no cap is left behind by the rank that never was."""
    with pytest.raises(TrainerRankMemoryError, match=r"got 8\.0 MiB with \d.* resident \(\d.* weights\)") as caught:
        TrainerRank(tiny_runtime(), memory_budget="8MiB")
    assert (caught.value.refused, caught.value.phase, caught.value.term) == (True, "loading", "weights")
    assert caught.value.admission is not None
    assert caught.value.admission.budget.budget_bytes == 8 * MIB
    torch.empty(64 * MIB, dtype=torch.uint8)


def test_a_request_that_cannot_fit_alone_is_refused_before_anything_runs(new_rank: NewRank, meter: Meter) -> None:
    """Index, length, largest term and bytes short are named, the refusal is recorded, and nothing was touched."""
    records: list[Record] = []
    rank = new_rank(meter=offering(meter, 2 * MIB), on_decision=records.append)
    batch = [*completions([3, 4]), completion(tokens(1, 100), tokens(2, 700)), *completions([5])]
    with pytest.raises(TrainerRankMemoryError, match="request 2 of 800 tokens cannot fit alone") as caught:
        list(rank.forward_micro_batches(batch))
    error = caught.value
    assert (error.refused, error.request_index, error.request_length) == (True, 2, 800)
    assert error.admission is not None
    assert error.short_bytes == error.admission.charged_bytes - error.admission.budget.available_bytes > 0
    assert error.term == error.admission.largest_term.name
    for part in ("Nothing ran", "activations", "short", "Set recompute='full'"):
        assert part in str(error)
    assert error.__cause__ is None
    assert forwards(rank) == 0
    assert all(parameter.grad is None for parameter in rank.runtime.trainable_parameters())
    (refused,) = records
    assert isinstance(refused, AdmissionRecord)
    assert (refused.verdict, refused.requests) == ("refused", [2])


def test_the_advice_is_to_raise_the_budget_when_recompute_is_full_already(new_rank: NewRank, meter: Meter) -> None:
    """By at least what is short."""
    rank = new_rank(meter=offering(meter, MIB), model={"recompute": "full"}, head_chunk_rows=64)
    with pytest.raises(TrainerRankMemoryError, match=r"Raise memory_budget by at least \d"):
        next(rank.forward_micro_batches([completion(tokens(1, 100), tokens(2, 900))]))


def test_a_refused_call_leaves_the_rank_usable(new_rank: NewRank, meter: Meter) -> None:
    """The next call runs as if nothing had happened."""
    rank = new_rank(meter=offering(meter, 2 * MIB))
    with pytest.raises(TrainerRankMemoryError):
        next(rank.forward_micro_batches([completion(tokens(1, 100), tokens(2, 700))]))
    _, _, count = run(rank, completions([3, 4]))
    assert count == 1


# -- splits ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unsplit(meter: Meter) -> Callable[[], tuple[TrainerRank, int]]:
    """A rank with all memory and what the whole batch is charged there."""
    rank = TrainerRank(tiny_runtime(), meter=meter, verify_backend=False)

    def get() -> tuple[TrainerRank, int]:
        (micro_batch,) = rank.forward_micro_batches(BATCH)
        return rank, micro_batch.stats.required_bytes

    return get


def test_half_the_memory_takes_more_passes_and_the_same_gradient(
    new_rank: NewRank, meter: Meter, unsplit: Callable[[], tuple[TrainerRank, int]]
) -> None:
    """With the allocator held to half of what the batch needs at once, it completes by splitting, without an error."""
    rank, whole_bytes = unsplit()
    loss, grads, count = run(rank, BATCH)
    assert count == 1
    rank.zero_grad()
    small = new_rank(meter=offering(meter, whole_bytes // 2))
    failed = load().failed_count()
    again, again_grads, passes = run(small, BATCH)
    assert passes >= 2
    assert load().failed_count() == failed
    assert again == pytest.approx(loss, rel=1e-9)
    assert distance(again_grads, grads) <= 1e-9


def test_a_second_step_under_the_same_budget_needs_no_more(
    new_rank: NewRank, meter: Meter, unsplit: Callable[[], tuple[TrainerRank, int]]
) -> None:
    """Optimizer state is charged from the first admission on, so what was admitted once is admitted again."""
    _, whole_bytes = unsplit()
    rank = new_rank(meter=offering(meter, whole_bytes // 2))
    counts = []
    for _ in range(3):
        counts.append(run(rank, BATCH)[2])
        rank.optim_step(lr=1e-3)
    assert counts[0] >= counts[1] == counts[2]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_pass_takes_what_it_was_admitted_for(new_rank: NewRank, recompute: str) -> None:
    """Predicted and observed peak agree to half a percent when the caller adds nothing of its own."""
    rank = new_rank(model={"recompute": recompute, "layers": 4}, caller_bytes_per_token=0)
    for micro_batch in rank.forward_micro_batches(BATCH):
        negative_sum(micro_batch).backward()
    assert micro_batch.observed is not None
    assert micro_batch.stats.required_bytes == pytest.approx(micro_batch.observed.peak_bytes, rel=0.005)


def test_what_shrinks_between_passes_is_planned_anew(new_rank: NewRank) -> None:
    """The budget is read again before each pass: the rest is cut finer, every request still comes once."""
    device = SimulatedMeter("1TiB")
    probe = new_rank(meter=device, max_packed_tokens=190)
    planned = [micro_batch.indices for micro_batch in probe.forward_micro_batches(BATCH)]
    _, grads, _ = run(probe, BATCH)
    rank = new_rank(meter=device, max_packed_tokens=190)
    parts: list[tuple[int, ...]] = []
    for micro_batch in rank.forward_micro_batches(BATCH):
        negative_sum(micro_batch).backward()
        parts.append(micro_batch.indices)
        if len(parts) == 1:
            device.outside_bytes += device.read().available_bytes - int(0.7 * micro_batch.stats.required_bytes)
    assert parts[0] == planned[0]
    assert max(map(len, parts[1:])) < max(map(len, planned[1:]))
    assert sorted(index for part in parts for index in part) == list(range(len(BATCH)))
    assert distance(gradients(rank), grads) <= 1e-9


def test_what_shrinks_to_nothing_is_refused_and_earlier_passes_keep_their_gradients(new_rank: NewRank) -> None:
    """The error is a refusal that does not claim that nothing ran."""
    device = SimulatedMeter("1TiB")
    rank = new_rank(meter=device, max_packed_tokens=190)
    batches = rank.forward_micro_batches(BATCH)
    negative_sum(next(batches)).backward()
    kept = gradients(rank)
    device.outside_bytes += device.read().available_bytes - 1000
    with pytest.raises(TrainerRankMemoryError, match="Earlier micro-batches keep their gradients") as caught:
        next(batches)
    assert caught.value.refused
    assert "Nothing ran" not in str(caught.value)
    assert all(torch.equal(one, other) for one, other in zip(gradients(rank), kept, strict=True))


@pytest.mark.parametrize("backward", [True, False])
def test_a_graph_the_caller_keeps_is_charged_to_the_next_admission(
    new_rank: NewRank, meter: Meter, backward: bool
) -> None:
    """Without its backward the first pass's activations stay, and the second pass is offered that much less."""
    records: list[AdmissionRecord] = []

    def note(record: Record) -> None:
        if isinstance(record, AdmissionRecord):
            records.append(record)

    rank = new_rank(meter=offering(meter, 64 * MIB), max_packed_tokens=190, on_decision=note)
    first, second = _offered(rank, backward=backward)
    offered_less = first - second
    if backward:
        assert offered_less < 0.2 * records[0].retained_bytes
    else:
        assert offered_less >= records[0].retained_bytes


def _offered(rank: TrainerRank, *, backward: bool) -> tuple[int, int]:
    """Return what the first two micro-batches were offered, with the first kept alive, after its backward or before."""
    batches = rank.forward_micro_batches(BATCH)
    first = next(batches)
    if backward:
        negative_sum(first).backward()
    second = next(batches)
    return first.stats.available_bytes, second.stats.available_bytes
