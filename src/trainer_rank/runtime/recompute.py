"""What a live Transformers model says about recompute, in the terms the pricing of packed rows asks for."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from trainer_rank.memory import RecomputeReading, RecomputeSetting
from trainer_rank.memory.signature import ONE_LAYER


def read_recompute(
    model: nn.Module, layers: Sequence[nn.Module], built_with: RecomputeSetting, *, elastic: bool = False
) -> RecomputeReading:
    """Return what the next forward will run again in backward.

    The library runs a decoder layer again when the layer's own flag is set and the layer itself is in training mode.
    Layers without that flag are no decoder that can be read.

    Args:
        model: The whole model, adapters included.
        layers: Its decoder layers.
        built_with: What its runtime was built with.
        elastic: Whether each forward sets the flags itself: those of the last one say nothing, and a forward that is
            told nothing runs every layer again.
    """
    flags = [getattr(layer, "gradient_checkpointing", None) for layer in layers]
    decoder = None if not flags or None in flags else _setting([elastic or bool(flag) for flag in flags])
    return RecomputeReading(
        decoder=decoder,
        decoder_training=all(layer.training for layer in layers),
        built_with=built_with,
        all_training=all(module.training for module in model.modules()),
    )


def _setting(flags: Sequence[bool]) -> RecomputeSetting:
    if all(flags):
        return ONE_LAYER
    if not any(flags):
        return RecomputeSetting()
    return RecomputeSetting(granularity="full", method="block", num_layers=sum(flags))
