"""The autograd boundary between a pass and the caller's loss.

The caller's outputs are leaves of the pass's own graph: ``loss.backward()`` ends at the boundary, which then runs the
inner backward into buffers of the pass and adds them to ``.grad`` only when all of it succeeded. A backward that runs
out of memory half-way therefore leaves every ``.grad`` as it was.

Several partial losses may be called one after another: the inner graph is kept until every output has received its
gradient once. After that a further backward is an error, unless the caller asked to retain the graph.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from trainer_rank.errors import BackwardError

BackwardGuard = Callable[[BaseException], BaseException]
"""Maps what the inner backward raised to what the caller sees."""


class PassGraph:
    """The inner graph of one pass: log-probs (M,) with graph, and the parameters it reaches.

    Args:
        logprobs: (M,) with graph, or None when nothing was scored.
        slot: (M,) int64, place of each in the concatenated outputs.
        sizes: Elements of each output.
        parameters: Parameters that receive gradients.
        map_error: Applied to an exception of the inner backward.
    """

    def __init__(
        self,
        logprobs: Tensor | None,
        slot: Tensor,
        sizes: Sequence[int],
        scored: Sequence[bool],
        parameters: Sequence[Tensor],
        map_error: BackwardGuard,
    ) -> None:
        self._logprobs = logprobs
        self._slot = slot
        self._sizes = tuple(sizes)
        self._parameters = tuple(parameters)
        self._map_error = map_error
        self._waiting = {position for position, has_labels in enumerate(scored) if has_labels}
        self._spent: set[int] = set()
        self._closed = False

    @property
    def alive(self) -> bool:
        """Whether the inner graph still holds memory."""
        return self._logprobs is not None and not self._closed

    def backward(self, grads: Sequence[Tensor | None], *, retain: bool) -> None:
        """Run the inner backward for the outputs' gradients (None: not in this loss) and commit to ``.grad``."""
        given = {position for position, grad in enumerate(grads) if grad is not None}
        if self._closed or given & self._spent:
            raise BackwardError(
                "backward was called a second time through the outputs of one micro-batch, whose graph is freed; "
                "add the losses before calling backward, or pass retain_graph=True the first time"
            )
        waiting = self._waiting - given
        keep = retain or bool(waiting)
        try:
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
        if self._logprobs is None:
            return [None] * len(self._parameters)
        flat = torch.cat(
            [
                grad.reshape(-1) if grad is not None else self._logprobs.new_zeros(size)
                for grad, size in zip(grads, self._sizes, strict=True)
            ]
        )
        cotangent = flat.to(self._logprobs.dtype).index_select(0, self._slot)
        del flat
        return torch.autograd.grad(self._logprobs, self._parameters, cotangent, retain_graph=keep, allow_unused=True)

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
        self._logprobs = None
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


def attach(graph: PassGraph, flat: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """Return the outputs (one flat tensor per request) behind the boundary of ``graph``.

    Args:
        graph: The pass's inner graph.
        flat: Concatenated output values, without graph.
        sizes: Elements of each output.
    """
    anchor = torch.empty(0, dtype=flat.dtype, device=flat.device, requires_grad=True)
    # ``data`` shares the storage without being a view for autograd, so that a caller may change an output in place.
    outputs: tuple[Tensor, ...] = _Boundary.apply(  # type: ignore[no-untyped-call]
        anchor, graph, [piece.data for piece in flat.split(list(sizes))]
    )
    return outputs


def collect_cycles() -> None:
    """Free what a caught out-of-memory left in reference cycles (tracebacks hold frames, frames hold tensors)."""
    gc.collect()
