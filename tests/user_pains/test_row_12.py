"""Row 12, the planner's side: ranks that ran different numbers of micro-batches waited for each other for ever.

What ranks agree on is known before anything runs: how many passes each has, and that equal requests make equal plans
whatever order they arrive in. (That they do agree is for the layer that talks between ranks.)
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from tests.builders import tiny_runtime, tokens
from trainer_rank import Request, TrainerRank
from trainer_rank.session.planned import PlannedPass

CAP = 100


@pytest.fixture(scope="module")
def rank() -> TrainerRank:
    return TrainerRank(tiny_runtime(), memory_budget="8GiB", max_packed_tokens=CAP, verify_backend=False)


def passes(planned: tuple[PlannedPass, ...], requests: Sequence[Request]) -> list[tuple[int, list[int]]]:
    """Return packed rows and the lengths of the requests of each pass, in the order in which they run."""
    return [(one.stats.packed_rows, sorted(requests[index].num_tokens for index in one.indices)) for one in planned]


def test_the_number_of_rounds_is_known_before_anything_runs(rank: TrainerRank) -> None:
    """Five requests of 95 tokens are five passes under a cap of 100, five of 20 are one: 5 rounds, not 475 / 100."""
    long = [Request.next_token(tokens(number, 95)) for number in range(5)]
    short = [Request.next_token(tokens(number, 20)) for number in range(5)]
    counts = [len(rank.plan(long)), len(rank.plan(short))]
    assert counts == [5, 1]
    for requests, count in zip((long, short), counts, strict=True):
        assert sum(1 for _ in rank.forward_micro_batches(requests)) == count


def test_equal_requests_make_equal_plans_on_every_rank(rank: TrainerRank) -> None:
    """Which requests are together, and the order of the passes."""
    requests = [Request.next_token(tokens(number, 15 + 7 * number)) for number in range(9)]
    shuffled = random.Random(0).sample(requests, len(requests))
    other = TrainerRank(tiny_runtime(), memory_budget="8GiB", max_packed_tokens=CAP, verify_backend=False)
    assert passes(rank.plan(requests), requests) == passes(other.plan(shuffled), shuffled)
