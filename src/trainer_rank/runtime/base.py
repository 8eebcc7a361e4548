"""What the executor needs from a model, whatever library it comes from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from trainer_rank.memory import ModelFacts, Recompute
from trainer_rank.prefix import PackedBatch

LayerMarker = Callable[[str, int], None]
"""Called with the phase (``forward`` or ``backward``) and the number of the decoder layer that begins."""


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
    def recompute(self) -> Recompute:
        """What the live model does now; read again at every pricing."""

    @abstractmethod
    def forward(self, batch: PackedBatch) -> Tensor:
        """Return final hidden states (P, H) of the packed rows, normalised, ready for the head."""

    @abstractmethod
    def head(self) -> tuple[Tensor, Tensor | None]:
        """Return the vocabulary projection: weight (V, H) and bias (V,) or None."""

    @abstractmethod
    def trainable_parameters(self) -> tuple[Tensor, ...]:
        """Return the parameters that receive gradients, in a fixed order."""

    @abstractmethod
    def twin(self, num_layers: int) -> Runtime:
        """Return the same model on ``meta`` with ``num_layers`` layers: same code, no data, for a dry run."""

    @abstractmethod
    def mark_layers(self, mark: LayerMarker) -> None:
        """Have ``mark`` called as each decoder layer begins its forward and its backward."""

    @abstractmethod
    def save(self, path: Path) -> None:
        """Write what was trained into the folder ``path``."""
