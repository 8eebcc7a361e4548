"""What tells one model from another, cheap enough to be asked at every checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import Tensor

from trainer_rank.memory import ModelFacts

SAMPLE: Final = 64
"""Leading values of each frozen parameter that are compared: a model with other weights differs there, and reading all
of them would take as long as loading the model."""


def identity_of(facts: ModelFacts, parameters: Iterable[tuple[str, Tensor]]) -> dict[str, Any]:
    """Return plain values that two models share exactly when a checkpoint of one belongs to the other.

    Args:
        facts: Of the model.
        parameters: All its parameters with their names.

    Returns:
        ``family`` and geometry by name; ``trained``: digest of name, shape and dtype of every trained parameter;
        ``frozen``: digest of the same of every other parameter, with its first values.
    """
    trained, frozen = hashlib.sha256(), hashlib.sha256()
    for name, parameter in parameters:
        line = f"{name} {tuple(parameter.shape)} {parameter.dtype}\n".encode()
        if parameter.requires_grad:
            trained.update(line)
            continue
        frozen.update(line)
        if not parameter.is_meta:
            values = parameter.detach().reshape(-1)[:SAMPLE].cpu().contiguous()
            frozen.update(values.view(torch.uint8).numpy().tobytes())
    return {
        "family": facts.family,
        "layers": facts.num_layers,
        "hidden_size": facts.hidden_size,
        "heads": facts.num_heads,
        "key_value_heads": facts.num_key_value_heads,
        "vocabulary": facts.vocabulary_size,
        "dtype": facts.dtype,
        "adapter": facts.adapter,
        "trained_tensors": facts.num_trainable,
        "trained_bytes": facts.trainable_bytes,
        "trained": trained.hexdigest()[:16],
        "frozen": frozen.hexdigest()[:16],
    }
