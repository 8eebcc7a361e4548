"""Records which storages appear and vanish while the executor's own code runs on ``meta``."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from trainer_rank.executor.kernel_memory import hidden_bytes
from trainer_rank.memory import CallMark, Event, Mark, Trace


class AllocationRecorder(TorchDispatchMode):
    """Context in which every new storage on a device becomes an event, and its release another.

    Storages are counted once however many tensors share them. A result on a storage that some argument already had (a
    view, an in-place result, an alias of a weight) is not new.

    Args:
        device: Device whose storages are recorded.
        stands_for: Device the recorded run stands for; what its kernels allocate inside is recorded too.
    """

    def __init__(self, device: torch.device, stands_for: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._stands_for = stands_for
        self._steps: list[Mark | CallMark | Event] = []
        self._mark = Mark("start")
        self._in_call = False
        self._live: dict[int, Any] = {}
        self._numbers = itertools.count()

    def mark(self, phase: str, layer: int | None = None) -> None:
        """Begin a stretch."""
        self._mark = Mark(phase, layer)
        self._steps.append(self._mark)

    def call(self, kind: str) -> None:
        """Begin a call of a kind; an empty kind ends the last one."""
        self._in_call = bool(kind)
        self._steps.append(CallMark(kind))

    def trace(self, num_layers: int) -> Trace:
        """Return what was recorded so far."""
        return Trace(steps=tuple(self._steps), num_layers=num_layers)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.add.Tensor and not kwargs and _accumulates_in_place(*args):
            return args[0].add_(args[1])
        result = func(*args, **(kwargs or {}))
        fresh = [leaf for leaf in tree_iter(result) if isinstance(leaf, Tensor) and leaf.device == self._device]
        if fresh:
            given = {leaf.untyped_storage()._cdata for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)}
            for tensor in fresh:
                self._note(tensor, given)
            hidden = hidden_bytes(func, args, self._stands_for)
            if hidden:
                number = next(self._numbers)
                self._steps += (Event(hidden, number), Event(-hidden, number))
        return result

    def _note(self, tensor: Tensor, given: set[int]) -> None:
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if not nbytes or key in given or key in self._live:
            return

        number = next(self._numbers)
        self._tell_recompute_from_backward()

        def gone(_: Any) -> None:
            del self._live[key]
            self._steps.append(Event(-nbytes, number))

        self._live[key] = weakref.ref(storage, gone)
        self._steps.append(Event(nbytes, number))

    def _tell_recompute_from_backward(self) -> None:
        """Inside a layer's backward, only its recompute builds a graph."""
        if self._in_call or self._mark.layer is None or self._mark.phase not in ("backward", "recompute"):
            return
        phase = "recompute" if torch.is_grad_enabled() else "backward"
        if phase != self._mark.phase:
            self.mark(phase, self._mark.layer)


# References to a tensor and to its storage that are there when a dispatch mode looks at one that nobody else holds.
_UNSHARED_TENSOR: Final = 4
_UNSHARED_STORAGE: Final = 2


def _accumulates_in_place(one: Any, other: Any) -> bool:
    """Return whether autograd, summing two gradients of one tensor, would add the second to the first without a mode.

    It does so when it holds the only reference to the first, but never under a dispatch mode, where the sum is a third
    tensor. With tied embeddings that would be a third gradient of vocabulary size.
    """
    return (
        torch._C._current_graph_task_id() != -1
        and not torch.is_grad_enabled()
        and isinstance(one, Tensor)
        and isinstance(other, Tensor)
        and one.shape == other.shape
        and one.dtype == other.dtype
        and one.is_contiguous()
        and one._use_count() <= _UNSHARED_TENSOR  # type: ignore[attr-defined]
        and torch._C._storage_Use_Count(one.untyped_storage()._cdata) <= _UNSHARED_STORAGE
    )
