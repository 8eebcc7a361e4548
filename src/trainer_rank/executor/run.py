"""One pass, executed: body, head rows, log-probs, outputs behind the boundary.

The same code runs on the device and, for a dry run, on ``meta``; whatever it allocates there is what it will allocate
here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from trainer_rank.executor.boundary import BackwardGuard, PassGraph, attach
from trainer_rank.executor.heads import LabelIndex, chunk_bounds, label_logprobs
from trainer_rank.planner import PassWork
from trainer_rank.runtime import Runtime
from trainer_rank.runtime.transfer import to_device

Marker = Callable[[str], None]
"""Called with the name of the phase, or of the kind of call, that begins."""


class OutOfMemoryMapper(Protocol):
    """Maps an exception raised in a phase of an admitted pass to what the caller sees."""

    def __call__(self, error: BaseException, phase: str) -> BaseException: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassResult:
    """Outputs of a pass.

    Attributes:
        logprobs: One tensor per request, of its labels' shape, float32 (float64 for float64 models), 0 where ignored.
        graph: The inner graph, None for a pass without gradients.
    """

    logprobs: tuple[Tensor, ...]
    graph: PassGraph | None


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
) -> PassResult:
    """Run the forward of one pass.

    Args:
        runtime: The model.
        work: The pass.
        head_chunk_rows: Rows that meet the vocabulary projection at a time.
        map_error: Applied to an exception of a later backward.
        mark: Told which phase begins.
        begin_call: Told as each chunk of the head begins, here and in a later backward.
    """
    parameters = () if work.no_grad else runtime.trainable_parameters()
    with torch.set_grad_enabled(bool(parameters)):
        if work.head.num_rows:
            mark("forward")
            hidden = runtime.forward(work.batch)
            mark("head")
            logprobs, slot = _score(runtime, work, hidden, head_chunk_rows, begin_call)
            del hidden
        else:
            # Nothing is scored: the outputs are exact zeros and the model does not run.
            logprobs, slot = None, to_device(work.head.slot, runtime.device)
    mark("outputs")
    flat = torch.zeros(sum(work.head.sizes), dtype=runtime.logprob_dtype, device=runtime.device)
    if logprobs is not None:
        flat.index_copy_(0, slot, logprobs.detach())
    if not parameters:
        pieces: tuple[Tensor, ...] = flat.split(list(work.head.sizes))
        graph = None
    else:
        scored = _scored(work)
        graph = PassGraph(logprobs, slot, work.head.sizes, scored, parameters, map_error)
        pieces = attach(graph, flat, work.head.sizes)
    outputs = tuple(piece.view(shape) for piece, shape in zip(pieces, work.head.shapes, strict=True))
    return PassResult(logprobs=outputs, graph=graph)


def _score(
    runtime: Runtime, work: PassWork, hidden: Tensor, head_chunk_rows: int, begin_call: Marker
) -> tuple[Tensor, Tensor]:
    """Return (log-probs of the labels (M,), their output slots (M,))."""
    head, device = work.head, runtime.device
    index = LabelIndex(
        label_row=to_device(head.label_row, device),
        label=to_device(head.label, device),
        chunks=chunk_bounds(head.label_row, head.num_rows, head_chunk_rows),
        begin=begin_call,
    )
    rows = hidden.index_select(0, to_device(head.rows, device))
    weight, bias = runtime.head()
    return label_logprobs(rows, weight, bias, index), to_device(head.slot, device)


def _scored(work: PassWork) -> list[bool]:
    """Return whether each request has a scored label."""
    edges = np.cumsum([0, *work.head.sizes])
    found = np.searchsorted(np.sort(work.head.slot), edges)
    return [bool(high > low) for low, high in itertools.pairwise(found)]
