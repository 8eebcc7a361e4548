"""The clipped surrogate, its penalty and the per-token advantages, against twins in plain Python numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tests.builders import tiny_runtime
from tests.unit.training.loss_batches import batch, gradient, leaf, partitions, request
from trainer_rank.requests import normaliser
from trainer_rank.session.caller import traced_bytes_per_token
from trainer_rank.session.rank import CALLER_BYTES_PER_TOKEN
from trainer_rank.training.config import LossSection
from trainer_rank.training.losses import Sampled, cispo, grpo, loss_for, objective_for, ppo_clip, sampled
from trainer_rank.training.losses.advantages import group_advantages, with_group_advantages
from trainer_rank.training.rollouts import read_rollouts

LOW, HIGH = 0.2, 0.3


def payload(advantage: float | Sequence[float], old: Sequence[float], ref: Sequence[float] | None = None) -> Sampled:
    """Return how a request came about."""
    return Sampled(
        advantage=advantage if isinstance(advantage, float) else np.asarray(advantage, dtype=np.float32),
        old_logprobs=np.asarray(old, dtype=np.float32),
        ref_logprobs=None if ref is None else np.asarray(ref, dtype=np.float32),
    )


def naive(logp: float, old: float, advantage: float, ref: float | None, beta: float) -> float:
    """Return one token's loss, as the papers write it."""
    ratio = math.exp(logp - old)
    loss = -min(ratio * advantage, min(max(ratio, 1 - LOW), 1 + HIGH) * advantage)
    return loss if ref is None else loss + beta * (math.exp(ref - logp) - (ref - logp) - 1)


def slope(logp: float, old: float, advantage: float, ref: float | None, beta: float) -> float:
    """Return the derivative of ``naive``, by central differences."""
    step = 1e-6
    return (naive(logp + step, old, advantage, ref, beta) - naive(logp - step, old, advantage, ref, beta)) / (2 * step)


@pytest.mark.parametrize("advantage", [2.0, -1.5, 0.0])
@pytest.mark.parametrize("shift", [-1.0, -0.1, 0.0, 0.1, 1.0])
@pytest.mark.parametrize("beta", [0.0, 0.7])
def test_grpo_is_the_formula(advantage: float, shift: float, beta: float) -> None:
    """Clipped above, below and not at all, for either sign and none: values and gradients of a twin."""
    old, ref = -1.25, -0.5
    logprobs = leaf([old + shift, 0.0])
    given = payload(advantage, [old, 0.0], [ref, 0.0] if beta else None)
    loss = grpo(
        batch([request([1, 0], given)], [logprobs], [0.5]), epsilon_low=LOW, epsilon_high=HIGH, kl_coefficient=beta
    )
    loss.backward()
    token = (old + shift, old, advantage, ref if beta else None, beta)
    assert loss.item() == pytest.approx(0.5 * naive(*token), abs=1e-12)
    assert gradient(logprobs) == pytest.approx([0.5 * slope(*token), 0.0], abs=1e-8)


@pytest.mark.parametrize(("advantage", "shift", "moves"), [(1.0, 1.0, False), (1.0, -1.0, True), (-1.0, 1.0, True),
                                                          (-1.0, -1.0, False)])  # fmt: skip
def test_a_token_that_moved_far_enough_gets_no_gradient(advantage: float, shift: float, moves: bool) -> None:
    """Only in the direction of its advantage; what went the other way may always come back."""
    logprobs = leaf([-2.0 + shift])
    ppo_clip(batch([request([1], payload(advantage, [-2.0]))], [logprobs], [1.0])).backward()
    assert (gradient(logprobs) != [0.0]) is moves


def test_ppo_clip_takes_an_advantage_per_token() -> None:
    """Each token has its own sign."""
    logprobs = leaf([-1.0, -1.0, -1.0])
    given = payload([1.0, -2.0, 0.0], [-1.0, -1.0, -1.0])
    loss = ppo_clip(batch([request([1, 1, 1], given)], [logprobs], [0.25]))
    loss.backward()
    assert loss.item() == pytest.approx(0.25)
    assert gradient(logprobs) == pytest.approx([-0.25, 0.5, 0.0])


def test_cispo_takes_an_advantage_per_token() -> None:
    """On policy the gradient is the advantage of each token."""
    logprobs = leaf([-1.0, -2.0])
    cispo(batch([request([1, 1], payload([3.0, -1.0], [-1.0, -2.0]))], [logprobs], [1.0])).backward()
    assert gradient(logprobs) == pytest.approx([-3.0, 1.0])


@pytest.mark.parametrize("advantage", [1.0, 0.0])
def test_an_overflowing_ratio_that_is_clipped_leaves_numbers(advantage: float) -> None:
    """exp overflows, the clipped term counts, and the gradient is 0 instead of infinity times 0."""
    logprobs = leaf([-1.0])
    loss = ppo_clip(batch([request([1], payload(advantage, [-1e4]))], [logprobs], [1.0]))
    loss.backward()
    assert loss.item() == pytest.approx(-1.2 * advantage)
    assert gradient(logprobs) == [0.0]


