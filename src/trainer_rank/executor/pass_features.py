"""The features of a pass, read from its work without running it."""

from __future__ import annotations

from dataclasses import replace

from trainer_rank.executor.heads import chunk_bounds
from trainer_rank.memory import Call, PassFeatures, largest_calls
from trainer_rank.planner import PassWork
from trainer_rank.runtime import Runtime


def pass_features(runtime: Runtime, work: PassWork, *, head_chunk_rows: int) -> PassFeatures:
    """Return the features of a pass, with the calls that can matter."""
    features = all_calls(runtime, work, head_chunk_rows=head_chunk_rows)
    return replace(features, calls=largest_calls(features.calls))


def all_calls(runtime: Runtime, work: PassWork, *, head_chunk_rows: int) -> PassFeatures:
    """Return the features of a pass with all its calls: those of attention in order, then the chunks of the head."""
    batch, head = work.batch, work.head
    chunks = (
        Call(kind="chunk", rows=stop - start, keys=last - first)
        for start, stop, first, last in chunk_bounds(head.label_row, head.num_rows, head_chunk_rows)
    )
    return PassFeatures(
        packed_rows=batch.packed_rows,
        index_rows=runtime.index_rows(batch),
        head_rows=head.num_rows,
        labels=head.num_labels,
        output_elements=sum(head.sizes),
        requests=len(head.shapes),
        logical_tokens=batch.logical_tokens,
        calls=(*runtime.attention_calls(batch), *chunks),
    )
