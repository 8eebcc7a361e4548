"""The calls of one attention layer with their sizes, in the order ``tree`` makes them. Computes nothing.

Each kind is one piece of code in ``tree``, with temporaries of its own:

    ``single``           the whole pass is one run: its result is the output
    ``root``             one call has all rows as queries: its result is the buffer the others merge into
    ``buffers``          no such call: the buffers are allocated
    ``first``, ``merge`` a run of the tree writes its rows, or merges into them
    ``view``, ``gathered``, ``padded`` (each also with ``-first``)   a bucket of leaves

``of one`` and ``in steps`` are added where a kernel's results for one leaf, or for very many, are handled differently.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from trainer_rank.memory import Call
from trainer_rank.runtime.attention.cuda_scratch import CallSizes, round_up
from trainer_rank.runtime.attention.kernels import Kernel
from trainer_rank.runtime.attention.plan import AttentionPlan, Bucket
from trainer_rank.runtime.attention.tree import block_calls, has_single_root, is_single_run


def attention_calls(
    plan: AttentionPlan, kernel: Kernel, *, heads: int, groups: int, head_size: int, dtype: torch.dtype
) -> tuple[Call, ...]:
    """Return the calls of a plan, in order.

    Args:
        plan: The plan of the packed rows.
        kernel: The kernel that will run.
        heads, groups, head_size: H, G and D of the model.
        dtype: Of queries, keys and values.
    """

    def call(kind: str, batch: int, queries: int, keys: int, valid: int) -> Call:
        sizes = CallSizes(batch=batch, heads=heads, groups=groups, queries=queries, keys=keys, head_size=head_size)
        if not kernel.takes_at_once(sizes):
            kind += " in steps"
        return Call(
            kind=kind,
            rows=batch * queries,
            keys=batch * keys,
            valid=valid,
            aligned_rows=batch * round_up(queries, kernel.row_alignment),
            forward_scratch=kernel.forward_scratch_bytes(sizes, dtype),
            backward_scratch=kernel.backward_scratch_bytes(sizes, dtype),
        )

    def all_calls() -> Iterator[Call]:
        rows, blocks = plan.num_rows, plan.blocks
        if is_single_run(plan):
            yield call("single", 1, rows, rows, rows)
            return
        if has_single_root(plan, kernel):
            yield call("root", 1, rows, blocks[0].stop, rows)
            blocks = blocks[1:]
        else:
            yield Call(kind="buffers", rows=rows)
        for block in blocks:
            for begin, end, _ in block_calls(block, kernel):
                yield call(block.kind, 1, end - begin, block.stop - block.start, end - begin)
        for bucket in plan.buckets:
            yield call(bucket_kind(bucket, kernel), bucket.count, bucket.length, bucket.length, _valid(bucket))

    return tuple(all_calls())


def bucket_kind(bucket: Bucket, kernel: Kernel) -> str:
    """Return which code runs a bucket, as far as its allocations differ."""
    return f"{bucket.kind} of one" if bucket.count == 1 and kernel.one_is_a_view else bucket.kind


def index_rows(plan: AttentionPlan) -> int:
    """Return the entries of the index tensors that the plan's buckets gather by."""
    total = 0
    for bucket in plan.buckets:
        if bucket.rows is not None:
            total += bucket.count * bucket.length + (2 * _valid(bucket) if bucket.lengths is not None else 0)
    return total


def _valid(bucket: Bucket) -> int:
    return bucket.count * bucket.length if bucket.lengths is None else int(bucket.lengths.sum())