def test_the_penalty_is_zero_at_the_reference_and_positive_elsewhere() -> None:
    """k3 is never negative, and its gradient pulls towards the reference."""
    logprobs = leaf([-1.0, -2.0, -0.5])
    given = payload(0.0, [-1.0, -2.0, -0.5], [-1.0, -1.0, -1.0])
    loss = grpo(batch([request([1, 1, 1], given)], [logprobs], [1.0]), kl_coefficient=1.0)
    loss.backward()
    assert loss.item() == pytest.approx((math.e - 2) + (math.exp(-0.5) - 0.5))
    assert gradient(logprobs) == pytest.approx([0.0, 1 - math.e, 1 - math.exp(-0.5)])


@pytest.mark.parametrize("name", ["cispo", "grpo", "ppo-clip"])
def test_what_is_masked_counts_nowhere(name: str) -> None:
    """A batch in which nothing is scored gives exactly 0, with graph, and without figures."""
    objective = objective_for(LossSection.model_validate({"name": name}))
    logprobs = leaf([0.0, 0.0])
    masked = batch([request([0, 0], payload(3.0, [0.0, 0.0]))], [logprobs], [0.0])
    loss = objective.loss(masked)
    loss.backward()
    assert loss.item() == 0.0
    assert gradient(logprobs) == [0.0, 0.0]
    assert objective.metrics(masked).means() == {}


@pytest.mark.parametrize("kind", ["token-mean", "sequence-mean", "sum"])
@pytest.mark.parametrize("options", [{"name": "cispo", "epsilon_high": 0.2}, {"name": "ppo-clip"},
                                     {"name": "grpo", "kl_coefficient": 0.1}])  # fmt: skip
def test_loss_gradient_and_figures_do_not_depend_on_the_split(options: dict[str, Any], kind: str) -> None:
    """All fifteen partitions of four requests of different lengths and weights."""
    objective = objective_for(LossSection.model_validate({**options, "normalisation": kind}))
    draw = np.random.default_rng(0)
    masks = [[1, 1, 0], [1], [0, 0], [1, 1, 1, 0, 1]]
    requests = [
        request(mask, payload(float(draw.normal()), -draw.random(len(mask)) * mask, -draw.random(len(mask)) * mask), w)
        for mask, w in zip(masks, (1.0, 2.0, 1.0, 0.5), strict=True)
    ]
    values = [-draw.random(len(mask)) * mask for mask in masks]
    coefficients = normaliser(requests, kind).coefficients
    seen = []
    for partition in partitions((0, 1, 2, 3)):
        rows, total, sums = [leaf(one.tolist()) for one in values], 0.0, None
        for part in partition:
            micro_batch = batch(
                [requests[i] for i in part], [rows[i] for i in part], [coefficients[i] for i in part]
            )  # fmt: skip
            loss = objective.loss(micro_batch)
            loss.backward()
            total += loss.item()
            found = objective.metrics(micro_batch)
            sums = found if sums is None else sums + found
        assert sums is not None
        seen.append([total, *(number for row in rows for number in gradient(row)), *sums.means().values()])
    assert len(seen) == 15
    assert max(abs(seen[0][0]), *map(abs, seen[0][1:])) > 0.1
    for other in seen[1:]:
        assert other == pytest.approx(seen[0], abs=1e-12)


def test_the_figures_are_means_over_trained_tokens() -> None:
    """One of three tokens is clipped; ratios and divergences are those of plain arithmetic."""
    objective = objective_for(LossSection.model_validate({"name": "grpo", "kl_coefficient": 0.1}))
    shifts = [1.0, -1.0, 0.0]
    given = payload(1.0, [-2.0] * 3 + [0.0], [-2.0] * 3 + [0.0])
    requests = [request([1, 1, 1, 0], given)]
    rows = [leaf([-2.0 + shift for shift in shifts] + [0.0])]
    means = objective.metrics(batch(requests, rows, normaliser(requests, "sum").coefficients)).means()
    assert means["clip_fraction"] == pytest.approx(1 / 3)
    assert means["ratio"] == pytest.approx(sum(map(math.exp, shifts)) / 3)
    assert means["kl_old"] == pytest.approx(sum(math.exp(one) - 1 - one for one in shifts) / 3)
    assert means["kl_reference"] == pytest.approx(sum(math.exp(-one) - 1 + one for one in shifts) / 3)


def test_figures_stay_finite_where_a_ratio_overflows() -> None:
    """They are written as JSON, which has no infinity."""
    objective = objective_for(LossSection.model_validate({"name": "ppo-clip"}))
    means = objective.metrics(batch([request([1], payload(1.0, [-1e4]))], [leaf([-1.0])], [1.0])).means()
    assert means["clip_fraction"] == 1.0
    assert all(math.isfinite(one) for one in means.values())


