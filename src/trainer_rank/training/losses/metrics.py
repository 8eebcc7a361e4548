"""Figures beside a loss, such as how many tokens were clipped: means that do not depend on the split.

A figure is sum_i c_i sum_t x_it over sum_i c_i n_i, with the loss's own coefficients c_i and n_i the trained tokens;
both sums go over the whole step. So a token (or, for ``sequence-mean``, a sequence, and for ``dpo`` a pair) counts as
much as it counts in the loss, and where the coefficients add up to a mean, the denominator is 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from trainer_rank.training.losses.base import ScoredBatch, like, scored_mask, scored_rows
from trainer_rank.training.losses.dpo import scored_pairs
from trainer_rank.training.losses.policy import clipped_tokens, sampled_payload

_MOST_LOG_RATIO: Final = 20.0
"""Log-ratios are bounded to this in the figures, which must stay finite; the loss knows no such bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSums:
    """Sums of a micro-batch, or of several added together.

    Attributes:
        weight: sum_i c_i n_i.
        sums: sum_i c_i sum_t x_it by name of the figure.
    """

    weight: float = 0.0
    sums: Mapping[str, float] = field(default_factory=dict)

    def __add__(self, other: MetricSums) -> MetricSums:
        names = dict.fromkeys((*self.sums, *other.sums))
        return MetricSums(
            weight=self.weight + other.weight,
            sums={name: self.sums.get(name, 0.0) + other.sums.get(name, 0.0) for name in names},
        )

    def means(self) -> dict[str, float]:
        """Return the figures; none when nothing counts."""
        return {name: value / self.weight for name, value in self.sums.items()} if self.weight else {}


def policy_metrics(
    micro_batch: ScoredBatch, *, epsilon_low: float, epsilon_high: float, surrogate: bool, reference: bool
) -> MetricSums:
    """Return what moved since the tokens were sampled.

    ``clip_fraction``: tokens whose importance weight lies outside its bounds, or, for the clipped ``surrogate``, whose
    gradient the clip drops. ``ratio``: of new to old probability. ``kl_old``: the estimate (r - 1) - log r of the
    divergence from the sampling policy. ``kl_reference``, with ``reference``: the penalty's own estimate.

    Raises:
        TypeError: A payload is no ``Sampled``, or lacks the reference.
    """
    names = ("clip_fraction", "ratio", "kl_old", *(("kl_reference",) if reference else ()))
    weight, rows = 0.0, []
    with torch.no_grad():
        for coefficient, request, graph in scored_rows(micro_batch):
            payload, logprobs = sampled_payload(request, "the metrics"), graph.detach()
            scored = torch.as_tensor(scored_mask(request), device=logprobs.device)
            log_ratio = _bounded(logprobs - like(payload.old_logprobs, logprobs), scored)
            ratio = log_ratio.exp()
            if surrogate:
                clipped = clipped_tokens(ratio, like(payload.advantage, logprobs), epsilon_low, epsilon_high)
            else:
                clipped = (ratio < 1.0 - epsilon_low) | (ratio > 1.0 + epsilon_high)
            figures = [(clipped & scored).sum(), (ratio * scored).sum(), (log_ratio.expm1() - log_ratio).sum()]
            if reference:
                assert payload.ref_logprobs is not None, "the loss has looked at them"
                difference = _bounded(like(payload.ref_logprobs, logprobs) - logprobs, scored)
                figures.append((difference.expm1() - difference).sum())
            rows.append(coefficient * torch.stack([one.to(logprobs.dtype) for one in figures]))
            weight += coefficient * request.num_trained
        values = torch.stack(rows).sum(0).tolist() if rows else [0.0] * len(names)
    return MetricSums(weight=weight, sums=dict(zip(names, values, strict=True)))


def preference_metrics(micro_batch: ScoredBatch, *, beta: float, normalisation: str) -> MetricSums:
    """Return how the pairs stand, with the implicit reward beta (logp - ref).

    ``accuracy``: pairs whose chosen member has the higher reward. ``margin``: its reward less the other's.
    ``chosen_reward`` and ``rejected_reward``: the two.

    Raises:
        TypeError, RequestError, ValueError: As ``dpo``.
    """
    weight, rows = 0.0, []
    with torch.no_grad():
        for pair in scored_pairs(micro_batch, normalisation):
            chosen, rejected = beta * pair.chosen.detach(), beta * pair.rejected.detach()
            margin = chosen - rejected
            rows.append(pair.weight * torch.stack([(margin > 0).to(margin.dtype), margin, chosen, rejected]))
            weight += pair.weight
        values = torch.stack(rows).sum(0).tolist() if rows else [0.0] * 4
    return MetricSums(
        weight=weight, sums=dict(zip(("accuracy", "margin", "chosen_reward", "rejected_reward"), values, strict=True))
    )


def _bounded(log_ratio: Tensor, scored: Tensor) -> Tensor:
    return torch.where(scored, log_ratio.clamp(-_MOST_LOG_RATIO, _MOST_LOG_RATIO), torch.zeros_like(log_ratio))
