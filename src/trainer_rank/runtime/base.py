"""What the executor needs from a model, whatever library it comes from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from trainer_rank.memory import Call, ModelFacts, Recompute, RecomputeReading, RecomputeSetting
from trainer_rank.memory.signature import ONE_LAYER
from trainer_rank.prefix import PackedBatch


class Observer(Protocol):
    """Told by a runtime, for a dry run, what it is about to do."""

    def mark(self, phase: str, layer: int | None = None) -> None:
        """A decoder layer begins its forward or its backward, or the runtime reaches a phase of its own."""

    def call(self, kind: str) -> None:
        """One of the pass's ``attention_calls`` begins; an empty kind ends the last one."""


class Runtime(ABC):
    """A model that can run a packed batch."""

    @property
    @abstractmethod
    def facts(self) -> ModelFacts:
        """Immutable facts, read once."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the parameters are."""

    @property
    @abstractmethod
    def stands_for(self) -> torch.device:
        """The device whose kernels run: ``device`` itself, or for a twin the device of the model it stands for."""

    @property
    @abstractmethod
    def logprob_dtype(self) -> torch.dtype:
        """Dtype of log-probs: float64 for float64 models, else float32."""

    @property
    @abstractmethod
    def signature(self) -> Mapping[str, object]:
        """Everything of the model and its kernels that the memory of a pass depends on, as plain values."""

    @property
    @abstractmethod
    def recompute(self) -> Recompute:
        """What the live model does now; read again at every pricing."""

    @property
    def recompute_reading(self) -> RecomputeReading:
        """What the live model says about recompute and training mode now; read again at every pricing."""
        setting = ONE_LAYER if self.recompute == "full" else RecomputeSetting()
        return RecomputeReading(decoder=setting, decoder_training=True, built_with=setting, all_training=True)

    @abstractmethod
    def forward(self, batch: PackedBatch, *, recomputed: int | None = None) -> Tensor:
        """Return final hidden states (P, H) of the packed rows, normalised, ready for the head.

        ``recomputed`` is how many of the first layers run again in backward, where ``recompute`` is ``auto``; None is
        all of them there, and says nothing otherwise.
        """

    @abstractmethod
    def head(self) -> tuple[Tensor, Tensor | None]:
        """Return the vocabulary projection: weight (V, H) and bias (V,) or None."""

    @abstractmethod
    def trainable_parameters(self) -> tuple[Tensor, ...]:
        """Return the parameters that receive gradients, in a fixed order."""

    def parameters_of(self, adapter: str | None) -> tuple[Tensor, ...]:
        """Return those of them that a pass with this adapter reaches; None is the runtime's own adapter."""
        return self.trainable_parameters()

    def using(self, adapter: str | None) -> AbstractContextManager[None]:
        """Return a context in which the model runs with this adapter, in forward and in recompute."""
        return nullcontext()

    @abstractmethod
    def twin(self, num_layers: int) -> Runtime:
        """Return the same model on ``meta`` with ``num_layers`` layers: same code, no data, for a dry run."""

    @abstractmethod
    def attention_calls(self, batch: PackedBatch) -> tuple[Call, ...]:
        """Return the calls of one attention layer over a packed batch, in order, with their sizes; computes nothing."""

    @abstractmethod
    def index_rows(self, batch: PackedBatch) -> int:
        """Return the entries of the index tensors a forward keeps on the device for attention."""

    @abstractmethod
    def observe(self, observer: Observer) -> None:
        """Have ``observer`` told what a forward and its backward are about to do."""

    @abstractmethod
    def save(self, path: Path) -> None:
        """Write what was trained into the folder ``path``."""

    @abstractmethod
    def trained(self) -> dict[str, Tensor]:
        """Return the trained parameters by the names ``save`` gives them, in the order of ``trainable_parameters``."""

    @abstractmethod
    def adapter_config(self) -> bytes | None:
        """Return the text of the adapter's configuration file as ``save`` writes it; None without an adapter."""

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Return plain values that tell this model from any a checkpoint of it cannot be loaded into."""
