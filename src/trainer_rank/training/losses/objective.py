"""What a configuration's loss asks of a run, in one place: data, payloads, pairs, references, checks, figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from trainer_rank.requests import Request
from trainer_rank.session import TrainerRank
from trainer_rank.training.config import LossSection
from trainer_rank.training.loss_options import needed_fields
from trainer_rank.training.losses.advantages import with_group_advantages
from trainer_rank.training.losses.base import Loss, ScoredBatch
from trainer_rank.training.losses.custom import checked, load_function
from trainer_rank.training.losses.dpo import dpo, keep_pairs, preference
from trainer_rank.training.losses.metrics import MetricSums, policy_metrics, preference_metrics
from trainer_rank.training.losses.pairs import check_pairs
from trainer_rank.training.losses.policy import cispo, grpo, ppo_clip, sampled
from trainer_rank.training.losses.reference import with_references
from trainer_rank.training.losses.sft import sft
from trainer_rank.training.rollouts import Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """A loss with all that goes with it.

    Attributes:
        section: As configured.
        loss: The function itself.
    """

    section: LossSection
    loss: Loss

    @property
    def needs(self) -> frozenset[str]:
        """Fields that every line of the data must have."""
        section = self.section
        return needed_fields(
            section.name,
            kl_coefficient=section.kl_coefficient,
            advantages=section.advantages,
            reference=section.reference,
        )

    def prepare(self, rollouts: Sequence[Rollout], path: Path) -> list[Rollout]:
        """Return the rollouts of the training data ``path`` with what the loss derives from all of them.

        Raises:
            DataError: A preference pair is not whole.
        """
        if self.section.name == "dpo":
            check_pairs(rollouts, path)
        if self.section.advantages == "group":
            return with_group_advantages(rollouts)
        return list(rollouts)

    def payload(self, rollout: Rollout) -> object:
        """Return what the loss needs with a request; a custom loss gets the rollout itself."""
        if self.section.name == "custom":
            return rollout
        return preference(rollout) if self.section.name == "dpo" else sampled(rollout)

    def nest(self, requests: Sequence[Request]) -> list[Any]:
        """Return the requests of one step as a nest that keeps together what the loss needs together."""
        return keep_pairs(requests) if self.section.name == "dpo" else list(requests)

    def referenced(self, rank: TrainerRank, requests: Sequence[Request]) -> list[Request]:
        """Return the requests with the reference's log-probs where the loss takes them from the weights themselves.

        Raises:
            RequestError: The rank has no adapter to turn off.
            TrainerRankMemoryError: A request cannot fit.
        """
        if self.section.reference == "adapter-off":
            return with_references(rank, requests)
        return list(requests)

    def checked(self, value: Tensor, micro_batch: ScoredBatch, *, step: int) -> Tensor:
        """Return the value of the loss; what a function of the user's own returned is checked first.

        Raises:
            TrainingError: It cannot be trained on.
        """
        if self.section.function is None:
            return value
        return checked(value, micro_batch, function=self.section.function, step=step)

    def metrics(self, micro_batch: ScoredBatch) -> MetricSums:
        """Return the figures beside the loss; ``sft`` and custom losses have none."""
        section = self.section
        if section.name == "dpo":
            assert section.beta is not None, "filled in by the configuration"
            return preference_metrics(micro_batch, beta=section.beta, normalisation=section.normalisation)
        if section.epsilon_low is None or section.epsilon_high is None:
            return MetricSums()
        return policy_metrics(
            micro_batch,
            epsilon_low=section.epsilon_low,
            epsilon_high=section.epsilon_high,
            surrogate=section.name != "cispo",
            reference=bool(section.kl_coefficient),
        )


def objective_for(section: LossSection) -> Objective:
    """Return the loss a configuration asks for, with all that goes with it.

    Raises:
        ConfigError: A custom loss cannot be loaded.
    """
    return Objective(section=section, loss=loss_for(section))


def loss_for(section: LossSection) -> Loss:
    """Return the loss a configuration asks for.

    Raises:
        ConfigError: A custom loss cannot be loaded.
    """
    if section.name == "custom":
        assert section.function is not None, "the configuration demands it"
        return load_function(section.function)
    if section.name == "dpo":
        return partial(dpo, beta=_set(section.beta), normalisation=section.normalisation)
    if section.name == "sft":
        return sft
    low, high = _set(section.epsilon_low), _set(section.epsilon_high)
    if section.name == "grpo":
        return partial(grpo, epsilon_low=low, epsilon_high=high, kl_coefficient=_set(section.kl_coefficient))
    return partial(cispo if section.name == "cispo" else ppo_clip, epsilon_low=low, epsilon_high=high)


def _set(value: float | None) -> float:
    assert value is not None, "filled in by the configuration"
    return value
