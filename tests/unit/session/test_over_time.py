"""Many micro-batches: nothing is left behind, and each is on record."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.builders import (
    BentMeter,
    completions,
    negative_sum,
)
from tests.unit.session.conftest import NewRank
from trainer_rank.meters import Meter, Reading, open_meter
from trainer_rank.report import AdmissionRecord, ObservationRecord, Record
from trainer_rank.units import MIB

BATCH = completions([40, 33, 40, 25, 40, 38, 40, 12], prompt=60)


@pytest.fixture(scope="module")
def meter() -> Iterator[Meter]:
    """The counting meter: here out-of-memory must be real."""
    with open_meter("cpu", cpu="counting") as opened:
        yield opened


def test_live_bytes_stay_flat_over_many_micro_batches(new_rank: NewRank, meter: Meter) -> None:
    """At every admission the last micro-batch is gone, and 150 of them leave as much behind as ten."""
    alive: list[weakref.ref[object]] = []
    live: list[int] = []

    def look(reading: Reading) -> Reading:
        assert all(one() is None for one in alive)
        live.append(reading.allocated_bytes)
        return reading

    gc.collect()  # What other tests left behind would be freed half-way.
    rank = new_rank(meter=BentMeter(meter, look))
    for step in range(30):
        batch = [one for part in range(5) for one in completions([2, 3], prompt=4, seed=1000 * step + 10 * part)]
        for start in range(0, 10, 2):
            for micro_batch in rank.forward_micro_batches(batch[start : start + 2]):
                loss = negative_sum(micro_batch)
                loss.backward()
                alive.append(weakref.ref(micro_batch))
                del micro_batch, loss
        rank.optim_step(lr=1e-3)
    assert len(alive) == 150
    # Two readings per call (plan and pass), five calls per step; the first step makes gradients and optimizer state.
    assert set(live[20:290:10]) == {live[20]}
    assert len(set(live[22:])) <= 2


def test_a_loop_variable_that_still_points_at_the_last_micro_batch_keeps_no_graph(
    new_rank: NewRank, meter: Meter
) -> None:
    """The usual loop deletes nothing: outputs stay until the name is bound again, activations do not."""
    live: list[int] = []

    def look(reading: Reading) -> Reading:
        live.append(reading.allocated_bytes)
        return reading

    rank = new_rank(meter=BentMeter(meter, look), max_packed_tokens=110)
    for micro_batch in rank.forward_micro_batches(BATCH):
        negative_sum(micro_batch).backward()
    outputs = max(one.num_tokens for one in BATCH) * 8
    # Read when the rank was made, for the plan and before the first pass; then once per pass, gradients included.
    assert len(live) >= 8
    assert max(live[3:]) - min(live[3:]) <= outputs


def test_every_micro_batch_has_one_decision_and_one_observation(new_rank: NewRank, meter: Meter) -> None:
    """Joined by number, in order; the terms are those the verdict was made of."""
    records: list[Record] = []
    rank = new_rank(on_decision=records.append, max_packed_tokens=190)
    stats = []
    for micro_batch in rank.forward_micro_batches(BATCH):
        negative_sum(micro_batch).backward()
        stats.append(micro_batch.stats)
    decisions = [record for record in records if isinstance(record, AdmissionRecord)]
    observations = [record for record in records if isinstance(record, ObservationRecord)]
    assert len(stats) == len(decisions) == len(observations) >= 2
    assert [one.decision for one in decisions] == [one.decision for one in observations] == [*range(1, len(stats) + 1)]
    for one, decision, observation in zip(stats, decisions, observations, strict=True):
        assert decision.verdict == "admitted"
        assert decision.required_bytes == one.required_bytes == observation.predicted_bytes
        assert sum(decision.terms.values()) == decision.charged_bytes
        assert observation.observation["packed_rows"] == one.packed_rows == decision.passes[0]["packed_rows"]
        assert 0 < observation.observation["peak_bytes"] <= observation.predicted_bytes
    assert sorted(index for one in decisions for index in one.requests) == list(range(len(BATCH)))


def test_a_graph_that_is_dropped_is_freed_at_once(new_rank: NewRank, meter: Meter) -> None:
    """Also without a backward, and without waiting for the garbage collector."""
    rank = new_rank()
    (micro_batch,) = rank.forward_micro_batches(BATCH)
    del micro_batch
    gc.collect()
    gc.disable()
    try:
        live = meter.read().allocated_bytes
        (micro_batch,) = rank.forward_micro_batches(BATCH)
        assert meter.read().allocated_bytes > live
        del micro_batch
        assert meter.read().allocated_bytes == live
    finally:
        gc.enable()


def test_a_loop_that_is_left_early_still_observes_what_ran(new_rank: NewRank) -> None:
    """Breaking out is allowed: the pass that ran is recorded, the rest is not."""
    records: list[Record] = []
    rank = new_rank(on_decision=records.append, max_packed_tokens=190)
    batches = rank.forward_micro_batches(BATCH)
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert [type(record) for record in records] == [AdmissionRecord, ObservationRecord]


def test_readings_reach_the_statistics(new_rank: NewRank, meter: Meter) -> None:
    """What a micro-batch says of its budget is what the meter said at its admission."""
    rank = new_rank(meter=BentMeter(meter, lambda reading: replace(reading, available_bytes=77 * MIB)))
    (micro_batch,) = rank.forward_micro_batches(completions([3]))
    stats = micro_batch.stats
    assert stats.available_bytes == 77 * MIB
    assert stats.predicted_peak_bytes == stats.resident_bytes + stats.required_bytes
