"""What a training run is made of: the keys of the YAML file, their defaults and their rules. Imports no torch.

Unknown keys are errors, types are strict (``steps: "5"`` is refused, not converted), and every fault is a
``ConfigError`` that names the key, the rule and the value. Relative paths count from the folder the command is
started in.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from trainer_rank.training.lora_targets import CHOICES, Choice
from trainer_rank.training.loss_options import LOSSES, OPTIONS, filled, owners
from trainer_rank.units import parse_bytes


def _number(value: object) -> object:
    """YAML 1.1 reads ``1e-3`` as text; a number written so is still a number."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError("must be finite")
    return value


def _bytes(value: int | str) -> int | str:
    parse_bytes(value, field="the value")
    return value


def _list_to_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _targets(value: object) -> object:
    """Refuse what is neither a list of different names nor a choice, in one message instead of one per kind."""
    if isinstance(value, list | tuple):
        if not value or not all(isinstance(name, str) and name for name in value) or len(set(value)) != len(value):
            raise ValueError("must be a list of at least one name, each a text and given once")
        return tuple(value)
    if value is not None and value not in CHOICES:
        raise ValueError(f"must be a list of names, {' or '.join(CHOICES)}, or null for the family's default")
    return value


Number = Annotated[float, BeforeValidator(_number), AfterValidator(_finite)]
Positive = Annotated[Number, Field(gt=0)]
NotNegative = Annotated[Number, Field(ge=0)]
Beta = Annotated[Number, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=1)]
Path = Annotated[str, Field(min_length=1)]
Targets = Annotated[tuple[str, ...] | Choice, BeforeValidator(_targets)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class LoraSection(_Section):
    """Low-rank adapters, by default on every projection of the model's family (``training/lora_targets.py``).

    No dropout: a shared prefix would draw one mask where requests alone draw one each.
    """

    rank: Count = 16
    alpha: Positive = 32.0
    targets: Targets | None = None


class ModelSection(_Section):
    """The model: a folder with ``config.json``, weights and tokenizer; ``lora: null`` trains every weight."""

    path: Path
    dtype: Literal["float32", "bfloat16"] = "float32"
    recompute: Literal["full", "none", "auto"] = "full"
    lora: LoraSection | None = Field(default_factory=LoraSection)


class DataSection(_Section):
    """Requests, one per line or row. ``shuffle_seed: null`` keeps the order of the file.

    ``train_on`` says which assistant messages of a conversation are trained: ``all``, or the ``last`` alone.
    """

    path: Path
    eval_path: Path | None = None
    train_on: Literal["all", "last"] = "all"
    shuffle_seed: int | None = 0


class LossSection(_Section):
    """What is minimised; docs/losses.md has the formulas. An option of another loss is an error, null its default."""

    name: Literal["sft", "cispo", "grpo", "ppo-clip", "dpo", "custom"] = "sft"
    normalisation: Literal["token-mean", "sequence-mean", "sum"] = "token-mean"
    epsilon_low: Positive | None = None
    epsilon_high: Positive | None = None
    kl_coefficient: NotNegative | None = None
    advantages: Literal["given", "group"] | None = None
    beta: Positive | None = None
    reference: Literal["given", "adapter-off"] | None = None
    function: Path | None = None

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_loss(cls, value: Any) -> Any:
        return filled(value) if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _options_belong_to_the_loss(self) -> LossSection:
        for option in OPTIONS:
            if getattr(self, option) is not None and option not in LOSSES[self.name]:
                raise ValueError(f"{option} belongs to {owners(option)}, and name is {self.name!r}; leave it out")
        if self.name == "grpo" and self.reference is not None and not self.kl_coefficient:
            raise ValueError("reference is looked at by the penalty only, and kl_coefficient is 0; leave it out")
        if self.name == "dpo" and self.normalisation == "token-mean":
            raise ValueError("normalisation must be 'sequence-mean' or 'sum' for the loss 'dpo', which counts pairs")
        if self.name == "custom" and (self.function is None or not all(self.function.rpartition(":")[::2])):
            raise ValueError(
                "function must be 'module:function' or 'path/to/file.py:function' for the loss 'custom', "
                f"got {self.function!r}"
            )
        return self


class OptimizerSection(_Section):
    """AdamW. The learning rate rises linearly over ``warmup_steps`` and then follows ``schedule``.

    ``constant`` stays; ``linear`` and ``cosine`` fall towards ``min_lr_ratio * lr`` over the rest of the run
    (``training/learning_rate.py``).
    """

    lr: Positive = 1e-4
    betas: Annotated[tuple[Beta, Beta], BeforeValidator(_list_to_tuple)] = (0.9, 0.95)
    weight_decay: NotNegative = 0.0
    max_grad_norm: Positive = 1.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    min_lr_ratio: Annotated[Number, Field(ge=0, le=1)] = 0.0

    @model_validator(mode="after")
    def _a_constant_rate_has_no_minimum(self) -> OptimizerSection:
        if self.schedule == "constant" and self.min_lr_ratio:
            raise ValueError(
                f"min_lr_ratio belongs to the schedules 'linear' and 'cosine', and schedule is {self.schedule!r}"
            )
        return self


class TrainConfig(_Section):
    """One training run.

    ``groups_per_step`` groups make one optimizer step; requests of one group (the same ``group`` in the data, such as
    the turns of one conversation) always share a step, and a request without a group is a group of its own.
    The run's length is ``steps`` optimizer steps, or ``epochs`` passes over the data; exactly one is given.
    ``warm_up: worst`` runs the request that needs most memory before the first step and drops its gradients.
    ``on_refuse: skip`` leaves out requests that cannot fit, names and counts them, where ``raise`` stops the run.
    ``max_packed_tokens`` is a hard cap on the packed rows of one pass. ``pricing`` says how passes are priced
    (docs/pricing.md), and ``learned`` whether what observed passes teach is shared with other runs or stays in this one
    (docs/learning.md).
    A checkpoint is written every ``checkpoint_every`` steps and at the end; the newest ``keep_checkpoints`` are kept.
    Every ``verify_every`` steps, ``verify_requests`` requests of the step run again alone, and their log-probabilities
    are compared. ``tensorboard`` writes the figures of steps and evaluations into the run folder.
    ``memory_budget`` is all bytes on the device, weights included; without it, the rank's own default applies.
    """

    model: ModelSection
    data: DataSection
    loss: LossSection = Field(default_factory=LossSection)
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection)
    groups_per_step: Count = 1
    steps: Count | None = None
    epochs: Count | None = None
    eval_every: Count | None = None
    checkpoint_every: Count | None = None
    keep_checkpoints: Count = 2
    verify_every: Count | None = None
    verify_requests: Count = 1
    tensorboard: bool = False
    compare_one_by_one: bool = False
    warm_up: Literal["none", "worst"] = "none"
    on_refuse: Literal["raise", "skip"] = "raise"
    max_packed_tokens: Count | None = None
    pricing: Literal["envelope", "profile"] = "envelope"
    learned: Literal["shared", "run"] = "shared"
    memory_budget: Annotated[int | str, AfterValidator(_bytes)] | None = None
    threads: Count | None = None
    seed: int = 0
    run_dir: Path = "runs"

    @model_validator(mode="after")
    def _length_is_given_once(self) -> TrainConfig:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(f"give exactly one of steps and epochs, got steps={self.steps} and epochs={self.epochs}")
        if self.eval_every is not None and self.data.eval_path is None:
            raise ValueError(f"eval_every is {self.eval_every}, but data.eval_path names no data to evaluate on")
        return self

    @model_validator(mode="after")
    def _the_loss_can_be_had(self) -> TrainConfig:
        if self.loss.reference == "adapter-off" and self.model.lora is None:
            raise ValueError(
                "loss.reference is 'adapter-off', and model.lora is null: without an adapter there is nothing to turn "
                "off; write the field ref_logprobs into the data and set reference to 'given'"
            )
        if self.loss.name == "dpo" and self.compare_one_by_one:
            raise ValueError("compare_one_by_one trains one request at a time, and the loss 'dpo' needs pairs")
        return self
