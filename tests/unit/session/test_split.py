"""A recorded split is repeated whatever memory there is now, and only for the requests it belongs to."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.builders import completions, gradients, negative_sum, offering
from tests.unit.session.conftest import NewRank
from trainer_rank.errors import RequestError, TrainerRankMemoryError
from trainer_rank.meters import Meter
from trainer_rank.requests import Request
from trainer_rank.session import SplitPart, TrainerRank

BATCH = completions([4, 6, 5, 7, 3])


def walk(
    rank: TrainerRank, requests: list[Request], split: tuple[SplitPart, ...] = ()
) -> tuple[list[tuple[int, ...]], tuple[SplitPart, ...], list[Tensor]]:
    """Return (indices of each micro-batch, the split of the whole call, gradients)."""
    rank.zero_grad()
    indices = []
    for micro_batch in rank.forward_micro_batches(requests, split=split):
        negative_sum(micro_batch).backward()
        indices.append(micro_batch.indices)
        found = micro_batch.split
    return indices, found, gradients(rank)


def test_the_split_is_known_from_the_first_micro_batch(new_rank: NewRank) -> None:
    """Its parts have every unit once, and each micro-batch carries the same one while memory stays."""
    rank = new_rank(max_packed_tokens=20)
    splits = [micro_batch.split for micro_batch in rank.forward_micro_batches(BATCH)]
    assert len(splits) > 1
    assert len(set(splits)) == 1
    assert sorted(unit for one in splits[0] for unit in one.numbers) == list(range(len(BATCH)))


@pytest.mark.parametrize("kept", [1, 2, 99])
def test_a_recorded_split_is_repeated_bit_for_bit(new_rank: NewRank, kept: int) -> None:
    """A rank with room for all requests at once makes the same small micro-batches, and so the same gradient bits."""
    indices, split, grads = walk(new_rank(max_packed_tokens=20), BATCH)
    wide, _, _ = walk(new_rank(), BATCH)
    assert len(indices) > len(wide)
    again, repeated, same = walk(new_rank(), BATCH, split[:kept])
    assert again[:kept] == indices[:kept]
    assert sorted(index for part in again for index in part) == list(range(len(BATCH)))
    if kept >= len(split):
        assert repeated == split
        assert all(torch.equal(one, other) for one, other in zip(grads, same, strict=True))


def test_what_memory_has_no_room_for_any_more_is_refused(new_rank: NewRank, meter: Meter) -> None:
    """The recorded pass is held against the budget of now; the message says that it can be split anew instead."""
    _, split, _ = walk(new_rank(), BATCH)
    price = next(iter(new_rank().plan(BATCH[:1]))).stats.required_bytes
    small = new_rank(meter=offering(meter, 3 * price))
    with pytest.raises(TrainerRankMemoryError, match="recorded pass over 5 requests cannot be repeated") as caught:
        walk(small, BATCH, split)
    # The real allocator's cap is the meter's own again.
    meter.prepare()
    assert caught.value.refused
    assert caught.value.short_bytes > 0


def test_a_split_of_other_requests_is_refused(new_rank: NewRank) -> None:
    """Another shape, a hole, a unit or a layout that is not there: each is named."""
    rank = new_rank(max_packed_tokens=20)
    _, split, _ = walk(rank, BATCH)
    wrong = [
        (completions([4, 6, 5, 7, 8]), split, "fingerprint"),
        (BATCH, (split[0], split[0]), "came before"),
        (BATCH, (replace(split[0], units=((0, 99),)),), r"ascending ranges in \[0, 5\)"),
        (BATCH, (replace(split[0], units=((1, 2), (0, 1))),), r"ascending ranges in \[0, 5\)"),
        (BATCH, (replace(split[0], units=()),), r"ascending ranges in \[0, 5\)"),
        (BATCH, (replace(split[0], layout=7),), "layout must be below 2"),
        (BATCH, (replace(split[0], group=3),), "group must be below 1"),
    ]
    for requests, given, reason in wrong:
        with pytest.raises(RequestError, match=reason):
            list(rank.forward_micro_batches(requests, split=given))
