"""A GPU that is not there: the counters of one, and its out-of-memory, for work on ``meta`` tensors.

While the meter is open, every storage that appears on ``meta`` is allocated in a model of CUDA's caching allocator with
the device's capacity, and given back when it dies. Nothing is computed. An admission cannot tell it from a real device,
and code that needs too much raises the out-of-memory error that the device would raise.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_iter

from trainer_rank.errors import MeterError
from trainer_rank.memory import AllocatorOutOfMemoryError, AllocatorSettings, CachingAllocator
from trainer_rank.meters.base import Meter, Reading
from trainer_rank.meters.devices import Device, find_device
from trainer_rank.units import format_bytes, parse_bytes

RESERVE_FRACTION: Final = 0.01
"""Share of the device kept for what the model of the allocator does not know: rounding, fragmentation, libraries."""

_META: Final = torch.device("meta")
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
        memory_budget: Bytes that may be in use, weights included; None is all the device has.
        settings: Of the caching allocator; None is torch's default.

    Raises:
        ConfigError: The device is unknown.
        ValueError: A number of bytes is malformed.
    """

    def __init__(
        self,
        device: str | int | Device,
        memory_budget: int | str | None = None,
        *,
        settings: AllocatorSettings | None = None,
    ) -> None:
        self.gpu: Final = _device(device)
        capacity = self.gpu.usable_bytes
        self._budget_bytes = capacity if memory_budget is None else parse_bytes(memory_budget, field="memory_budget")
        self._budget_bytes = min(self._budget_bytes, capacity)
        self._outside_bytes = self.gpu.context_bytes
        self._reserve_bytes = int(self._budget_bytes * RESERVE_FRACTION) + self.gpu.cublas_bytes
        self._mode = _Allocations(CachingAllocator(max(0, self._budget_bytes - self._outside_bytes), settings))
        self._entered = ExitStack()
        self._entered.enter_context(self._mode)
        self._closed = False

    @property
    def name(self) -> str:
        return "simulated"

    @property
    def device(self) -> str:
        return "meta"

    def place(self, tensors: Iterable[Tensor]) -> None:
        """Put tensors that are older than the meter, such as a model's weights, on the device.

        Raises:
            torch.OutOfMemoryError: They do not fit.
        """
        self._check_open()
        for tensor in tensors:
            self._mode.note(tensor)

    def read(self) -> Reading:
        self._check_open()
        allocator = self._mode.allocator
        held = self._outside_bytes + allocator.reserved_bytes
        return Reading(
            allocated_bytes=allocator.allocated_bytes,
            reserved_bytes=allocator.reserved_bytes,
            resident_bytes=held,
            peak_allocated_bytes=allocator.peak_allocated_bytes,
            peak_reserved_bytes=allocator.peak_reserved_bytes,
            peak_resident_bytes=self._outside_bytes + allocator.peak_reserved_bytes,
            peak_resident_since_reset=True,
            budget_bytes=self._budget_bytes,
            reserve_bytes=self._reserve_bytes,
            available_bytes=max(0, self._budget_bytes - self._reserve_bytes - held),
        )

    def prepare(self, needed_bytes: int | None = None) -> Reading:
        reading = self.read()
        enough = needed_bytes is not None and needed_bytes <= reading.available_bytes
        if enough or reading.reserved_bytes == reading.allocated_bytes:
            return reading
        self.release_cached()
        return self.read()

    def reset_peak(self) -> None:
        self._check_open()
        self._mode.allocator.reset_peaks()

    def release_cached(self) -> None:
        self._check_open()
        self._mode.allocator.release_cached()

    def close(self) -> None:
        if self._closed:
            return
        if _get_current_dispatch_mode() is not self._mode:
            raise MeterError("another torch dispatch mode was entered after this meter opened; leave it first")
        self._entered.close()
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise MeterError("this meter is closed; open a new one with Simulated(...)")


class _Allocations(TorchDispatchMode):
    """Allocates each new ``meta`` storage, once however many tensors share it, and frees it when it dies."""

    def __init__(self, allocator: CachingAllocator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.allocator = allocator
        self._live: dict[int, Any] = {}
        self._numbers = itertools.count()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if _paused:
            return result
        fresh = [leaf for leaf in tree_iter(result) if isinstance(leaf, Tensor) and leaf.device == _META]
        if fresh:
            given = {leaf.untyped_storage()._cdata for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)}
            for tensor in fresh:
                if tensor.untyped_storage()._cdata not in given:
                    self.note(tensor)
        return result

    def note(self, tensor: Tensor) -> None:
        """Allocate the storage of a tensor that has none on the device yet."""
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if not nbytes or key in self._live:
            return
        try:
            handle = self.allocator.allocate(nbytes)
        except AllocatorOutOfMemoryError as error:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {format_bytes(error.wanted_bytes)}. The simulated GPU has "
                f"{format_bytes(error.free_bytes)} free; {format_bytes(error.allocated_bytes)} are allocated and "
                f"{format_bytes(error.reserved_bytes)} reserved by the allocator"
            ) from error

        def gone(_: Any) -> None:
            del self._live[key]
            self.allocator.free(handle)

        self._live[key] = weakref.ref(storage, gone)


def _device(device: str | int | Device) -> Device:
    if isinstance(device, Device):
        return device
    try:
        capacity = parse_bytes(device, field="device")
    except ValueError:
        return find_device(str(device))
    return Device(name=format_bytes(capacity), usable_bytes=capacity, multiprocessors=132)
