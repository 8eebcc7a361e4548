"""What a model's own configuration demands of its data, read before any weight is."""

from __future__ import annotations

from pathlib import Path

from trainer_rank.errors import ConfigError
from trainer_rank.training.rollouts import Limits


def limits_of(path: str, *, loss: str, field: str = "model.path") -> Limits:
    """Return the limits of the model in the folder ``path``; ``field`` names it in refusals.

    Raises:
        ConfigError: The folder holds no model that Transformers knows.
    """
    from transformers import AutoConfig

    if not (Path(path) / "config.json").is_file():
        raise ConfigError(
            f"{field}: must be a folder with config.json and weights, got {path!r}; "
            "relative paths count from the current folder"
        )
    try:
        model = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{field}: {path!r} holds no model that Transformers knows: {error}") from error
    return Limits(
        vocabulary_size=getattr(model, "vocab_size", None),
        context_length=getattr(model, "max_position_embeddings", None),
        loss=loss,
    )
