"""The request of a data set that needs most, found before anything runs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.builders import completion, tiny_runtime, tokens
from trainer_rank import AtomicGroup, TrainerRank, TrainerRankMemoryError
from trainer_rank.meters.simulated import SimulatedMeter
from trainer_rank.requests import Request
from trainer_rank.session.hardest import sizes


def new_rank(budget: int | str = "1TiB", **options: int) -> TrainerRank:
    meter = SimulatedMeter(budget)
    return TrainerRank(tiny_runtime(dtype=torch.float32), meter=meter, verify_backend=False, **options)


def data(seed: int) -> list[Request]:
    """Lengths as in practice: many short ones, a few long, scored in part."""
    draw = np.random.default_rng(seed)
    return [
        completion(tokens(seed + number, int(draw.integers(1, 60))), tokens(number, int(draw.lognormal(2.5, 0.8)) + 1))
        for number in range(12)
    ]


@pytest.mark.parametrize("seed", range(3))
def test_it_is_the_dearest_of_all_priced_one_by_one(seed: int) -> None:
    """The naive twin prices every request alone."""
    rank, batch = new_rank(), data(seed)
    hardest = rank.hardest(batch)
    assert hardest is not None
    prices = [rank.plan([one])[0].admission.price.required_bytes for one in batch]
    assert hardest.admission.price.required_bytes == max(prices)
    assert prices[hardest.indices[0]] == max(prices)


def test_only_requests_that_could_be_the_dearest_are_priced() -> None:
    """One is longer, one scores more: neither rules the other out."""
    long, scored = completion(tokens(1, 90), tokens(2, 3)), completion(tokens(3, 5), tokens(4, 40))
    assert sizes(long)[0] > sizes(scored)[0]
    assert sizes(long)[1] < sizes(scored)[1]


def test_one_that_cannot_fit_is_refused_before_anything_runs() -> None:
    """By its index, however late it would have come."""
    batch = [*data(1), completion(tokens(5, 30), tokens(6, 1500)), *data(2)]
    rank = new_rank()
    needed = rank.hardest(batch)
    assert needed is not None
    assert needed.indices == (12,)
    with pytest.raises(TrainerRankMemoryError, match=r"request 12 of 1530 tokens cannot fit alone"):
        new_rank(needed.admission.charged_bytes - 1).hardest(batch)
    with pytest.raises(TrainerRankMemoryError, match=r"request 12.*max_packed_tokens is 1000"):
        new_rank(max_packed_tokens=1000).hardest(batch)


def test_an_atomic_group_counts_as_a_whole_and_idle_requests_do_not_count() -> None:
    """What cannot be cut is priced together."""
    pair = AtomicGroup([completion(tokens(7, 50), tokens(8, 60)), completion(tokens(7, 50), tokens(9, 60))])
    idle = Request(tokens=tokens(1, 400))
    hardest = new_rank().hardest([completion(tokens(7, 50), tokens(10, 70)), pair, idle])
    assert hardest is not None
    assert set(hardest.indices) >= {1, 2}
    assert new_rank().hardest([idle]) is None
