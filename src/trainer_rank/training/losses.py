"""The two losses of a training run, as plain functions over a micro-batch.

A micro-batch brings one coefficient c_i per request, computed over the whole batch before it was split, so the losses
of the micro-batches of one step add up to the loss of the step, and so do their gradients:

    sft      - sum_i c_i sum_t logp_it

    cispo    - sum_i c_i sum_t sg(clip(exp(logp_it - old_it), 1 - epsilon_low, 1 + epsilon_high)) A_i logp_it

sg is stop-gradient. Clipping the importance weight instead of the update keeps a gradient for every token, also for
those whose weight is clipped. Source: CISPO, MiniMax-M1 (arXiv 2506.13585, section 3.1), with the advantage A_i given
per request by the caller. As there, the default sets no lower bound (epsilon_low = 1); the paper does not state its
upper one, and the default (epsilon_high = 4) lets a token weigh at most five times its on-policy weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer_rank.training.config import LossSection
from trainer_rank.training.rollouts import Rollout

EPSILON_LOW: Final = 1.0
EPSILON_HIGH: Final = 4.0


class ScoredRequest(Protocol):
    """A request as a loss sees it."""

    @property
    def payload(self) -> object: ...


class Scores(Protocol):
    """What came back for a request: ``logprobs`` float32 (N,), 0 at positions that are not scored; None if inactive."""

    @property
    def logprobs(self) -> Tensor | None: ...


class ScoredBatch(Protocol):
    """A micro-batch as a loss sees it; the three lists are aligned."""

    @property
    def requests(self) -> Sequence[ScoredRequest]: ...

    @property
    def results(self) -> Sequence[Scores]: ...

    @property
    def coefficients(self) -> Sequence[float]: ...


Loss = Callable[[ScoredBatch], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sampled:
    """How a request came about, carried as its payload for ``cispo``.

    Attributes:
        advantage: Finite.
        old_logprobs: float32 (N,), aligned with the *positions* that score: entry i is the log-probability that
            token i + 1 had when it was sampled; 0 where nothing is scored.
    """

    advantage: float
    old_logprobs: npt.NDArray[np.float32]


def sampled(rollout: Rollout) -> Sampled | None:
    """Return the payload of a rollout; None when it lacks an advantage or old log-probabilities."""
    if rollout.advantage is None or rollout.old_logprobs is None:
        return None
    by_position = np.zeros_like(rollout.old_logprobs)
    by_position[:-1] = np.where(rollout.trained, rollout.old_logprobs, 0.0)[1:]
    return Sampled(advantage=rollout.advantage, old_logprobs=by_position)


def sft(micro_batch: ScoredBatch) -> Tensor:
    """Return the normalised negative log-likelihood, a scalar with graph; exactly 0 when nothing is scored."""
    terms = [
        -coefficient * result.logprobs.sum()
        for coefficient, result in zip(micro_batch.coefficients, micro_batch.results, strict=True)
        if result.logprobs is not None
    ]
    return torch.stack(terms).sum()


def cispo(micro_batch: ScoredBatch, *, epsilon_low: float = EPSILON_LOW, epsilon_high: float = EPSILON_HIGH) -> Tensor:
    """Return the CISPO loss, a scalar with graph; exactly 0 when nothing is scored.

    Every request's payload must be a ``Sampled``.

    Raises:
        TypeError: A payload is something else.
    """
    terms = []
    for coefficient, request, result in zip(
        micro_batch.coefficients, micro_batch.requests, micro_batch.results, strict=True
    ):
        logprobs = result.logprobs
        if logprobs is None:
            continue
        if not isinstance(request.payload, Sampled):
            raise TypeError(f"cispo needs a Sampled as the request's payload, got {type(request.payload).__name__}")
        old = torch.as_tensor(request.payload.old_logprobs, device=logprobs.device)
        weight = torch.exp(logprobs.detach() - old).clamp(1.0 - epsilon_low, 1.0 + epsilon_high)
        terms.append(-coefficient * request.payload.advantage * (weight * logprobs).sum())
    return torch.stack(terms).sum()


def loss_for(section: LossSection) -> Loss:
    """Return the loss a configuration asks for."""
    if section.name == "sft":
        return sft
    low = section.epsilon_low if section.epsilon_low is not None else EPSILON_LOW
    high = section.epsilon_high if section.epsilon_high is not None else EPSILON_HIGH
    return lambda micro_batch: cispo(micro_batch, epsilon_low=low, epsilon_high=high)
