"""A GPU that is not there: the counters of one, and its out-of-memory, for work on ``meta`` tensors.

While the meter is open, every storage that appears on ``meta`` is allocated in a model of CUDA's caching allocator with
the device's capacity, and given back when it dies. Nothing is computed. An admission cannot tell it from a real device,
and code that needs too much raises the out-of-memory error that the device would raise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Final, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from trainer_rank.errors import MeterError
from trainer_rank.memory import AllocatorOutOfMemoryError, AllocatorSettings, CachingAllocator
from trainer_rank.meters.base import Meter, Reading
from trainer_rank.meters.devices import Device, find_device
from trainer_rank.meters.storages import StorageWatch, Vanish, run_without_mode
from trainer_rank.meters.waste import SEGMENTS_BYTES, waste_bytes, waste_share
from trainer_rank.units import format_bytes, parse_bytes

RESERVE_FRACTION: Final = 0.01
"""Share of the budget kept for what the model of the allocator does not know: other libraries. The workspace of a
cuBLAS handle and the allocator's waste (``meters.waste``) are kept besides."""

_paused = 0


@contextmanager
def paused() -> Iterator[None]:
    """Keep what runs inside off every simulated device: a dry run allocates nothing anywhere."""
    global _paused
    _paused += 1
    try:
        yield
    finally:
        _paused -= 1


@final
class Simulated(Meter):
    """A simulated GPU.

    Args:
        device: Name of a GPU (``meters.devices``), or its memory in bytes as ``parse_bytes`` takes it.
        memory_budget: Bytes that may be in use on the device, weights included; None is all the device has. From the
            first ``prepare`` on, the allocator is held to it.
        settings: Of the caching allocator; None is torch's default.
        waste_fraction: What the allocator may waste, as a share of live bytes; None is by its settings, and two
            segments besides (``meters.waste``).

    Raises:
        ConfigError: The device is unknown.
        ValueError: A number of bytes is malformed, or the budget exceeds the device.
    """

    def __init__(
        self,
        device: str | int | Device,
        memory_budget: int | str | None = None,
        *,
        settings: AllocatorSettings | None = None,
        waste_fraction: float | None = None,
    ) -> None:
        self.gpu: Final = _device(device)
        total = self.gpu.usable_bytes
        budget = total if memory_budget is None else parse_bytes(memory_budget, field="memory_budget")
        if budget > total:
            raise ValueError(
                f"memory_budget must not exceed the device's memory, got {format_bytes(budget)} on {self.gpu.name} "
                f"with {format_bytes(total)}; lower it or leave it out"
            )
        self._budget_bytes = budget
        workspace = self.gpu.cublas_bytes
        self._reserve_bytes = int(budget * RESERVE_FRACTION) + workspace
        self._outside_bytes = self.gpu.context_bytes
        # The workspace is no one else's from the start, though it is resident only from the first matrix product on.
        # Where the context alone fills the device, one byte is left, and everything is out of memory.
        capacity = max(1, total - self._outside_bytes - workspace)
        self._mode = _Allocations(CachingAllocator(capacity, settings), self.gpu)
        expandable = self._allocator.settings.expandable_segments
        # A caller who gives the share means all of it.
        self._waste_fixed = SEGMENTS_BYTES if waste_fraction is None else 0
        self._waste_fraction = waste_share(expandable) if waste_fraction is None else waste_fraction
        self._fraction = self._allocator.settings.memory_fraction
        self._entered = ExitStack()
        self._entered.enter_context(self._mode)
        self._closed = False

    @property
    def name(self) -> str:
        return "simulated"

    @property
    def device(self) -> str:
        return "meta"

    @property
    def num_alloc_retries(self) -> int:
        """Allocations that succeeded or failed only after cached blocks were released."""
        return self._allocator.num_alloc_retries

    def place(self, tensors: Iterable[Tensor]) -> None:
        """Put tensors that are older than the meter, such as a model's weights, on the device.

        Raises:
            torch.OutOfMemoryError: They do not fit.
        """
        self._check_open()
        for tensor in tensors:
            self._mode.storages.note(tensor)

    def occupy(self, num_bytes: int) -> None:
        """Let another process take bytes of the device, or give them back (negative).

        Raises:
            torch.OutOfMemoryError: That many are not physically free.
        """
        self._check_open()
        allocator = self._allocator
        if num_bytes > allocator.free_bytes:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Another process tried to take {format_bytes(num_bytes)} of {self.gpu.name}; "
                f"{format_bytes(allocator.free_bytes)} are free"
            )
        self._outside_bytes += num_bytes
        allocator.capacity_bytes -= num_bytes

    def read(self) -> Reading:
        self._check_open()
        allocator = self._allocator
        held = self._outside_bytes + allocator.reserved_bytes
        available = self._budget_bytes - held - self._reserve_bytes
        if self._fraction is not None:
            allowed = int(self._fraction * allocator.capacity_bytes) - allocator.reserved_bytes
            available = min(available, allowed - self._reserve_bytes)
        waste = waste_bytes(available, self._waste_fraction, self._waste_fixed)
        return Reading(
            allocated_bytes=allocator.allocated_bytes,
            reserved_bytes=allocator.reserved_bytes,
            resident_bytes=held,
            peak_allocated_bytes=allocator.peak_allocated_bytes,
            peak_reserved_bytes=allocator.peak_reserved_bytes,
            peak_resident_bytes=self._outside_bytes + allocator.peak_reserved_bytes,
            peak_resident_since_reset=True,
            budget_bytes=self._budget_bytes,
            reserve_bytes=self._reserve_bytes + waste,
            available_bytes=max(0, available - waste),
        )

    def prepare(self, needed_bytes: int | None = None) -> Reading:
        reading = self.read()
        enough = needed_bytes is not None and needed_bytes <= reading.available_bytes
        if not enough and reading.reserved_bytes > reading.allocated_bytes:
            self.release_cached()
            reading = self.read()
        if self._budget_bytes < self.gpu.usable_bytes:
            cap = max(0, self._budget_bytes - self._reserve_bytes - self._outside_bytes)
            fraction = min(cap / self._allocator.capacity_bytes, 1.0 if self._fraction is None else self._fraction)
            self._allocator.settings = replace(self._allocator.settings, memory_fraction=fraction)
        return reading

    def reset_peak(self) -> None:
        self._check_open()
        self._allocator.reset_peaks()

    def release_cached(self) -> None:
        self._check_open()
        self._allocator.release_cached()

    def close(self) -> None:
        if self._closed:
            return
        if _get_current_dispatch_mode() is not self._mode:
            raise MeterError("another torch dispatch mode was entered after this meter opened; leave it first")
        self._entered.close()
        self._closed = True

    @property
    def _allocator(self) -> CachingAllocator:
        return self._mode.allocator

    def _check_open(self) -> None:
        if self._closed:
            raise MeterError("this meter is closed; open a new one with Simulated(...)")


