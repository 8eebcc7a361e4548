"""Records which storages appear and vanish while the executor's own code runs on ``meta``."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainer_rank.executor.kernel_memory import hidden_bytes
from trainer_rank.memory import CallMark, Event, Mark, Trace
from trainer_rank.meters.storages import StorageWatch, Vanish, run_without_mode


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
        self._storages = StorageWatch(device.type, self._appear)
        self._stands_for = stands_for
        self._steps: list[Mark | CallMark | Event] = []
        self._mark = Mark("start")
        self._in_call = False
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
        result = run_without_mode(func, args, kwargs or {})
        if self._storages.see(result, args, kwargs or {}):
            hidden = hidden_bytes(func, args, self._stands_for)
            if hidden:
                number = next(self._numbers)
                self._steps += (Event(hidden, number), Event(-hidden, number))
        return result

    def _appear(self, nbytes: int) -> Vanish:
        number = next(self._numbers)
        self._tell_recompute_from_backward()
        self._steps.append(Event(nbytes, number))
        return lambda: self._steps.append(Event(-nbytes, number))

    def _tell_recompute_from_backward(self) -> None:
        """Inside a layer's backward, only its recompute builds a graph."""
        if self._in_call or self._mark.layer is None or self._mark.phase not in ("backward", "recompute"):
            return
        phase = "recompute" if torch.is_grad_enabled() else "backward"
        if phase != self._mark.phase:
            self.mark(phase, self._mark.layer)