@pytest.mark.parametrize("name", ["sft", "cispo", "grpo", "ppo-clip"])
def test_the_losses_stay_within_what_is_set_aside_for_them(name: str) -> None:
    """Forward and backward together, by a run without data: a quarter of the allowance per token."""
    section = LossSection.model_validate({"name": name, **({"kl_coefficient": 0.1} if name == "grpo" else {})})
    lists = [[-1.0] * 50] * 3
    requests = [request([1] * 50, payload(*lists)) for _ in range(4)]
    found = traced_bytes_per_token(loss_for(section), requests, tiny_runtime(dtype=torch.float32))
    assert 0 < found <= CALLER_BYTES_PER_TOKEN / 4


def test_a_wrong_payload_is_refused() -> None:
    """The message says what was found, and what to do about a reference that is missing."""
    with pytest.raises(TypeError, match="needs a Sampled as the request's payload, got NoneType"):
        ppo_clip(batch([request([1])], [leaf([-1.0])], [1.0]))
    with pytest.raises(TypeError, match="needs ref_logprobs in the payload, got None; write them into the data"):
        grpo(batch([request([1], payload(1.0, [-1.0]))], [leaf([-1.0])], [1.0]), kl_coefficient=0.1)
    with pytest.raises(ValueError, match=r"one entry per position, \(1,\), got \(2,\)"):
        ppo_clip(batch([request([1], payload(1.0, [-1.0, -1.0]))], [leaf([-1.0])], [1.0]))


def test_float32_log_probs_keep_their_type() -> None:
    """As a model gives them."""
    logprobs = leaf([-1.0, -0.5], torch.float32)
    given = payload([1.0, -1.0], [-1.0, -0.5], [-1.0, -0.5])
    assert grpo(batch([request([1, 1], given)], [logprobs], [1.0]), kl_coefficient=0.1).dtype == torch.float32


def test_lists_move_to_the_position_that_scores_them(tmp_path: Any) -> None:
    """Entry i belongs to token i + 1; untrained entries are 0, and so is the last position."""
    path = tmp_path / "data.jsonl"
    path.write_text(
        '{"tokens": [5, 6, 7], "trained": [1, 0, 1], "advantages": [1, 2, 3], "old_logprobs": [-9, -8, -7], '
        '"ref_logprobs": [-1, null, -3]}\n',
        encoding="utf-8",
    )
    found = sampled(read_rollouts(path)[0])
    assert found is not None
    assert found.ref_logprobs is not None
    assert np.asarray(found.advantage).tolist() == [0.0, 3.0, 0.0]
    assert (found.old_logprobs.tolist(), found.ref_logprobs.tolist()) == ([0.0, -7.0, 0.0], [0.0, -3.0, 0.0])


def test_group_advantages_are_standardised_rewards() -> None:
    """With the deviation of a sample: of 0 and 1 it is the square root of one half."""
    assert group_advantages([0.0, 1.0]) == pytest.approx([-0.5 / (0.5**0.5 + 1e-4), 0.5 / (0.5**0.5 + 1e-4)])
    rewards = torch.tensor([0.3, -1.0, 2.5, 0.3], dtype=torch.float64)
    wanted = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    assert group_advantages(rewards.tolist()) == pytest.approx(wanted.tolist())


@pytest.mark.parametrize("rewards", [[], [5.0], [0.1, 0.1, 0.1]])
def test_equal_rewards_give_exactly_zero(rewards: list[float]) -> None:
    """Also where their mean would be off by a rounding."""
    assert group_advantages(rewards) == [0.0] * len(rewards)


def test_a_reward_that_is_not_finite_is_refused() -> None:
    """It would make every advantage of its group no number."""
    with pytest.raises(ValueError, match="rewards must be finite, got nan"):
        group_advantages([1.0, math.nan])


def test_a_group_is_whole_wherever_its_lines_stand(tmp_path: Any) -> None:
    """Members of two groups alternate; a lone one has advantage 0 and is warned of once."""
    path = tmp_path / "data.jsonl"
    rows = [("a", 0), ("b", 5), ("a", 1), ("b", 5), ("c", 9)]
    path.write_text(
        "".join(f'{{"tokens": [1, 2], "trained": [0, 1], "group": "{g}", "reward": {r}}}\n' for g, r in rows),
        encoding="utf-8",
    )
    with pytest.warns(
        RuntimeWarning, match="single_member_groups: 1 of 3 groups have one request, the first in line 5"
    ):
        found = with_group_advantages(read_rollouts(path))
    high = 0.5 / (0.5**0.5 + 1e-4)
    assert [one.advantage for one in found] == pytest.approx([-high, 0.0, high, 0.0, 0.0])