class _Allocations(TorchDispatchMode):
    """Allocates each new ``meta`` storage, once however many tensors share it, and frees it when it dies."""

    def __init__(self, allocator: CachingAllocator, gpu: Device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.allocator = allocator
        self.storages = StorageWatch("meta", self._appear)
        self._gpu = gpu

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if _paused:
            return func(*args, **kwargs)
        result = run_without_mode(func, args, kwargs)
        try:
            self.storages.see(result, args, kwargs)
        except torch.OutOfMemoryError as error:
            # The error's traceback keeps this frame; it must not keep the outputs that did fit, nor the arguments.
            del result, args, kwargs
            raise error.with_traceback(None) from error.__cause__
        return result

    def _appear(self, nbytes: int) -> Vanish:
        try:
            handle = self.allocator.allocate(nbytes)
        except AllocatorOutOfMemoryError as error:
            raise torch.OutOfMemoryError(self._message(error)) from error.with_traceback(None)
        return lambda: self.allocator.free(handle)

    def _message(self, error: AllocatorOutOfMemoryError) -> str:
        allowed = "" if error.allowed_bytes is None else f" {format_bytes(error.allowed_bytes)} allowed;"
        return (
            f"CUDA out of memory. Tried to allocate {format_bytes(error.wanted_bytes)}. Simulated GPU {self._gpu.name} "
            f"has a total capacity of {format_bytes(self._gpu.usable_bytes)} of which "
            f"{format_bytes(error.free_bytes)} is free.{allowed} Of {format_bytes(error.reserved_bytes)} reserved by "
            f"the allocator, {format_bytes(error.allocated_bytes)} is in use."
        )


def _device(device: str | int | Device) -> Device:
    if isinstance(device, Device):
        return device
    try:
        total = parse_bytes(device, field="device")
    except ValueError:
        if not isinstance(device, str) or device.strip()[:1] in ("", "-", ".") or device.strip()[:1].isdigit():
            raise
        return find_device(device)
    return Device(name=f"of {format_bytes(total)}", usable_bytes=total, multiprocessors=132)
