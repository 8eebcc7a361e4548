"""What an update's allocations come to on the device: the peaks of the caching allocator's model over them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from trainer_rank.memory import CachingAllocator

# Far more than any update needs: whether it fits is not asked here.
_CAPACITY = 1 << 50


class Peaks(NamedTuple):
    """Largest bytes live, each block rounded to 512, and largest bytes reserved in segments."""

    live_bytes: int
    reserved_bytes: int


def peaks(operations: Iterable[tuple[int, int]]) -> Peaks:
    """Return the peaks of (storage, bytes) allocations and (storage, 0) releases, from an empty allocator."""
    allocator = CachingAllocator(_CAPACITY)
    handles: dict[int, int] = {}
    for storage, nbytes in operations:
        if nbytes:
            handles[storage] = allocator.allocate(nbytes)
        else:
            allocator.free(handles.pop(storage))
    return Peaks(allocator.peak_allocated_bytes, allocator.peak_reserved_bytes)
