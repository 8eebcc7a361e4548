"""Models that can run a packed batch: one interface, one adapter per library."""

from trainer_rank.runtime.base import LayerMarker, Runtime

__all__ = ["LayerMarker", "Runtime"]
