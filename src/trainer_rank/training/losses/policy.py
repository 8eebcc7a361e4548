"""Losses over sampled sequences, weighted by advantage and by how much likelier each token has become.

With r_it = exp(logp_it - old_it), A_it the advantage and sg the stop-gradient:

    cispo      - sum_i c_i sum_t sg(clip(r_it, 1 - epsilon_low, 1 + epsilon_high)) A_it logp_it

    grpo       sum_i c_i sum_t (- min(r_it A_it, clip(r_it, 1 - epsilon_low, 1 + epsilon_high) A_it) + beta kl_it)
               kl_it = exp(ref_it - logp_it) - (ref_it - logp_it) - 1

    ppo-clip   the same without the penalty

Sources: CISPO, MiniMax-M1 (arXiv 2506.13585, section 3.1); GRPO, DeepSeekMath (arXiv 2402.03300, eq. 3 and, for the
penalty, eq. 4: the unbiased estimator called k3 in J. Schulman, "Approximating KL Divergence", 2020); PPO (arXiv
1707.06347, eq. 7). Clipping the importance weight, as CISPO does, keeps a gradient for every token; clipping the
surrogate drops the gradient of a token that has moved far enough in the direction of its advantage. As in its paper,
CISPO sets no lower bound by default; the paper does not state its upper one, and the default lets a token weigh at
most five times its on-policy weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer_rank.training.loss_options import LOSSES
from trainer_rank.training.losses.base import ScoredBatch, ScoredRequest, by_position, like, scored_mask, scored_rows
from trainer_rank.training.rollouts import Rollout

EPSILON_LOW: Final[float] = LOSSES["cispo"]["epsilon_low"]
EPSILON_HIGH: Final[float] = LOSSES["cispo"]["epsilon_high"]
EPSILON: Final[float] = LOSSES["ppo-clip"]["epsilon_low"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sampled:
    """How a request came about, carried as its payload for ``cispo``, ``grpo`` and ``ppo_clip``.

    Attributes:
        advantage: Finite number, or float32 (N,) aligned with the *positions* that score.
        old_logprobs: float32 (N,), aligned likewise: entry i is the log-probability that token i + 1 had when it was
            sampled; 0 where nothing is scored.
        ref_logprobs: The same under the reference model; None when there is none.
    """

    advantage: float | npt.NDArray[np.float32]
    old_logprobs: npt.NDArray[np.float32]
    ref_logprobs: npt.NDArray[np.float32] | None = None


def sampled(rollout: Rollout) -> Sampled | None:
    """Return the payload of a rollout; None when it lacks advantages or old log-probabilities."""
    advantage: float | npt.NDArray[np.float32] | None = rollout.advantage
    if rollout.advantages is not None:
        advantage = by_position(rollout, rollout.advantages)
    if advantage is None or rollout.old_logprobs is None:
        return None
    reference = rollout.ref_logprobs
    return Sampled(
        advantage=advantage,
        old_logprobs=by_position(rollout, rollout.old_logprobs),
        ref_logprobs=None if reference is None else by_position(rollout, reference),
    )


def cispo(micro_batch: ScoredBatch, *, epsilon_low: float = EPSILON_LOW, epsilon_high: float = EPSILON_HIGH) -> Tensor:
    """Return the CISPO loss, a scalar with graph; exactly 0 when nothing is scored.

    Every request's payload must be a ``Sampled``.

    Raises:
        TypeError: A payload is something else.
    """
    terms = []
    for coefficient, request, logprobs in scored_rows(micro_batch):
        payload = sampled_payload(request, "cispo")
        old = like(payload.old_logprobs, logprobs)
        weight = torch.exp(logprobs.detach() - old).clamp(1.0 - epsilon_low, 1.0 + epsilon_high)
        terms.append(-coefficient * (like(payload.advantage, logprobs) * weight * logprobs).sum())
    return torch.stack(terms).sum()


def grpo(
    micro_batch: ScoredBatch,
    *,
    epsilon_low: float = EPSILON,
    epsilon_high: float = EPSILON,
    kl_coefficient: float = 0.0,
) -> Tensor:
    """Return the clipped surrogate with a penalty on leaving the reference, a scalar with graph.

    Exactly 0 when nothing is scored. Every request's payload must be a ``Sampled``, with ``ref_logprobs`` where there
    is a penalty. A ratio exactly at its bound has the gradient of the unclipped term.

    Raises:
        TypeError: A payload is something else, or lacks the reference.
    """
    name = "grpo" if kl_coefficient else "the clipped surrogate"
    terms = []
    for coefficient, request, logprobs in scored_rows(micro_batch):
        payload, scored = sampled_payload(request, name), _scored(request, logprobs)
        tokens = _surrogate(payload, logprobs, scored, epsilon_low, epsilon_high)
        if kl_coefficient:
            tokens = tokens + kl_coefficient * _k3(reference_of(payload, logprobs), logprobs, scored)
        terms.append(coefficient * tokens.sum())
    return torch.stack(terms).sum()


def ppo_clip(micro_batch: ScoredBatch, *, epsilon_low: float = EPSILON, epsilon_high: float = EPSILON) -> Tensor:
    """Return the clipped surrogate, a scalar with graph; exactly 0 when nothing is scored.

    Every request's payload must be a ``Sampled``; its advantage may be one number or one per position.

    Raises:
        TypeError: A payload is something else.
    """
    return grpo(micro_batch, epsilon_low=epsilon_low, epsilon_high=epsilon_high)


def sampled_payload(request: ScoredRequest, name: str) -> Sampled:
    """Return a request's payload, for the loss ``name``.

    Raises:
        TypeError: It is no ``Sampled``.
    """
    if not isinstance(request.payload, Sampled):
        raise TypeError(f"{name} needs a Sampled as the request's payload, got {type(request.payload).__name__}")
    return request.payload


def reference_of(payload: Sampled, logprobs: Tensor) -> Tensor:
    """Return the reference's log-probs as a tensor like the request's own.

    Raises:
        TypeError: There are none.
    """
    if payload.ref_logprobs is None:
        raise TypeError(
            "grpo with a kl_coefficient needs ref_logprobs in the payload, got None; write them into the data, or "
            "set reference to adapter-off"
        )
    return like(payload.ref_logprobs, logprobs)


def clipped_tokens(ratio: Tensor, advantage: Tensor, epsilon_low: float, epsilon_high: float) -> Tensor:
    """Return where the clipped term is the smaller one of the surrogate, bool: such a token has no gradient."""
    return ((advantage > 0) & (ratio > 1.0 + epsilon_high)) | ((advantage < 0) & (ratio < 1.0 - epsilon_low))


def _scored(request: ScoredRequest, logprobs: Tensor) -> Tensor:
    return torch.as_tensor(scored_mask(request), device=logprobs.device)


def _surrogate(payload: Sampled, logprobs: Tensor, scored: Tensor, low: float, high: float) -> Tensor:
    """Return - min(r A, clip(r) A) by position, 0 where nothing is scored."""
    old, advantage = like(payload.old_logprobs, logprobs), like(payload.advantage, logprobs)
    ratio = torch.exp(logprobs.detach() - old)
    constant = clipped_tokens(ratio, advantage, low, high) | (advantage == 0) | ~scored
    bound = torch.where(advantage > 0, (1.0 + high) * advantage, (1.0 - low) * advantage)
    bound = torch.where(scored, bound, torch.zeros_like(bound))
    # The exponent is held at 0 where the clipped term counts: its exp could overflow, and infinity times the 0 that
    # comes back to it is not a number.
    moving = torch.exp(torch.where(constant, torch.zeros_like(old), logprobs - old)) * advantage
    return -torch.where(constant, bound, moving)


def _k3(reference: Tensor, logprobs: Tensor, scored: Tensor) -> Tensor:
    """Return exp(ref - logp) - (ref - logp) - 1 by position, 0 where nothing is scored; never negative."""
    difference = torch.where(scored, reference - logprobs, torch.zeros_like(reference))
    return torch.expm1(difference) - difference
