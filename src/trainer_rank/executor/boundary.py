"""The autograd boundary between a pass and the caller's loss.

The caller's outputs are leaves of the pass's own graph: ``loss.backward()`` ends at the boundary, which then runs the
inner backward into buffers of the pass and adds them to ``.grad`` only when all of it succeeded. A backward that runs
out of memory half-way therefore leaves every ``.grad`` as it was.

Several partial losses may be called one after another: the inner graph is kept until every output has received its
gradient once. After that a further backward is an error, unless the caller asked to retain the graph.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer_rank.errors import BackwardError

BackwardGuard = Callable[[BaseException], BaseException]
"""Maps what the inner backward raised to what the caller sees."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Source:
    """An inner tensor with graph, and how the gradients of the outputs made from it become its own.

    Attributes:
        tensor: Of the pass's graph.
        outputs: Which outputs come from it, by position.
        cotangent: Takes the gradients of those outputs, None for one that is not in the loss, not all of them None.
    """

    tensor: Tensor
    outputs: range
    cotangent: Callable[[Sequence[Tensor | None]], Tensor]


def scattered(inner: Tensor, slot: Tensor, sizes: Sequence[int]) -> Callable[[Sequence[Tensor | None]], Tensor]:
    """Return the cotangent of outputs that hold element m of ``inner`` (M,) at ``slot[m]`` of their concatenation."""

    def cotangent(grads: Sequence[Tensor | None]) -> Tensor:
        return _concatenated(grads, sizes, inner).to(inner.dtype).index_select(0, slot)

    return cotangent


def gathered(inner: Tensor, take: Tensor, sizes: Sequence[int]) -> Callable[[Sequence[Tensor | None]], Tensor]:
    """Return the cotangent of outputs whose concatenation holds entry ``take[e]`` of the flattened ``inner`` at e."""

    def cotangent(grads: Sequence[Tensor | None]) -> Tensor:
        flat = _concatenated(grads, sizes, inner).to(inner.dtype)
        total = torch.zeros(inner.numel(), dtype=inner.dtype, device=inner.device)
        return total.index_add_(0, take, flat).view(inner.shape)

    return cotangent


def itself(inner: Tensor) -> Callable[[Sequence[Tensor | None]], Tensor]:
    """Return the cotangent of the one output that is ``inner``."""

    def cotangent(grads: Sequence[Tensor | None]) -> Tensor:
        (grad,) = grads
        assert grad is not None, "a source without gradients is left out"
        return grad.to(inner.dtype)

    return cotangent


def _concatenated(grads: Sequence[Tensor | None], sizes: Sequence[int], like: Tensor) -> Tensor:
    return torch.cat(
        [
            grad.reshape(-1) if grad is not None else like.new_zeros(size)
            for grad, size in zip(grads, sizes, strict=True)
        ]
    )


class PassGraph:
    """The inner graph of one pass: the tensors its outputs come from, and the parameters they reach.

    Args:
        sources: What the outputs come from; empty when nothing was computed.
        owners: The request each output belongs to.
        waiting: Requests whose gradient is to come: the graph is freed when each has had it.
        parameters: Parameters that receive gradients.
        map_error: Applied to an exception of the inner backward.
        inside: Entered around the inner backward, whose recompute runs the model again.
        begin: Told as an inner backward begins.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        owners: Sequence[int],
        waiting: Iterable[int],
        parameters: Sequence[Tensor],
        map_error: BackwardGuard,
        inside: Callable[[], AbstractContextManager[None]] = nullcontext,
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        self._sources = tuple(sources)
        self._owners = tuple(owners)
        self._parameters = tuple(parameters)
        self._map_error = map_error
        self._inside = inside
        self._begin = begin
        self._waiting = set(waiting)
        self._spent: set[int] = set()
        self._closed = False

    @property
    def alive(self) -> bool:
        """Whether the inner graph still holds memory."""
        return bool(self._sources) and not self._closed

    def backward(self, grads: Sequence[Tensor | None], *, retain: bool) -> None:
        """Run the inner backward for the outputs' gradients (None: not in this loss) and commit to ``.grad``."""
        given = {owner for owner, grad in zip(self._owners, grads, strict=True) if grad is not None}
        if self._closed or given & self._spent:
            raise BackwardError(
                "backward was called a second time through the outputs of one micro-batch, whose graph is freed; "
                "add the losses before calling backward, or pass retain_graph=True the first time"
            )
        waiting = self._waiting - given
        keep = retain or bool(waiting)
        self._begin()
        try:
            with self._inside():
                buffers = self._own(self._inner(grads, keep=keep))
        except Exception as error:
            self._close()
            mapped = self._map_error(error)
            if mapped is error:
                raise
            raise mapped from error
        self._commit(buffers)
        self._waiting = waiting
        if not retain:
            self._spent |= given
        if not keep:
            self._close()

    def _inner(self, grads: Sequence[Tensor | None], *, keep: bool) -> Sequence[Tensor | None]:
        """Return the gradient of each parameter, None for one the pass does not reach."""
        tensors, cotangents = [], []
        for source in self._sources:
            own = grads[source.outputs.start : source.outputs.stop]
            if any(grad is not None for grad in own):
                tensors.append(source.tensor)
                cotangents.append(source.cotangent(own))
        if not tensors:
            return [None] * len(self._parameters)
        return torch.autograd.grad(tensors, self._parameters, cotangents, retain_graph=keep, allow_unused=True)

    def _own(self, found: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients as tensors fit to become ``.grad``; the last step that may run out of memory.

        autograd may hand out one tensor for two parameters, or one element for many; what stays needs memory of its
        own. A parameter without ``.grad`` that the pass does not reach gets an exact zero.
        """
        taken: set[int] = set()
        buffers: list[Tensor | None] = []
        for parameter, grad in zip(self._parameters, found, strict=True):
            if parameter.grad is None:
                if grad is None:
                    grad = torch.zeros_like(parameter)
                elif id(grad) in taken or grad.stride() != parameter.stride():
                    grad = torch.empty_like(parameter).copy_(grad)
                taken.add(id(grad))
            buffers.append(grad)
        return buffers

    def _commit(self, buffers: Sequence[Tensor | None]) -> None:
        """Add the pass's buffers to ``.grad``."""
        with torch.no_grad():
            for parameter, grad in zip(self._parameters, buffers, strict=True):
                if parameter.grad is None:
                    parameter.grad = grad
                elif grad is not None:
                    parameter.grad.add_(grad)

    def _close(self) -> None:
        self._sources = ()
        self._closed = True


class _Boundary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, graph: PassGraph, pieces: list[Tensor]) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.graph = graph
        return tuple(pieces)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None, None]:
        ctx.graph.backward(grads, retain=torch._C._autograd._get_current_graph_task_keep_graph())
        return None, None, None


def attach(graph: PassGraph, pieces: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the outputs, without graph so far, behind the boundary of ``graph``, in its order of outputs."""
    first = pieces[0]
    anchor = torch.empty(0, dtype=first.dtype, device=first.device, requires_grad=True)
    # ``data`` shares the storage without being a view for autograd, so that a caller may change an output in place.
    outputs: tuple[Tensor, ...] = _Boundary.apply(  # type: ignore[no-untyped-call]
        anchor, graph, [piece.data for piece in pieces]
    )
    return outputs


def collect_cycles() -> None:
    """Free what a caught out-of-memory left in reference cycles (tracebacks hold frames, frames hold tensors)."""
    gc.collect()
