"""Models that can run a packed batch: one interface, one adapter per library."""

from trainer_rank.runtime.base import Observer, Runtime

__all__ = ["Observer", "Runtime"]
