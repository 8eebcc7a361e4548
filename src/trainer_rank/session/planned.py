"""A micro-batch as planned, before anything runs."""

from __future__ import annotations

from dataclasses import dataclass

from trainer_rank.admission import Admission
from trainer_rank.planner import PassWork
from trainer_rank.session.candidates import Candidate
from trainer_rank.session.micro_batch import MicroBatchStats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannedPass:
    """What would be one turn of ``forward_micro_batches``.

    Attributes:
        indices: Flat index of each leaf in it, in reading order.
        works: What its forward passes would compute; empty when nothing is asked of any leaf.
        admission: Price, budget and what is pending.
        stats: The same as the micro-batch would carry.
    """

    indices: tuple[int, ...]
    works: tuple[PassWork, ...]
    admission: Admission
    stats: MicroBatchStats

    @classmethod
    def of(cls, candidate: Candidate, verdict: Admission) -> PlannedPass:
        """Return a candidate with its verdict."""
        stats = MicroBatchStats.of(candidate.works, len(candidate.indices), verdict)
        return cls(indices=candidate.indices, works=candidate.works, admission=verdict, stats=stats)
