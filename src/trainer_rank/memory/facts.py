"""What planning and pricing know of a model: an immutable snapshot, read once from the live one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Recompute = Literal["full", "none", "auto"]
"""``full``: each layer keeps its input and runs again in backward. ``none``: activations are kept. ``auto``: the first
layers of a pass run again, as many as its ``PassWork.recomputed`` says; all where it says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Integers and names of one model as it is trained.

    Attributes:
        family: Model type as the library names it (``llama``, ``qwen2``, ``qwen3``).
        num_layers, hidden_size, num_heads, num_key_value_heads, head_size, vocabulary_size: Geometry.
        max_positions: Longest request the model's positions allow, in tokens.
        dtype: Name of the parameters' dtype, for example ``float32``.
        weight_bytes: Bytes of all parameters and buffers.
        trainable_bytes: Bytes of the parameters that receive gradients.
        num_trainable: Number of such parameters (tensors).
        largest_trainable_bytes: Bytes of the largest of them.
        adapter: Name of the adapter that a request without one runs with, or None when the model itself is trained.
        adapters: Names a request may give.
    """

    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_key_value_heads: int
    head_size: int
    vocabulary_size: int
    max_positions: int
    dtype: str
    weight_bytes: int
    trainable_bytes: int
    num_trainable: int
    largest_trainable_bytes: int
    adapter: str | None
    adapters: tuple[str, ...] = ()

    @property
    def adam_state_bytes(self) -> int:
        """Bytes of AdamW's two moments and step counters, in the parameters' dtype."""
        return 2 * self.trainable_bytes + 4 * self.num_trainable
