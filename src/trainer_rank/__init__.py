"""Post-train language models on requests that share prefixes, knowing the peak memory before running.

    rank = TrainerRank(TransformersRuntime.from_pretrained(path, lora=LoraConfig(...)), memory_budget="2GiB")
    for micro_batch in rank.forward_micro_batches(requests):
        loss = my_loss(micro_batch.inputs, micro_batch.outputs)
        loss.backward()
    rank.optim_step(lr=1e-4)

Importing the package imports no torch; the names that need it load it when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trainer_rank.errors import (
    BackwardError,
    ConfigError,
    DataError,
    MeterError,
    RequestError,
    SelfTestError,
    TrainerRankError,
    TrainerRankMemoryError,
    UnsupportedModelError,
)
from trainer_rank.prefix import Layout
from trainer_rank.requests import BASE, AtomicGroup, Request, restore

if TYPE_CHECKING:
    from trainer_rank.runtime.transformers import LoraConfig, TransformersRuntime
    from trainer_rank.session import MicroBatch, Result, TopK, TrainerRank

__version__ = "0.1.0"

_LAZY = {
    "LoraConfig": "trainer_rank.runtime.transformers",
    "MicroBatch": "trainer_rank.session",
    "Result": "trainer_rank.session",
    "TopK": "trainer_rank.session",
    "TrainerRank": "trainer_rank.session",
    "TransformersRuntime": "trainer_rank.runtime.transformers",
}

__all__ = [
    "BASE",
    "AtomicGroup",
    "BackwardError",
    "ConfigError",
    "DataError",
    "Layout",
    "LoraConfig",
    "MeterError",
    "MicroBatch",
    "Request",
    "RequestError",
    "Result",
    "SelfTestError",
    "TopK",
    "TrainerRank",
    "TrainerRankError",
    "TrainerRankMemoryError",
    "TransformersRuntime",
    "UnsupportedModelError",
    "restore",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
