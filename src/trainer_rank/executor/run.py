"""One pass, executed: body, head rows, outputs behind the boundary.

The same code runs on the device and, for a dry run, on ``meta``; whatever it allocates there is what it will allocate
here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from trainer_rank.executor.boundary import BackwardGuard, PassGraph, Source, attach, gathered, itself, scattered
from trainer_rank.executor.heads import LabelIndex, chunk_bounds, label_logprobs, top_bounds
from trainer_rank.planner import HeadRows, PassWork
from trainer_rank.runtime import Runtime
from trainer_rank.runtime.transfer import to_device

Marker = Callable[[str], None]
"""Called with the name of the phase, or of the kind of call, that begins."""


class OutOfMemoryMapper(Protocol):
    """Maps an exception raised in a phase of an admitted pass to what the caller sees."""

    def __call__(self, error: BaseException, phase: str) -> BaseException: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outputs:
    """What one request gets back; None for what it did not ask for.

    Attributes:
        logprobs: Of the labels' shape, float32 (float64 for float64 models), 0 where ignored.
        top_logprobs: (M, k) in descending order, of the same dtype.
        top_ids: (M, k) int64.
        logits: (M, V) in the model's dtype.
        hidden_states: (M, H) in the model's dtype.
    """

    logprobs: Tensor | None = None
    top_logprobs: Tensor | None = None
    top_ids: Tensor | None = None
    logits: Tensor | None = None
    hidden_states: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassResult:
    """Outputs of a pass, one per request, and its inner graph, None for a pass without gradients."""

    outputs: tuple[Outputs, ...]
    graph: PassGraph | None

    @property
    def logprobs(self) -> tuple[Tensor, ...]:
        """Log-probs of the requests that have labels."""
        return tuple(one.logprobs for one in self.outputs if one.logprobs is not None)


def _silent(phase: str) -> None:
    """Mark nothing."""


def run_forward(
    runtime: Runtime,
    work: PassWork,
    *,
    head_chunk_rows: int,
    map_error: BackwardGuard,
    mark: Marker = _silent,
    begin_call: Marker = _silent,
    begin_backward: Callable[[], None] = lambda: None,
) -> PassResult:
    """Run the forward of one pass.

    Args:
        runtime: The model.
        work: The pass.
        head_chunk_rows: Rows that meet the vocabulary projection at a time.
        map_error: Applied to an exception of a later backward.
        mark: Told which phase begins.
        begin_call: Told as each chunk of the head begins, here and in a later backward.
        begin_backward: Told as an inner backward begins.
    """
    parameters = () if work.no_grad else runtime.parameters_of(work.adapter)
    inside = partial(runtime.using, work.adapter)
    made = _Pieces()
    with torch.set_grad_enabled(bool(parameters)):
        if work.batch.packed_rows:
            mark("forward")
            with inside():
                hidden = runtime.forward(work.batch, recomputed=work.recomputed)
            mark("head")
            scored = _Scored.of(runtime, work, hidden, head_chunk_rows, begin_call)
            del hidden
        else:
            # Nothing is computed: the outputs are exact zeros and the model does not run.
            scored = _Scored.nothing(work, runtime.device)
    mark("outputs")
    with torch.no_grad():
        made.logprobs(runtime, work.head, scored)
        made.top(work.head, scored)
        made.dense("hidden_states", scored.hidden)
        made.dense("logits", scored.logits)
    if not parameters:
        graph, pieces = None, tuple(made.pieces)
    else:
        waiting = {owner for owner, pending in zip(made.owners, made.pending, strict=True) if pending}
        graph = PassGraph(made.sources, made.owners, waiting, parameters, map_error, inside, begin_backward)
        del scored
        pieces = attach(graph, made.pieces)
    found: list[dict[str, Tensor]] = [{} for _ in work.indices]
    for owner, kind, piece in zip(made.owners, made.kinds, pieces, strict=True):
        found[owner][kind] = piece
    for owner, ids in made.top_ids.items():
        found[owner]["top_ids"] = ids
    return PassResult(outputs=tuple(Outputs(**tensors) for tensors in found), graph=graph)


@dataclass(slots=True, kw_only=True, eq=False)
class _Scored:
    """What the head made: with graph where the pass has one.

    Attributes:
        logprobs: (M,), None when nothing is scored.
        slot: (M,) where each goes in the concatenated outputs.
        top_logprobs, top_ids: (T, k), None when nothing is ranked.
        hidden, logits: (M, H) and (M, V) by position of the request.
    """

    logprobs: Tensor | None
    slot: Tensor
    top_logprobs: Tensor | None
    top_ids: Tensor | None
    hidden: dict[int, Tensor]
    logits: dict[int, Tensor]

    @classmethod
    def nothing(cls, work: PassWork, device: torch.device) -> _Scored:
        slot = to_device(work.head.slot, device)
        return cls(logprobs=None, slot=slot, top_logprobs=None, top_ids=None, hidden={}, logits={})

    @classmethod
    def of(cls, runtime: Runtime, work: PassWork, hidden: Tensor, head_chunk_rows: int, begin_call: Marker) -> _Scored:
        head, device = work.head, runtime.device
        weight, bias = runtime.head()
        if not head.num_rows:
            made = cls.nothing(work, device)
        else:
            chunks = chunk_bounds(head.label_row, head.num_rows, head_chunk_rows)
            top = head.top
            index = LabelIndex(
                label_row=to_device(head.label_row, device),
                label=to_device(head.label, device),
                chunks=chunks,
                top_row=to_device(top.rows, device) if top.k else None,
                top_k=top.k,
                top_chunks=top_bounds(top.rows, chunks) if top.k else (),
                begin=begin_call,
            )
            rows = hidden.index_select(0, to_device(head.rows, device))
            logprobs, top_logprobs, top_ids = label_logprobs(rows, weight, bias, index)
            made = cls(
                logprobs=logprobs, slot=to_device(head.slot, device), top_logprobs=top_logprobs, top_ids=top_ids,
                hidden={}, logits={},
            )  # fmt: skip
        if work.hidden.num_rows:
            rows = hidden.index_select(0, to_device(work.hidden.rows, device))
            made.hidden = _by_request(rows, work.hidden.sizes)
        if work.logits.num_rows:
            rows = hidden.index_select(0, to_device(work.logits.rows, device))
            parts = _by_request(rows, work.logits.sizes)
            made.logits = {owner: functional.linear(part, weight, bias) for owner, part in parts.items()}
        return made


def _by_request(rows: Tensor, sizes: Sequence[int]) -> dict[int, Tensor]:
    """Return the rows (S, H) of each request that has any, by its position."""
    owners = [owner for owner, size in enumerate(sizes) if size]
    if len(owners) == 1:
        return {owners[0]: rows}
    return dict(zip(owners, rows.split([sizes[owner] for owner in owners]), strict=True))


class _Pieces:
    """The outputs of a pass, one after another, and the inner tensors they come from."""

    def __init__(self) -> None:
        self.pieces: list[Tensor] = []
        self.owners: list[int] = []
        self.kinds: list[str] = []
        self.pending: list[bool] = []
        self.sources: list[Source] = []
        self.top_ids: dict[int, Tensor] = {}

    def logprobs(self, runtime: Runtime, head: HeadRows, scored: _Scored) -> None:
        """Add the log-probs of every request that has labels."""
        owners = [owner for owner, shape in enumerate(head.shapes) if shape != (0,)]
        if not owners:
            return
        every = head.sizes
        flat = torch.zeros(sum(every), dtype=runtime.logprob_dtype, device=runtime.device)
        if scored.logprobs is not None:
            flat.index_copy_(0, scored.slot, scored.logprobs.detach())
        sizes, shapes = [every[owner] for owner in owners], [head.shapes[owner] for owner in owners]
        begin = len(self.pieces)
        for owner, piece, shape, some in zip(owners, flat.split(sizes), shapes, head.scored(owners), strict=True):
            self._add(owner, "logprobs", piece.view(shape), pending=some)
        if scored.logprobs is not None:
            self._source(scored.logprobs, begin, scattered(scored.logprobs, scored.slot, sizes))

    def top(self, head: HeadRows, scored: _Scored) -> None:
        """Add the ranked tokens of every request that wants them."""
        if scored.top_logprobs is None or scored.top_ids is None:
            return
        owners = [owner for owner, (_, k) in enumerate(head.top.shapes) if k]
        shapes = [head.top.shapes[owner] for owner in owners]
        sizes = [rows * k for rows, k in shapes]
        take = to_device(head.top.take, scored.top_ids.device)
        values = scored.top_logprobs.detach().view(-1).index_select(0, take)
        ids = scored.top_ids.view(-1).index_select(0, take)
        begin = len(self.pieces)
        for owner, value, found, shape in zip(owners, values.split(sizes), ids.split(sizes), shapes, strict=True):
            self._add(owner, "top_logprobs", value.view(shape), pending=True)
            self.top_ids[owner] = found.view(shape)
        self._source(scored.top_logprobs, begin, gathered(scored.top_logprobs, take, sizes))

    def dense(self, kind: str, made: dict[int, Tensor]) -> None:
        """Add tensors that are outputs as they are."""
        for owner, tensor in made.items():
            begin = len(self.pieces)
            self._add(owner, kind, tensor.detach(), pending=True)
            self._source(tensor, begin, itself(tensor))

    def _add(self, owner: int, kind: str, piece: Tensor, *, pending: bool) -> None:
        self.pieces.append(piece)
        self.owners.append(owner)
        self.kinds.append(kind)
        self.pending.append(pending)

    def _source(self, inner: Tensor, begin: int, cotangent: Callable[[Sequence[Tensor | None]], Tensor]) -> None:
        self.sources.append(Source(tensor=inner, outputs=range(begin, len(self.pieces)), cotangent=cotangent))
