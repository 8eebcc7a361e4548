"""What no pass over a data set can exceed, in whatever order its groups are drawn and however its steps are split.

Each feature of a pass is bounded by itself, by the sum of its largest values over as many groups as make a step; the
envelope never falls as a feature grows, so the price at those bounds is an upper bound of every price.

* Rows of the prefix tree of any requests are at most the sum over groups of the rows of each group's tree. The layout
  with the least rows plus 16 per segment merges no more segments away than there are branch points.
* Head rows are at most labels; labels, outputs and logical tokens add up.
* A run of attention has at most all rows as queries and one request's length as keys; a bucket of short leaves has at
  most 64 rows per request, and a bucket that is a view at most all rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from trainer_rank.memory import Call, Envelope, PassFeatures
from trainer_rank.memory.bounds import UpperBound
from trainer_rank.prefix import build_tree
from trainer_rank.prefix.choose import DEFAULT_SEGMENT_COST_ROWS
from trainer_rank.requests import Request
from trainer_rank.runtime import Runtime
from trainer_rank.runtime.attention import kernel_for
from trainer_rank.runtime.attention.cuda_scratch import CallSizes, round_up
from trainer_rank.runtime.attention.plan import LONGEST_GATHERED_LEAF

_ALIGNMENT: Final = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSize:
    """What one group adds to a step at most."""

    rows: int
    logical_tokens: int
    labels: int
    output_elements: int
    requests: int
    longest: int

    @classmethod
    def of(cls, group: Sequence[Request]) -> GroupSize:
        """Return the sizes of a group of requests."""
        active = [request for request in group if request.active]
        scored = [request for request in active if request.num_trained]
        rows = build_tree([one.tokens for one in scored]).packed_rows_of_range(0, len(scored)) if scored else 0
        return cls(
            rows=rows,
            logical_tokens=sum(one.num_tokens for one in scored),
            labels=sum(one.num_trained for one in scored),
            output_elements=sum(one.labels.size for one in active if one.labels is not None),
            requests=len(active),
            longest=max((one.num_tokens for one in scored), default=0),
        )


def at_most(
    envelope: Envelope,
    runtime: Runtime,
    sizes: Sequence[GroupSize],
    *,
    groups_per_step: int,
    repeats: bool,
    head_chunk_rows: int,
    max_packed_tokens: int | None = None,
) -> UpperBound:
    """Return the upper bound of the required bytes of every pass of every step.

    Args:
        envelope: Of the runtime's passes, with the caller.
        runtime: The model.
        sizes: Of every group.
        groups_per_step: Groups that make a step.
        repeats: Whether a step may hold a group twice, as one that spans two epochs does.
        head_chunk_rows, max_packed_tokens: As for ``TrainerRank``.
    """

    def largest(values: Iterable[int]) -> int:
        ordered = sorted(values, reverse=True)
        if not repeats:
            return sum(ordered[:groups_per_step])
        whole, rest = divmod(groups_per_step, len(ordered))
        # A step may begin in one epoch and end in another; a group then comes once more than its share.
        most = whole + 2 if rest else whole + 1
        return sum(ordered[index // most] for index in range(groups_per_step))

    requests = largest(size.requests for size in sizes)
    logical = largest(size.logical_tokens for size in sizes)
    labels = largest(size.labels for size in sizes)
    rows = largest(size.rows for size in sizes) + DEFAULT_SEGMENT_COST_ROWS * max(0, requests - 1)
    rows = min(rows, logical if max_packed_tokens is None else min(logical, max_packed_tokens))
    # The envelope is of passes that run: where nothing is scored, one row is more than there is.
    rows = max(1, rows)
    longest = max(1, min(rows, max(size.longest for size in sizes)))
    features = PassFeatures(
        packed_rows=rows,
        index_rows=3 * LONGEST_GATHERED_LEAF * requests,
        head_rows=min(labels, rows),
        labels=labels,
        output_elements=largest(size.output_elements for size in sizes),
        requests=requests,
        logical_tokens=logical,
        calls=tuple(
            _call(kind, runtime, rows=rows, longest=longest, requests=requests, labels=labels, chunk=head_chunk_rows)
            for kind in sorted({piece.call for piece in envelope.pieces} - {""})
        ),
    )
    return envelope.at_most(features)


def _call(kind: str, runtime: Runtime, *, rows: int, longest: int, requests: int, labels: int, chunk: int) -> Call:
    """Return a call of the kind that none of that kind exceeds in any size."""
    code = kind.removesuffix(" in steps").removesuffix(" of one").removesuffix("-first")
    if code == "chunk":
        return Call(kind=kind, rows=min(chunk, rows, labels), keys=labels)
    if code in ("padded", "gathered"):
        slots = keys = min(rows + 8 * requests, LONGEST_GATHERED_LEAF * requests)
        sequences = requests
    elif code == "view":
        slots = keys = rows
        sequences = requests
    elif code == "single":
        slots = keys = longest
        sequences = 1
    else:
        slots, keys, sequences = rows, longest, 1
    facts = runtime.facts
    dtype = getattr(torch, facts.dtype)
    kernel = kernel_for(runtime.stands_for, dtype)
    aligned = round_up(slots, _ALIGNMENT) + _ALIGNMENT * sequences
    one = CallSizes(batch=1, heads=facts.num_heads, groups=facts.num_key_value_heads, queries=aligned, keys=keys,
                    head_size=facts.head_size)  # fmt: skip
    return Call(
        kind=kind, rows=slots, keys=keys, valid=min(slots, rows), aligned_rows=aligned,
        forward_scratch=kernel.forward_scratch_at_most(one, dtype),
        backward_scratch=kernel.backward_scratch_bytes(one, dtype),
    )  # fmt: skip
