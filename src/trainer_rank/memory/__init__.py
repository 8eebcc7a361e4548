"""What a pass costs. Pure records and arithmetic; no torch, no live model."""

from trainer_rank.memory.allocator import CachingAllocator, ReplayedPeak, replay
from trainer_rank.memory.allocator_rules import AllocatorOutOfMemoryError, AllocatorSettings, SegmentEvent
from trainer_rank.memory.bounds import LowerBound, UpperBound
from trainer_rank.memory.envelope import Envelope, Piece
from trainer_rank.memory.extrapolate import extrapolate_layers
from trainer_rank.memory.facts import ModelFacts, Recompute
from trainer_rank.memory.features import CALL_SIZES, TOTALS, Call, PassFeatures, largest_calls, reaches
from trainer_rank.memory.price import Observation, Price, Term, combine, itemised
from trainer_rank.memory.snapshot import HeldSegment, HistoryEntry, Snapshot, load_snapshot, parse_snapshot
from trainer_rank.memory.snapshot_check import SnapshotCheck, check_history, check_snapshot
from trainer_rank.memory.solve import TracedPass, solve
from trainer_rank.memory.stretches import category_names, stretches_at_depth
from trainer_rank.memory.trace import CallMark, Event, Instant, Mark, Timeline, Trace, fold

__all__ = [
    "CALL_SIZES",
    "TOTALS",
    "AllocatorOutOfMemoryError",
    "AllocatorSettings",
    "CachingAllocator",
    "Call",
    "CallMark",
    "Envelope",
    "Event",
    "HeldSegment",
    "HistoryEntry",
    "Instant",
    "LowerBound",
    "Mark",
    "ModelFacts",
    "Observation",
    "PassFeatures",
    "Piece",
    "Price",
    "Recompute",
    "ReplayedPeak",
    "SegmentEvent",
    "Snapshot",
    "SnapshotCheck",
    "Term",
    "Timeline",
    "Trace",
    "TracedPass",
    "UpperBound",
    "category_names",
    "check_history",
    "check_snapshot",
    "combine",
    "extrapolate_layers",
    "fold",
    "itemised",
    "largest_calls",
    "load_snapshot",
    "parse_snapshot",
    "reaches",
    "replay",
    "solve",
    "stretches_at_depth",
]
