"""Every loss written from its formula: each request alone, all logits, one token at a time, plain autograd.

Nothing here knows micro-batches, coefficients or payloads. A formula reads a rollout's fields as the file has them, by
token, and the means are taken as their names say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from trainer_rank.training.rollouts import Rollout

Token = Callable[[Rollout, int, Tensor], Tensor]
"""The loss of one token, from its rollout, its place and its log-probability."""


def token_logprobs(model: Any, rollout: Rollout) -> dict[int, Tensor]:
    """Return the log-probability of each trained token, a float64 scalar with graph, by its place."""
    ids = torch.from_numpy(rollout.tokens.copy())
    table = model(input_ids=ids[None], use_cache=False).logits[0].double().log_softmax(-1)
    return {t: table[t - 1, ids[t]] for t in range(1, len(ids)) if rollout.trained[t]}


def sft(rollout: Rollout, t: int, logp: Tensor) -> Tensor:
    """- logp."""
    return -logp


def cispo(rollout: Rollout, t: int, logp: Tensor) -> Tensor:
    """- sg(clip(r, 0, 5)) A logp."""
    weight = min(max(float(_ratio(rollout, t, logp.detach())), 0.0), 5.0)
    return -weight * _advantage(rollout, t) * logp


def ppo_clip(rollout: Rollout, t: int, logp: Tensor) -> Tensor:
    """- min(r A, clip(r, 0.8, 1.2) A)."""
    ratio, advantage = _ratio(rollout, t, logp), _advantage(rollout, t)
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)


def grpo(rollout: Rollout, t: int, logp: Tensor) -> Tensor:
    """The same, and 0.1 (exp(ref - logp) - (ref - logp) - 1)."""
    assert rollout.ref_logprobs is not None
    difference = float(rollout.ref_logprobs[t]) - logp
    return ppo_clip(rollout, t, logp) + 0.1 * (difference.exp() - difference - 1)


def reinforce(rollout: Rollout, t: int, logp: Tensor) -> Tensor:
    """- reward logp."""
    assert rollout.reward is not None
    return -rollout.reward * logp


TOKEN_LOSSES: dict[str, Token] = {
    "sft": sft, "cispo": cispo, "grpo": grpo, "ppo-clip": ppo_clip, "custom": reinforce
}  # fmt: skip


def over_tokens(model: Any, rollouts: Sequence[Rollout], token: Token, normalisation: str) -> Tensor:
    """Return the loss of a whole step, with graph: a weighted mean over tokens or sequences, or the weighted sum."""
    total, count = torch.zeros((), dtype=torch.float64), 0.0
    for rollout in rollouts:
        parts = [token(rollout, t, logp) for t, logp in token_logprobs(model, rollout).items()]
        if not parts:
            continue
        summed = torch.stack(parts).sum()
        total = total + rollout.weight * (summed / len(parts) if normalisation == "sequence-mean" else summed)
        count += rollout.weight * (len(parts) if normalisation == "token-mean" else 1)
    return total if normalisation == "sum" else total / count


def over_pairs(model: Any, rollouts: Sequence[Rollout], normalisation: str) -> Tensor:
    """Return the DPO loss with beta 0.1 of pairs of neighbours, with graph: their weighted mean or sum."""
    total, count = torch.zeros((), dtype=torch.float64), 0.0
    for first, second in zip(rollouts[::2], rollouts[1::2], strict=True):
        chosen, rejected = (first, second) if first.chosen else (second, first)
        margin = _gain(model, chosen) - _gain(model, rejected)
        total = total - first.weight * torch.log(1 / (1 + torch.exp(-0.1 * margin)))
        count += first.weight
    return total / count if normalisation == "sequence-mean" else total


def _gain(model: Any, rollout: Rollout) -> Tensor:
    assert rollout.ref_logprobs is not None
    parts = [logp - float(rollout.ref_logprobs[t]) for t, logp in token_logprobs(model, rollout).items()]
    return torch.stack(parts).sum()


def _ratio(rollout: Rollout, t: int, logp: Tensor) -> Tensor:
    assert rollout.old_logprobs is not None
    return torch.exp(logp - float(rollout.old_logprobs[t]))


def clipped(model: Any, rollouts: Sequence[Rollout]) -> tuple[int, int]:
    """Return how many tokens the surrogate clips above and below: a positive and a negative advantage's."""
    above = below = 0
    for rollout in rollouts:
        with torch.no_grad():
            ratios = {t: float(_ratio(rollout, t, logp)) for t, logp in token_logprobs(model, rollout).items()}
        above += sum(ratio > 1.2 and _advantage(rollout, t) > 0 for t, ratio in ratios.items())
        below += sum(ratio < 0.8 and _advantage(rollout, t) < 0 for t, ratio in ratios.items())
    return above, below


def _advantage(rollout: Rollout, t: int) -> float:
    if rollout.advantages is not None:
        return float(rollout.advantages[t])
    assert rollout.advantage is not None
    return rollout.advantage
