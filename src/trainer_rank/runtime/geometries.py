"""The geometry of usual models, so that a plan needs no download. Imports no torch.

Figures are those of the models' public ``config.json``. Rotary scaling is left out: it changes no allocation.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Final

from trainer_rank.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """One model's ``config.json``, as far as memory depends on it; names are the library's."""

    model_type: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool


def _llama(hidden: int, layers: int, heads: int, groups: int, mlp: int, *, head: int, tied: bool) -> Geometry:
    return Geometry(
        model_type="llama", hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=groups, head_dim=head, intermediate_size=mlp, vocab_size=128256,
        max_position_embeddings=131072, tie_word_embeddings=tied,
    )  # fmt: skip


def _qwen2(hidden: int, layers: int, heads: int, groups: int, mlp: int, *, vocabulary: int, tied: bool) -> Geometry:
    return Geometry(
        model_type="qwen2", hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=groups, head_dim=hidden // heads, intermediate_size=mlp, vocab_size=vocabulary,
        max_position_embeddings=32768, tie_word_embeddings=tied,
    )  # fmt: skip


def _qwen3(hidden: int, layers: int, heads: int, mlp: int, *, tied: bool) -> Geometry:
    return Geometry(
        model_type="qwen3", hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=8, head_dim=128, intermediate_size=mlp, vocab_size=151936,
        max_position_embeddings=40960, tie_word_embeddings=tied,
    )  # fmt: skip


def _smollm2(hidden: int, layers: int, heads: int, groups: int, mlp: int) -> Geometry:
    return Geometry(
        model_type="llama", hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=groups, head_dim=64, intermediate_size=mlp, vocab_size=49152,
        max_position_embeddings=8192, tie_word_embeddings=True,
    )  # fmt: skip


GEOMETRIES: Final = {
    "Llama-3.2-1B": _llama(2048, 16, 32, 8, 8192, head=64, tied=True),
    "Llama-3.2-3B": _llama(3072, 28, 24, 8, 8192, head=128, tied=True),
    "Llama-3.1-8B": _llama(4096, 32, 32, 8, 14336, head=128, tied=False),
    "Llama-3.1-70B": _llama(8192, 80, 64, 8, 28672, head=128, tied=False),
    "Llama-3.3-70B": _llama(8192, 80, 64, 8, 28672, head=128, tied=False),
    "Qwen2-0.5B": _qwen2(896, 24, 14, 2, 4864, vocabulary=151936, tied=True),
    "Qwen2-1.5B": _qwen2(1536, 28, 12, 2, 8960, vocabulary=151936, tied=True),
    "Qwen2-7B": _qwen2(3584, 28, 28, 4, 18944, vocabulary=152064, tied=False),
    "Qwen2-72B": _qwen2(8192, 80, 64, 8, 29568, vocabulary=152064, tied=False),
    "Qwen2.5-0.5B": _qwen2(896, 24, 14, 2, 4864, vocabulary=151936, tied=True),
    "Qwen2.5-1.5B": _qwen2(1536, 28, 12, 2, 8960, vocabulary=151936, tied=True),
    "Qwen2.5-3B": _qwen2(2048, 36, 16, 2, 11008, vocabulary=151936, tied=True),
    "Qwen2.5-7B": _qwen2(3584, 28, 28, 4, 18944, vocabulary=152064, tied=False),
    "Qwen2.5-14B": _qwen2(5120, 48, 40, 8, 13824, vocabulary=152064, tied=False),
    "Qwen2.5-32B": _qwen2(5120, 64, 40, 8, 27648, vocabulary=152064, tied=False),
    "Qwen2.5-72B": _qwen2(8192, 80, 64, 8, 29568, vocabulary=152064, tied=False),
    "Qwen3-0.6B": _qwen3(1024, 28, 16, 3072, tied=True),
    "Qwen3-1.7B": _qwen3(2048, 28, 16, 6144, tied=True),
    "Qwen3-4B": _qwen3(2560, 36, 32, 9728, tied=True),
    "Qwen3-8B": _qwen3(4096, 36, 32, 12288, tied=False),
    "Qwen3-14B": _qwen3(5120, 40, 40, 17408, tied=False),
    "Qwen3-32B": _qwen3(5120, 64, 64, 25600, tied=False),
    "SmolLM2-135M": _smollm2(576, 30, 9, 3, 1536),
    "SmolLM2-360M": _smollm2(960, 32, 15, 5, 2560),
    "SmolLM2-1.7B": _smollm2(2048, 24, 32, 32, 8192),
}
"""Built-in geometries by usual name."""


def find_geometry(name: str) -> Geometry:
    """Return a built-in geometry; case, an organisation before a slash and what tuning adds to a name do not matter.

    Raises:
        ConfigError: There is no such geometry; the message names the nearest.
    """
    known = {key.lower(): geometry for key, geometry in GEOMETRIES.items()}
    wanted = name.rpartition("/")[2].lower().removeprefix("meta-").removesuffix("-instruct").removesuffix("-base")
    if wanted in known:
        return known[wanted]
    names = {key.lower(): key for key in GEOMETRIES}
    near = difflib.get_close_matches(wanted, names, n=3, cutoff=0.3) or list(names)
    raise ConfigError(
        f"model must be a folder with config.json or a built-in geometry, got {name!r}; "
        f"nearest: {', '.join(names[key] for key in near)}"
    )
