"""What must agree for the memory of two forwards to be compared by a learned rate, and which of them packed rows price.

A signature is the mix of what requests ask for, by normalised shape, with grad modes, adapters and recompute. Inactive
requests are no part of it: they run nothing and change no price.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

SINGLE: Final = "target:single"
INACTIVE: Final = "inactive"

SHORTEST_PACKED: Final = 64
"""Tokens of the shortest single-target request that packed rows price: its fixed memory, up to 384 KiB, then stays
within 6 KiB per token."""


def request_key(
    labels: Sequence[int] | None = None, *, top_k: int | None = None, logits: bool = False, hidden_states: bool = False
) -> str:
    """Return what one request asks for, as the requests of a mix are told apart.

    Args:
        labels: Normalised shape of its labels, (N,) or (N, K); None without. One label per position is
            ``target:single``, K are ``target:(K,)`` however the caller wrote the leading axis.
        top_k, logits, hidden_states: Its other outputs.
    """
    parts = []
    if labels is not None:
        parts.append(SINGLE if len(labels) == 1 else f"target:({', '.join(map(str, labels[1:]))},)")
    if top_k is not None:
        parts.append(f"top_k:{top_k}")
    parts += ["logits"] * logits + ["hidden_states"] * hidden_states
    return "+".join(parts) or INACTIVE


def is_short(key: str, num_tokens: int) -> bool:
    """Return whether a request is of a single target and too short for packed rows to price its batch."""
    return key == SINGLE and num_tokens < SHORTEST_PACKED


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySignature:
    """What forwards have in common that share what is learned of their memory.

    Attributes:
        mix: Keys of the requests, sorted, each once.
        grad_modes: Grad modes among them, sorted.
        adapters: Adapters among them, sorted; the runtime's own goes by the empty name.
        recompute: Name of the recompute in force, ``RecomputeReading.name``.
        short_requests: Whether a single-target request is short. It decides how the forward is priced, but is no part
            of the signature's identity: a short batch uses what longer ones taught.
    """

    mix: tuple[str, ...]
    grad_modes: tuple[bool, ...]
    adapters: tuple[str, ...]
    recompute: str
    short_requests: bool = field(default=False, compare=False)

    @classmethod
    def of(
        cls,
        requests: Iterable[tuple[str, int]],
        *,
        grad_modes: Iterable[bool],
        adapters: Iterable[str],
        recompute: str,
    ) -> MemorySignature:
        """Return the signature of requests given as (key, tokens)."""
        known = list(requests)
        return cls(
            mix=tuple(sorted({key for key, _ in known} - {INACTIVE})),
            grad_modes=tuple(sorted(set(grad_modes))),
            adapters=tuple(sorted(set(adapters))),
            recompute=recompute,
            short_requests=any(is_short(key, num_tokens) for key, num_tokens in known),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the identity as plain values."""
        return {
            "mix": list(self.mix),
            "grad_modes": list(self.grad_modes),
            "adapters": list(self.adapters),
            "recompute": self.recompute,
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> MemorySignature:
        """Return the signature that ``to_json`` gave as ``values``."""
        return cls(
            mix=tuple(values["mix"]),
            grad_modes=tuple(values["grad_modes"]),
            adapters=tuple(values["adapters"]),
            recompute=values["recompute"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeSetting:
    """How much of a decoder runs again in backward.

    Attributes:
        granularity: ``full`` for whole layers, another word for parts of them, None for nothing.
        method: ``uniform`` for all layers in groups, ``block`` for the first few, None for nothing.
        num_layers: Layers of a group, or of the block.
    """

    granularity: str | None = None
    method: str | None = None
    num_layers: int | None = None

    @property
    def one_layer(self) -> bool:
        """Whether every layer runs again, one at a time: exactly full / uniform / 1."""
        return (self.granularity, self.method, self.num_layers) == ("full", "uniform", 1)

    @property
    def name(self) -> str:
        """The setting in one word."""
        if self.granularity is None:
            return "none"
        return "/".join(str(part) for part in (self.granularity, self.method, self.num_layers) if part is not None)


ONE_LAYER: Final = RecomputeSetting(granularity="full", method="uniform", num_layers=1)
"""Every layer by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeReading:
    """What the live model says about recompute at the moment a forward is priced.

    Attributes:
        decoder: Setting of its decoder; None when it has no decoder whose setting can be read.
        decoder_training: Whether the decoder is in training mode; in evaluation it runs nothing again.
        built_with: What the model was built with, for one without a decoder to read.
        all_training: Whether every submodule is in training mode.
    """

    decoder: RecomputeSetting | None
    decoder_training: bool
    built_with: RecomputeSetting
    all_training: bool

    @property
    def in_force(self) -> RecomputeSetting:
        """What the next forward does: the decoder's own setting, else what the model was built with."""
        setting, training = (
            (self.built_with, self.all_training) if self.decoder is None else (self.decoder, self.decoder_training)
        )
        return setting if training else RecomputeSetting()

    @property
    def one_layer(self) -> bool:
        """Whether the next forward is recomputed layer by layer."""
        return self.in_force.one_layer

    @property
    def name(self) -> str:
        """The setting in force, in one word."""
        return self.in_force.name


def packed_priced(signature: MemorySignature, one_layer_recompute: bool) -> bool:
    """Return whether packed rows price a forward: layer-by-layer recompute, all with graph, single targets, none short.

    Nothing learned has a say in it. A floor on what was learned would turn the charge per logical token off exactly
    where most is shared.
    """
    return (
        one_layer_recompute
        and all(signature.grad_modes)
        and set(signature.mix) <= {SINGLE, INACTIVE}
        and not signature.short_requests
    )
