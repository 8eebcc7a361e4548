"""Measured peaks by phase, and a caller's loss that needs more than it was said to."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.builders import BentMeter, completions, negative_sum
from tests.unit.session.conftest import NewRank
from trainer_rank.meters import Reading, open_meter
from trainer_rank.session import MicroBatch, TrainerRank
from trainer_rank.session.peaks import PeakWatch

BATCH = completions([40, 60, 50], prompt=100)
TOKENS = 450


def heavy(micro_batch: MicroBatch, floats_per_token: int) -> Tensor:
    """A loss that holds so many float64 values per logical token until its backward, beside a sum of log-probs."""
    held = torch.ones(TOKENS * floats_per_token, dtype=torch.float64, requires_grad=True)
    # The square of a leaf is a second tensor of its size.
    return negative_sum(micro_batch) + 0.0 * held.square().sum()


def observed(rank: TrainerRank, floats_per_token: int) -> tuple[int, str, int]:
    """Return (bytes of the caller, phase of the peak, peak) of one micro-batch."""
    for micro_batch in rank.forward_micro_batches(BATCH):
        heavy(micro_batch, floats_per_token).backward()
        del micro_batch
    found = rank.last_observation
    rank.zero_grad()
    assert found is not None
    assert found.caller_bytes is not None
    return found.caller_bytes, found.phase, found.peak_bytes


def test_what_the_loss_adds_is_measured_by_itself(new_rank: NewRank) -> None:
    """And no byte of the forward before it or of the inner backward after it."""
    rank = new_rank(caller_bytes_per_token=10**6)
    light, _, _ = observed(rank, 1)
    more, _, _ = observed(rank, 1001)
    # 1,000 float64 values per token more; with their squares, their gradient and a product on the way to it.
    assert more - light == pytest.approx(4 * 8 * 1000 * TOKENS, rel=0.01)


def test_the_phase_of_the_peak_is_told(new_rank: NewRank) -> None:
    """A loss that dwarfs the pass peaks in itself or in its backward; a light one never in the loss."""
    rank = new_rank(caller_bytes_per_token=10**6)
    assert observed(rank, 1)[1] in ("forward", "backward")
    large, phase, peak = observed(rank, 20_000)
    assert phase in ("loss", "backward")
    assert peak > large


def test_a_loss_above_its_declaration_is_reported_once_by_name(new_rank: NewRank) -> None:
    """With both figures and what to do; within the declaration nothing is said."""
    rank = new_rank(caller_bytes_per_token=256)
    # The library warns of names of its own when the model is copied for the first price.
    rank.plan(BATCH)
    with pytest.warns(RuntimeWarning, match=r"caller_above_declaration: .* caller_bytes_per_token is 256.*trace_loss"):
        observed(rank, 1000)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", category=RuntimeWarning)
        observed(rank, 1000)


def test_a_loss_within_its_declaration_is_not_reported(new_rank: NewRank) -> None:
    """Warnings are errors here."""
    observed(new_rank(caller_bytes_per_token=40_000), 1000)
    observed(new_rank(caller_bytes_per_token=256), 1)


def test_without_gradients_there_is_no_loss_to_measure(new_rank: NewRank) -> None:
    """Scoring alone has a forward."""
    rank = new_rank()
    for micro_batch in rank.forward_micro_batches(completions([4, 5]), normalisation="sum"):
        del micro_batch
    found = rank.last_observation
    assert found is not None
    assert (found.caller_bytes, found.phase) == (None, "forward")


def test_what_a_forward_frees_of_others_is_not_the_callers() -> None:
    """A meter whose live bytes fall during the forward, when something older is collected."""

    class Told(BentMeter):
        live, peak = 1000, 1000

        def read(self) -> Reading:
            return replace(self.inner.read(), allocated_bytes=self.live, peak_allocated_bytes=self.peak)

    with Told(open_meter("cpu"), lambda reading: reading) as told:
        watch = PeakWatch(told)
        told.live, told.peak = 400, 1010
        watch.outputs_done()
        told.live, told.peak = 420, 430
        watch.backward_begins()
        assert watch.caller_bytes == 30
        watch.finish()
        assert (watch.peak_bytes, watch.phase) == (10, "forward")
