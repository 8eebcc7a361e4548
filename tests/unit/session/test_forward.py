"""``forward``: all graphs alive at return, in as few forwards as fit, or a refusal before anything ran."""

from __future__ import annotations

import pytest
import torch

from tests.builders import completions, distance, gradients, negative_sum, offering, run
from tests.unit.session.conftest import NewRank
from trainer_rank.errors import TrainerRankMemoryError
from trainer_rank.meters import Meter
from trainer_rank.requests import Request

# Unlike one another, so that a forward of its own costs no shared rows.
BATCH = [request for seed in range(6) for request in completions([40], prompt=60, seed=10 * seed)]


def test_all_graphs_are_alive_and_the_numbers_are_those_of_the_parts(new_rank: NewRank) -> None:
    """One loss over everything, after the call has returned."""
    rank = new_rank()
    loss, wanted, _ = run(rank, BATCH)
    rank.zero_grad()
    whole = rank.forward(BATCH)
    assert whole.indices == tuple(range(len(BATCH)))
    part = negative_sum(whole)
    part.backward()
    assert float(part.detach()) == pytest.approx(loss, rel=1e-12)
    assert distance(gradients(rank), wanted) < 1e-10


def test_its_peak_is_measured_when_the_rank_is_used_next(new_rank: NewRank) -> None:
    """The backward is the caller's, and part of the peak."""
    rank = new_rank()
    whole = rank.forward(BATCH)
    assert whole.observed is None
    negative_sum(whole).backward()
    rank.optim_step(lr=1e-3)
    assert whole.observed is not None
    assert 0 < whole.observed.peak_bytes <= 1.01 * whole.stats.required_bytes


def test_it_runs_in_more_forwards_when_that_is_what_fits(new_rank: NewRank, meter: Meter) -> None:
    """Between the two prices, several forwards are admitted where one is not; the numbers do not change."""
    rank = new_rank()
    one = rank.forward(BATCH)
    negative_sum(one).backward()
    wanted = gradients(rank)
    rank.zero_grad()
    needed = one.stats.required_bytes
    del one
    pending = rank.runtime.facts.adam_state_bytes
    small = new_rank(meter=offering(meter, int(0.97 * needed) + pending))
    several = small.forward(BATCH)
    assert several.stats.passes > 1
    assert several.stats.required_bytes < needed
    negative_sum(several).backward()
    assert distance(gradients(small), wanted) < 1e-10
    meter.prepare()


def test_what_fits_in_no_number_of_forwards_is_refused(new_rank: NewRank, meter: Meter) -> None:
    """By name, with the way that does not keep everything alive."""
    needed = new_rank().plan(BATCH[:1])[0].admission.charged_bytes
    small = new_rank(meter=offering(meter, 2 * needed))
    with pytest.raises(TrainerRankMemoryError, match=r"6 requests cannot be alive together.*forward_micro") as caught:
        small.forward(BATCH)
    meter.prepare()
    assert caught.value.refused
    assert caught.value.short_bytes > 0
    assert all(parameter.grad is None for parameter in small.runtime.trainable_parameters())


def test_inactive_requests_and_none_at_all(new_rank: NewRank) -> None:
    """They have a place in the outputs and cost nothing."""
    rank = new_rank()
    inactive = Request(tokens=[1, 2, 3])
    whole = rank.forward({"a": BATCH[0], "b": [inactive]})
    assert whole.outputs["b"][0].logprobs is None
    assert torch.is_tensor(whole.outputs["a"].logprobs)
    assert rank.forward([]).indices == ()
