"""The losses against plain arithmetic, and what the split of a batch may not change."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from trainer_rank.training.config import LossSection
from trainer_rank.training.losses import Sampled, cispo, loss_for, sampled, sft
from trainer_rank.training.rollouts import read_rollouts


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeRequest:
    payload: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeScores:
    logprobs: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeBatch:
    requests: list[FakeRequest]
    results: list[FakeScores]
    coefficients: list[float]


def batch(logprobs: list[Tensor], coefficients: list[float], payloads: list[object] | None = None) -> FakeBatch:
    """Return a micro-batch of the given log-probabilities."""
    chosen = payloads if payloads is not None else [None] * len(logprobs)
    return FakeBatch(
        requests=[FakeRequest(payload=payload) for payload in chosen],
        results=[FakeScores(logprobs=one) for one in logprobs],
        coefficients=coefficients,
    )


def leaf(*values: float) -> Tensor:
    """Return log-probabilities that a gradient can be asked of."""
    return torch.tensor(values, requires_grad=True)


def test_sft_is_the_weighted_negative_log_likelihood() -> None:
    """- sum_i c_i sum_t logp_it, and each token's gradient is -c_i."""
    one, two = leaf(-1.0, -2.0, 0.0), leaf(-4.0)
    loss = sft(batch([one, two], [0.5, 0.25]))
    loss.backward()
    assert loss.item() == pytest.approx(0.5 * 3 + 0.25 * 4)
    assert one.grad is not None
    assert one.grad.tolist() == [-0.5] * 3


def test_cispo_on_policy_has_the_gradient_of_advantage_times_logprob() -> None:
    """With old equal to new the weight is 1."""
    logprobs = leaf(-1.0, -0.5)
    old = np.asarray([-1.0, -0.5], dtype=np.float32)
    loss = cispo(batch([logprobs], [0.5], [Sampled(advantage=2.0, old_logprobs=old)]))
    loss.backward()
    assert loss.item() == pytest.approx(-0.5 * 2.0 * -1.5)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-1.0, -1.0])


def test_cispo_clips_the_weight_and_keeps_the_gradient() -> None:
    """A token whose weight is clipped still has the gradient of the clipped weight, which PPO would drop."""
    logprobs = leaf(-1.0, -3.0)
    old = np.asarray([-3.0, -1.0], dtype=np.float32)
    loss = cispo(
        batch([logprobs], [1.0], [Sampled(advantage=1.0, old_logprobs=old)]), epsilon_low=0.2, epsilon_high=0.3
    )
    loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-1.3, -0.8])


def test_cispo_sets_no_lower_bound_by_default() -> None:
    """A token that became unlikely weighs exactly its ratio, down to 0."""
    logprobs = leaf(-5.0)
    old = np.asarray([-1.0], dtype=np.float32)
    cispo(batch([logprobs], [1.0], [Sampled(advantage=1.0, old_logprobs=old)])).backward()
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(-math.exp(-4.0))


def test_cispo_survives_an_overflowing_ratio() -> None:
    """exp overflows to infinity, and the clip brings it back."""
    logprobs = leaf(-1.0)
    old = np.asarray([-1e4], dtype=np.float32)
    loss = cispo(batch([logprobs], [1.0], [Sampled(advantage=1.0, old_logprobs=old)]))
    assert loss.item() == pytest.approx(5.0)


def test_cispo_refuses_a_request_without_its_payload() -> None:
    """The message says what was found."""
    with pytest.raises(TypeError, match="needs a Sampled as the request's payload, got NoneType"):
        cispo(batch([leaf(-1.0)], [1.0]))


@pytest.mark.parametrize("name", ["sft", "cispo"])
def test_an_all_masked_batch_gives_exactly_zero_with_graph(name: str) -> None:
    """Nothing scored: loss 0, gradient 0, no NaN, and backward is legal."""
    logprobs = leaf(0.0, 0.0)
    payload = Sampled(advantage=3.0, old_logprobs=np.zeros(2, dtype=np.float32))
    loss = loss_for(LossSection.model_validate({"name": name}))(batch([logprobs], [0.0], [payload]))
    loss.backward()
    assert loss.item() == 0.0
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", ["sft", "cispo"])
def test_the_losses_of_the_parts_add_up_to_the_loss_of_the_whole(name: str) -> None:
    """Splitting a batch changes neither loss nor gradient, for every split of three requests in two."""
    values = [(-1.0,), (-2.0, -0.5, 0.0), tuple(-0.01 * index for index in range(100))]
    coefficients = [0.1, 0.2, 0.3]
    payloads: list[object] = [
        Sampled(advantage=advantage, old_logprobs=np.full(len(one), -0.7, dtype=np.float32))
        for advantage, one in zip((1.0, -1.0, 0.5), values, strict=True)
    ]
    loss = loss_for(LossSection.model_validate({"name": name}))
    whole = [leaf(*one) for one in values]
    total = loss(batch(whole, coefficients, payloads))
    total.backward()
    for alone in range(3):
        parts = [leaf(*one) for one in values]
        rest = [index for index in range(3) if index != alone]
        losses = [
            loss(batch([parts[i] for i in chosen], [coefficients[i] for i in chosen], [payloads[i] for i in chosen]))
            for chosen in ([alone], rest)
        ]
        for part in losses:
            part.backward()
        assert sum(part.item() for part in losses) == pytest.approx(total.item(), rel=1e-6)
        for one, other in zip(whole, parts, strict=True):
            torch.testing.assert_close(one.grad, other.grad)


def test_old_logprobs_move_to_the_position_that_scores_them(tmp_path: Path) -> None:
    """Entry i belongs to token i + 1, untrained entries are 0, and so is the last position."""
    path = tmp_path / "data.jsonl"
    path.write_text(
        '{"tokens": [5, 6, 7], "trained": [0, 0, 1], "advantage": 1, "old_logprobs": [-9, -8, -7]}\n', encoding="utf-8"
    )
    payload = sampled(read_rollouts(path)[0])
    assert payload is not None
    assert payload.old_logprobs.tolist() == [0.0, -7.0, 0.0]
