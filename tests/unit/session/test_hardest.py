"""The request of a data set that needs most, found before anything runs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.builders import completion, tiny_runtime, tokens
from trainer_rank import AtomicGroup, TrainerRank, TrainerRankMemoryError
from trainer_rank.memory import Price
from trainer_rank.meters.simulated import SimulatedMeter
from trainer_rank.planner import PassWork
from trainer_rank.requests import Request


def new_rank(budget: int | str = "1TiB", max_packed_tokens: int | None = None) -> TrainerRank:
    return TrainerRank(
        tiny_runtime(dtype=torch.float32), meter=SimulatedMeter(budget), verify_backend=False,
        max_packed_tokens=max_packed_tokens,
    )  # fmt: skip


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


def test_of_requests_that_another_reaches_none_is_priced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand requests cost as many prices as there are candidates for the dearest."""
    rank = new_rank()
    priced: list[int] = []
    honest = rank._pricer.price

    def counting(work: PassWork) -> Price:
        priced.append(work.batch.packed_rows)
        return honest(work)

    monkeypatch.setattr(rank._pricer, "price", counting)
    long, scored = completion(tokens(1, 90), tokens(2, 3)), completion(tokens(3, 5), tokens(4, 40))
    small = [completion(tokens(number, 5), tokens(number, 3 + number % 20)) for number in range(100)]
    assert rank.hardest([*small, long, scored]) is not None
    # Short runs take other code when their length is a multiple of eight: one such is priced on its own.
    assert sorted(priced) == [24, 45, 93]


def test_more_scored_rows_can_need_less_because_chunks_are_evened_out() -> None:
    """64 rows are one chunk of 64; 65 rows are chunks of 33 and 32. The shorter request is the harder one."""
    meter = SimulatedMeter("1TiB")
    runtime = tiny_runtime(dtype=torch.float32, vocabulary=5000)
    rank = TrainerRank(runtime, meter=meter, verify_backend=False, head_chunk_rows=64)
    batch = [completion(tokens(1, 10), tokens(2, 64)), completion(tokens(3, 10), tokens(4, 65))]
    first, second = (rank.plan([one])[0].admission.price.required_bytes for one in batch)
    assert first > second
    hardest = rank.hardest(batch)
    assert hardest is not None
    assert hardest.indices == (0,)


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
