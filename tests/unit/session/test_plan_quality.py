"""What is planned is what is priced, admitted and run; and how good it is known to be."""

from __future__ import annotations

import random

import pytest

from tests.builders import completions, negative_sum, offering, tiny_runtime
from tests.unit.session.conftest import NewRank
from trainer_rank import AtomicGroup, Layout, Request, TrainerRank
from trainer_rank.meters import Meter
from trainer_rank.session import SplitPart

GROUPS = [completions([12, 9, 14, 7, 11], prompt=30, seed=seed) for seed in range(4)]
BATCH = [request for group in GROUPS for request in group]


def test_a_plan_that_must_cut_comes_with_its_bound(new_rank: NewRank) -> None:
    """Four groups under a cap: rows at least the bound's, and the same whatever order requests arrive in."""
    rank = new_rank(max_packed_tokens=70, layout=Layout.full_sharing())
    micro_batches = rank.forward_micro_batches(BATCH)
    assert micro_batches.quality is None
    rows = [micro_batch.stats.packed_rows for micro_batch in micro_batches]
    quality = micro_batches.quality
    assert quality is not None
    assert (quality.passes, quality.rows) == (len(rows), sum(rows))
    assert quality.bound_passes <= quality.passes
    assert quality.bound_rows <= quality.rows
    assert 0 <= quality.gap < 0.1
    shuffled = random.Random(3).sample(BATCH, len(BATCH))
    again = rank.forward_micro_batches(shuffled)
    assert sorted(one.stats.packed_rows for one in again) == sorted(rows)


def test_one_pass_has_no_gap(new_rank: NewRank) -> None:
    micro_batches = new_rank().forward_micro_batches(BATCH)
    assert len(list(micro_batches)) == 1
    assert micro_batches.quality is not None
    assert micro_batches.quality.gap == 0


@pytest.mark.parametrize("tight", [False, True])
def test_the_plan_that_runs_is_the_plan_that_was_priced_and_admitted(meter: Meter, tight: bool) -> None:
    """By the fingerprints of its passes, in order; under a cap, and under memory that holds a third of the batch."""
    runtime = tiny_runtime()
    whole = TrainerRank(runtime, meter=meter, verify_backend=False)
    room = whole.plan(BATCH)[0].admission.charged_bytes // 3 if tight else 10**9
    rank = TrainerRank(
        runtime, meter=offering(meter, room), verify_backend=False, max_packed_tokens=None if tight else 70
    )
    planned = rank.plan(BATCH)
    ran: tuple[SplitPart, ...] = ()
    shapes = []
    for micro_batch in rank.forward_micro_batches(BATCH):
        assert micro_batch.stats.required_bytes <= micro_batch.stats.available_bytes
        ran = micro_batch.split
        shapes.append((micro_batch.indices, micro_batch.stats.packed_rows, micro_batch.stats.required_bytes))
        negative_sum(micro_batch).backward()
        del micro_batch
    assert len(planned) > 1
    assert shapes == [(one.indices, one.stats.packed_rows, one.stats.required_bytes) for one in planned]
    assert [one.layout for one in ran] == [0] * len(planned)


def test_inactive_requests_change_no_price_and_come_back_once(new_rank: NewRank) -> None:
    """They ride with the first pass, whichever order they arrive in."""
    rank = new_rank(max_packed_tokens=70)
    idle = [Request(tokens=one.tokens) for one in GROUPS[0]]
    plain = rank.plan(BATCH)
    mixed = rank.plan([*idle[:2], *BATCH, *idle[2:]])
    assert [one.stats.required_bytes for one in mixed] == [one.stats.required_bytes for one in plain]
    assert [one.stats.packed_rows for one in mixed] == [one.stats.packed_rows for one in plain]
    assert sorted(index for one in mixed for index in one.indices) == list(range(len(BATCH) + len(idle)))


def test_atomic_groups_stay_together_and_within_the_cap(new_rank: NewRank) -> None:
    """Their rows count as one unit, with what they share among themselves computed once."""
    rank = new_rank(max_packed_tokens=80)
    nest = [AtomicGroup(group[:3]) for group in GROUPS]
    planned = rank.plan(nest)
    assert all(one.stats.packed_rows <= 80 for one in planned)
    for number in range(len(GROUPS)):
        members = set(range(3 * number, 3 * number + 3))
        assert sum(members <= set(one.indices) for one in planned) == 1
