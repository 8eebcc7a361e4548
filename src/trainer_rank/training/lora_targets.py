"""Which layers get an adapter, by the model's family. Imports no torch.

| family | attention | perceptron |
| --- | --- | --- |
| llama, qwen2, qwen3 | q_proj, k_proj, v_proj, o_proj | gate_proj, up_proj, down_proj |

Without targets, and with ``all-linear``, all seven get one; with ``attention`` the first four. Embeddings and the
vocabulary projection get none.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

from trainer_rank.errors import ConfigError

Choice = Literal["all-linear", "attention"]
CHOICES: Final[tuple[Choice, ...]] = ("all-linear", "attention")

_ATTENTION: Final = ("q_proj", "k_proj", "v_proj", "o_proj")
_PERCEPTRON: Final = ("gate_proj", "up_proj", "down_proj")
# One row per family, so that one with other names is one line more.
_BY_FAMILY: Final = {
    "llama": (_ATTENTION, _PERCEPTRON),
    "qwen2": (_ATTENTION, _PERCEPTRON),
    "qwen3": (_ATTENTION, _PERCEPTRON),
}


def targets_of(targets: Sequence[str] | Choice | None, family: str | None) -> tuple[str, ...]:
    """Return the names of the layers that get an adapter; names that are given stand as they are.

    Args:
        targets: Names, a choice of ``CHOICES``, or None for the family's default.
        family: ``model_type`` of the model's configuration; one that is unknown is refused with the model itself, for
            its own reason, so here it has the names of Llama.

    Raises:
        ConfigError: A text that is no choice.
    """
    attention, perceptron = _BY_FAMILY.get(family or "llama", _BY_FAMILY["llama"])
    if targets is None or targets == "all-linear":
        return (*attention, *perceptron)
    if targets == "attention":
        return attention
    if isinstance(targets, str):
        raise ConfigError(f"targets must be a list of names, {' or '.join(CHOICES)}, got {targets!r}")
    return tuple(targets)


def family_of(model: str) -> str | None:
    """Return the ``model_type`` of a folder's ``config.json``; None where there is none that says it."""
    path = Path(model)
    file = path if path.name == "config.json" else path / "config.json"
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        # Whoever loads the model says what is wrong with its folder.
        return None
    family = entries.get("model_type") if isinstance(entries, dict) else None
    return family if isinstance(family, str) else None
