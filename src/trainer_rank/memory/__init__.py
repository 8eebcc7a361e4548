"""What a pass costs. Pure records and arithmetic; no torch, no live model."""

from trainer_rank.memory.extrapolate import extrapolate_layers
from trainer_rank.memory.facts import ModelFacts, Recompute
from trainer_rank.memory.price import Observation, Price, Term, combine
from trainer_rank.memory.trace import Event, Instant, Mark, Timeline, Trace, fold

__all__ = [
    "Event",
    "Instant",
    "Mark",
    "ModelFacts",
    "Observation",
    "Price",
    "Recompute",
    "Term",
    "Timeline",
    "Trace",
    "combine",
    "extrapolate_layers",
    "fold",
]
