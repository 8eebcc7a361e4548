"""The worst pass from inside: what is live when, and its prefix tree."""

from __future__ import annotations

import numpy as np

from trainer_rank.memory.envelope import CALLER_PHASES
from trainer_rank.planner import PassWork
from trainer_rank.planning.options import Options
from trainer_rank.planning.report import Instant, Tree
from trainer_rank.session import TrainerRank


def timeline(options: Options, rank: TrainerRank, work: PassWork) -> tuple[Instant, ...]:
    """Return what is live at each end of each phase of a pass, the declared caller included."""
    caller = options.caller_bytes_per_token * work.batch.logical_tokens
    made = []
    for one in rank.timeline(work).instants:
        added = caller if one.mark.phase in CALLER_PHASES else 0
        # Before the first layer and after the last nothing of the pass is live.
        if one.mark.phase not in ("start", "end") and one.peak_bytes:
            made.append(Instant(phase=one.mark.phase, layer=one.mark.layer, peak_bytes=one.peak_bytes + added,
                                end_bytes=one.end_bytes + added))  # fmt: skip
    return tuple(made)


def prefix_tree(work: PassWork) -> Tree:
    """Return the packed segments of a pass."""
    batch = work.batch
    ends = np.bincount(batch.request_segment, minlength=batch.num_segments)
    return Tree(
        parent=tuple(batch.segment_parent.tolist()),
        rows=tuple((batch.segment_stop - batch.segment_start).tolist()),
        ends=tuple(ends.tolist()),
    )
