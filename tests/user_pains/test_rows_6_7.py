"""Rows 6 and 7: passes of rising size, and one large observation that refused everything after it."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from tests.builders import gradients, negative_sum, tiny_runtime, tokens
from trainer_rank import Request, TrainerRank
from trainer_rank.memory.profile import ForwardShape, Profile, ProfileModel, price_forward
from trainer_rank.memory.residual import Residual
from trainer_rank.memory.seen import Seen
from trainer_rank.meters import open_meter
from trainer_rank.units import GIB

LENGTHS = (16, 32, 64, 128, 256)


def test_rising_lengths_run_largest_first_and_come_back_in_order() -> None:
    """Results by the caller's indices, the gradient that of one after another, and both peaks reported."""
    rows = [
        Request.next_token(np.r_[number, tokens(number, length - 1)], payload=length)
        for number, length in enumerate(LENGTHS)
    ]
    with open_meter("cpu") as meter:
        rank = TrainerRank(tiny_runtime(lora=False), meter=meter, max_packed_tokens=256, head_chunk_rows=16)
        ran, found = [], {}
        for micro_batch in rank.forward_micro_batches(rows, normalisation="sum"):
            ran.append(max(request.num_tokens for request in micro_batch.requests))
            found |= dict(zip(micro_batch.indices, (one.payload for one in micro_batch.requests), strict=True))
            negative_sum(micro_batch).backward()
            del micro_batch
        packed = gradients(rank)
        assert ran == sorted(ran, reverse=True)
        assert len(ran) > 1
        assert [found[index] for index in range(len(rows))] == list(LENGTHS)
        rank.zero_grad()
        for row in rows:
            for micro_batch in rank.forward_micro_batches([row], normalisation="sum"):
                negative_sum(micro_batch).backward()
        for one, other in zip(packed, gradients(rank), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
        reading = meter.read()
        assert reading.peak_reserved_bytes >= reading.peak_allocated_bytes > 0


@pytest.mark.parametrize("rows", [53_000, 21_487, 27])
def test_after_one_large_observation_smaller_work_is_admitted(rows: int) -> None:
    """60 GiB observed at 73,696 rows that share nothing, 80 GiB free: a third of the rows fits, under either pricer."""
    model = ProfileModel(num_layers=40, hidden_size=2048, vocabulary_size=248_320, element_size=2)
    profile = Profile(peak_rate=Fraction(60 * GIB, 73_696), retained_rate=None, packed_rows=73_696, ratio=Fraction(1))
    # The same requests, shared: as many logical tokens on fewer rows.
    shape = ForwardShape(packed_rows=rows, logical_tokens=73_696, packed=True)
    assert price_forward(model, shape, profile).required_bytes <= 80 * GIB
    predicted = 6 * GIB * rows // 73_696
    residual = Residual().observe(
        Seen(packed_rows=73_696, logical_tokens=73_696, predicted_bytes=6 * GIB, peak_bytes=60 * GIB)
    )
    assert predicted + residual.extra_bytes(rows, 73_696, predicted) <= 60 * GIB


def test_by_logical_tokens_alone_the_smaller_layout_costs_as_much_as_the_larger() -> None:
    """The rule that refused it: fewer rows of the same requests are no cheaper."""
    model = ProfileModel(num_layers=40, hidden_size=2048, vocabulary_size=248_320, element_size=2)
    profile = Profile(peak_rate=Fraction(60 * GIB, 73_696), retained_rate=None, packed_rows=73_696, ratio=Fraction(1))
    wide, shared = (
        price_forward(model, ForwardShape(packed_rows=rows, logical_tokens=73_696, packed=False), profile)
        for rows in (73_696, 21_487)
    )
    assert wide.required_bytes == shared.required_bytes
