"""Recorded plans as a test wants them."""

from __future__ import annotations

from pathlib import Path

from trainer_rank.runtime.transformers import LoraConfig, TransformersRuntime
from trainer_rank.session import TrainerRank
from trainer_rank.training.config import TrainConfig
from trainer_rank.training.loop import _request
from trainer_rank.training.lora_targets import family_of, targets_of
from trainer_rank.training.plan_log import NAME, PlanLog
from trainer_rank.training.rollouts import Limits, read_rollouts
from trainer_rank.training.schedule import group_rollouts, plan_steps


def split_in_two(config: TrainConfig, folder: Path, *, step: int) -> None:
    """Record for the 1-based ``step`` a split of at least two micro-batches, as a run with less memory would."""
    rollouts = plan_steps(group_rollouts(read_rollouts(Path(config.data.path), Limits())), config)[step - 1]
    assert config.model.lora is not None
    targets = targets_of(config.model.lora.targets, family_of(config.model.path))
    runtime = TransformersRuntime.from_pretrained(
        config.model.path,
        lora=LoraConfig(r=config.model.lora.rank, target_modules=list(targets)),
        recompute=config.model.recompute,
        dtype="float32",
    )
    with_cap = TrainerRank(runtime, max_packed_tokens=40, verify_backend=False)
    for micro_batch in with_cap.forward_micro_batches([_request(one) for one in rollouts]):
        assert len(micro_batch.split) == 2
        PlanLog(folder / NAME).note(step, micro_batch.split)
