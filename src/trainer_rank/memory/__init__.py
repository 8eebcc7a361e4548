"""What a pass costs. Pure records and arithmetic; no torch, no live model."""

from trainer_rank.memory.allocator import CachingAllocator, ReplayedPeak, replay
from trainer_rank.memory.allocator_rules import AllocatorOutOfMemoryError, AllocatorSettings, SegmentEvent
from trainer_rank.memory.bounds import LowerBound, UpperBound
from trainer_rank.memory.envelope import Envelope, Piece
from trainer_rank.memory.expert_floor import ExpertLayer, ExpertTypes, expert_bytes_per_row
from trainer_rank.memory.extrapolate import extrapolate_layers
from trainer_rank.memory.facts import ModelFacts, Recompute
from trainer_rank.memory.features import CALL_SIZES, TOTALS, Call, PassFeatures, largest_calls, reaches
from trainer_rank.memory.price import Observation, Price, Term, combine, itemised
from trainer_rank.memory.profile import ForwardShape, Profile, ProfileModel, gated_delta_net_state_bytes
from trainer_rank.memory.profile_book import ProfileBook
from trainer_rank.memory.residual import Residual
from trainer_rank.memory.residual_book import ResidualBook
from trainer_rank.memory.seen import Seen
from trainer_rank.memory.signature import MemorySignature, RecomputeReading, RecomputeSetting, packed_priced
from trainer_rank.memory.snapshot import HeldSegment, HistoryEntry, Snapshot, load_snapshot, parse_snapshot
from trainer_rank.memory.snapshot_check import SnapshotCheck, check_history, check_snapshot
from trainer_rank.memory.solve import TracedPass, solve
from trainer_rank.memory.stretches import category_names, stretches_at_depth, stretches_of_two_kinds
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
    "ExpertLayer",
    "ExpertTypes",
    "ForwardShape",
    "HeldSegment",
    "HistoryEntry",
    "Instant",
    "LowerBound",
    "Mark",
    "MemorySignature",
    "ModelFacts",
    "Observation",
    "PassFeatures",
    "Piece",
    "Price",
    "Profile",
    "ProfileBook",
    "ProfileModel",
    "Recompute",
    "RecomputeReading",
    "RecomputeSetting",
    "ReplayedPeak",
    "Residual",
    "ResidualBook",
    "Seen",
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
    "expert_bytes_per_row",
    "extrapolate_layers",
    "fold",
    "gated_delta_net_state_bytes",
    "itemised",
    "largest_calls",
    "load_snapshot",
    "packed_priced",
    "parse_snapshot",
    "reaches",
    "replay",
    "solve",
    "stretches_at_depth",
    "stretches_of_two_kinds",
]
