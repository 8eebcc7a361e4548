"""The losses of a training run, as plain functions over a micro-batch; docs/losses.md has the table.

A micro-batch brings one coefficient c_i per request, computed over the whole batch before it was split, so the losses
of the micro-batches of one step add up to the loss of the step, and so do their gradients.
"""

from trainer_rank.training.losses.base import Loss, ScoredBatch, ScoredRequest, Scores
from trainer_rank.training.losses.dpo import Preference, dpo, keep_pairs, preference
from trainer_rank.training.losses.metrics import MetricSums
from trainer_rank.training.losses.objective import Objective, loss_for, objective_for
from trainer_rank.training.losses.policy import Sampled, cispo, grpo, ppo_clip, sampled
from trainer_rank.training.losses.reference import reference_logprobs
from trainer_rank.training.losses.sft import sft

__all__ = [
    "Loss",
    "MetricSums",
    "Objective",
    "Preference",
    "Sampled",
    "ScoredBatch",
    "ScoredRequest",
    "Scores",
    "cispo",
    "dpo",
    "grpo",
    "keep_pairs",
    "loss_for",
    "objective_for",
    "ppo_clip",
    "preference",
    "reference_logprobs",
    "sampled",
    "sft",
]
