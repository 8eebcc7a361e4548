"""The model and the rank that a configuration describes."""

from __future__ import annotations

from collections.abc import Callable

from trainer_rank.report import Record
from trainer_rank.runtime.transformers import LoraConfig, TransformersRuntime
from trainer_rank.session import TrainerRank
from trainer_rank.store import LearnedStore
from trainer_rank.training.config import TrainConfig
from trainer_rank.training.lora_targets import family_of, targets_of


def load_model(config: TrainConfig) -> TransformersRuntime:
    """Return the model with its adapter.

    Raises:
        ConfigError: The path holds no model.
        UnsupportedModelError: The model cannot be run as prefix trees with unchanged numbers.
    """
    lora = config.model.lora
    return TransformersRuntime.from_pretrained(
        config.model.path,
        lora=None
        if lora is None
        else LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,
            lora_dropout=0.0,
            target_modules=list(targets_of(lora.targets, family_of(config.model.path))),
        ),
        recompute=config.model.recompute,
        dtype=config.model.dtype,
    )


def load_rank(
    config: TrainConfig, runtime: TransformersRuntime, *, on_decision: Callable[[Record], None] | None = None
) -> TrainerRank:
    """Return the rank over a loaded model.

    Raises:
        TrainerRankMemoryError: The budget is below what is resident already.
    """
    return TrainerRank(
        runtime,
        memory_budget=config.memory_budget,
        max_packed_tokens=config.max_packed_tokens,
        pricing=config.pricing,
        store=LearnedStore() if config.learned == "shared" else None,
        on_decision=on_decision,
    )
