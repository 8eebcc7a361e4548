"""A model of PyTorch's CUDA caching allocator for one device: bytes reserved, not only bytes live.

It follows ``c10/cuda/CUDACachingAllocator.cpp`` function by function; the docstrings name them. Nothing is allocated.
Time passes only through the calls made, so what depends on the device's own pace (blocks waiting for another stream) is
not modelled; nor are private pools of CUDA graphs. See ``docs/allocator.md``. The twin is ``allocator_naive``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from trainer_rank.memory.allocator_pool import Block, Pool, laid_out
from trainer_rank.memory.allocator_rules import (
    SMALL_BYTES,
    AllocatorOutOfMemoryError,
    AllocatorSettings,
    SegmentEvent,
    multiple_above,
    page_size,
    rounded_size,
    segment_size,
    splits,
)
from trainer_rank.memory.trace import Event, Trace

FIRST_ADDRESS = 1 << 60


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedPeak:
    """Peaks of a replayed trace.

    Attributes:
        reserved_bytes: Most bytes of all segments.
        allocated_bytes: Most bytes of blocks in use, rounding and unsplit remainders included.
        largest_block_bytes: The largest block handed out.
    """

    reserved_bytes: int
    allocated_bytes: int
    largest_block_bytes: int


class CachingAllocator:
    """The caching allocator of a device with ``capacity_bytes`` for it alone.

    Attributes:
        capacity_bytes: What the driver can hand out; a memory fraction is a part of it.
        num_alloc_retries: Requests that were tried again after the release of cached blocks.
        segment_events: Every call to the driver, in order.
        coming_addresses: Where the driver will put the next segments, for a replay; when there is none, the settings
            decide.
        allocated_bytes, reserved_bytes: Bytes of blocks in use, and of segments.
        peak_allocated_bytes, peak_reserved_bytes: Their maxima since the beginning or ``reset_peaks``.
    """

    def __init__(self, capacity_bytes: int, settings: AllocatorSettings | None = None) -> None:
        if capacity_bytes < 1:
            raise ValueError(f"capacity_bytes must be positive, got {capacity_bytes}")
        self.capacity_bytes = capacity_bytes
        self.settings = AllocatorSettings() if settings is None else settings
        self.num_alloc_retries = 0
        self.segment_events: list[SegmentEvent] = []
        self.coming_addresses: deque[int] = deque()
        self.allocated_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self._small, self._large = Pool(is_small=True), Pool(is_small=False)
        self._used: dict[int, Block] = {}
        self._handles = 0
        self._addresses = FIRST_ADDRESS

    @property
    def free_bytes(self) -> int:
        """Bytes that no segment holds."""
        return self.capacity_bytes - self.reserved_bytes

    @property
    def allowed_bytes(self) -> int | None:
        """Most bytes that may be reserved under the memory fraction, if one is set (``setMemoryFraction``)."""
        fraction = self.settings.memory_fraction
        return None if fraction is None else int(fraction * self.capacity_bytes)

    @property
    def largest_free_block_bytes(self) -> int:
        """The largest cached block, of any stream; 0 when none is cached (``cacheInfo``)."""
        return max((block.nbytes for pool in (self._small, self._large) for block in pool), default=0)

    def allocate(self, size_bytes: int, stream: int = 0) -> int:
        """Return the handle of a new block of at least ``size_bytes`` on a stream (``malloc``).

        Raises:
            AllocatorOutOfMemoryError: No room, also after a release of cached blocks. They stay released.
        """
        if size_bytes < 1:
            raise ValueError(f"size_bytes must be positive, got {size_bytes}")
        nbytes = rounded_size(size_bytes, self.settings)
        pool = self._small if nbytes <= SMALL_BYTES else self._large
        block = self._cached(pool, nbytes, stream) or self._fetched(pool, nbytes, stream)
        if splits(block.nbytes, nbytes, pool.is_small, self.settings):
            pool.add(block.cut(nbytes))
        block.is_used = True
        self.allocated_bytes += block.nbytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        self._handles += 1
        self._used[self._handles] = block
        return self._handles

    def free(self, handle: int) -> None:
        """Return a block to the cache; free neighbours become one (``free``, ``free_block``).

        Raises:
            ValueError: No block in use has this handle.
        """
        if handle not in self._used:
            raise ValueError(f"handle {handle} names no block in use; each is freed once")
        block = self._used.pop(handle)
        block.is_used = False
        self.allocated_bytes -= block.nbytes
        block.pool.merge(block)
        block.pool.add(block)

    def release_cached(self) -> None:
        """Return whole free segments and pages to the driver (``emptyCache``, ``release_cached_blocks``)."""
        for pool in (self._large, self._small):
            for block in pool:
                if block.is_expandable:
                    self._unmap(block)
                elif not block.is_split:
                    self._release(block)

    def reset_peaks(self) -> None:
        """Set both peaks to the present values (``resetPeakStats``)."""
        self.peak_allocated_bytes, self.peak_reserved_bytes = self.allocated_bytes, self.reserved_bytes

    def adopt(
        self, address: int, nbytes: int, live: Mapping[int, int], *, is_small: bool, stream: int = 0
    ) -> dict[int, int]:
        """Take over a segment that was there before, its live blocks given as sizes by address; return their handles.

        What no live block covers is free. The driver is not asked.
        """
        pool = self._small if is_small else self._large
        handles: dict[int, int] = {}
        for block in laid_out(pool, address, nbytes, live, stream):
            if not block.is_used:
                pool.add(block)
                continue
            self._handles += 1
            self._used[self._handles] = block
            handles[block.address] = self._handles
            self.allocated_bytes += block.nbytes
        self.reserved_bytes += nbytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return handles

    def block_of(self, handle: int) -> tuple[int, int]:
        """Return the address and the size of a block in use."""
        block = self._used[handle]
        return block.address, block.nbytes

    def has_cached(self, size_bytes: int, stream: int = 0) -> bool:
        """Return whether a request would be served without the driver."""
        nbytes = rounded_size(size_bytes, self.settings)
        return self._fitting(self._small if nbytes <= SMALL_BYTES else self._large, nbytes, stream) is not None

    def _cached(self, pool: Pool, nbytes: int, stream: int) -> Block | None:
        """Take the best fit among free blocks, if one will do (``get_free_block``)."""
        pool.searches += self.settings.collects_garbage
        found = self._fitting(pool, nbytes, stream)
        if found is not None:
            pool.remove(found)
        return found

    def _fitting(self, pool: Pool, nbytes: int, stream: int) -> Block | None:
        settings = self.settings
        found: Block | None = None
        for block in pool.free_from(stream, nbytes):
            if found is not None and block.room >= found.room:
                break
            found = block
            if not settings.expandable_segments:
                break
        if found is None:
            return None
        if settings.is_oversize(nbytes):
            if found.nbytes >= nbytes + settings.max_non_split_rounding_bytes:
                return None
        elif settings.is_oversize(found.nbytes):
            return None
        return found

    def _fetched(self, pool: Pool, nbytes: int, stream: int) -> Block:
        """Get memory from the driver, releasing step by step what is cached (``malloc``)."""
        if self.settings.collects_garbage:
            self._collect_garbage()
        block = self._from_driver(pool, nbytes, stream)
        if block is None and self._release_oversize(pool, nbytes, stream):
            block = self._from_driver(pool, nbytes, stream)
        if block is None:
            self.release_cached()
            self.num_alloc_retries += 1
            block = self._from_driver(pool, nbytes, stream)
        if block is None:
            raise AllocatorOutOfMemoryError(
                wanted_bytes=nbytes,
                free_bytes=self.free_bytes,
                reserved_bytes=self.reserved_bytes,
                allocated_bytes=self.allocated_bytes,
                allowed_bytes=self.allowed_bytes,
            )
        return block

    def _from_driver(self, pool: Pool, nbytes: int, stream: int) -> Block | None:
        """Return a block in no pool, from a new segment or from mapped pages (``alloc_block``)."""
        size, allowed = segment_size(nbytes, self.settings), self.allowed_bytes
        if allowed is not None and self.reserved_bytes + size > allowed:
            return None
        if self.settings.expandable_segments:
            return self._expanded(pool, nbytes, stream)
        if size > self.free_bytes:
            return None
        address = self._new_address(size)
        block = Block(address=address, nbytes=size, stream=stream, pool=pool, base=address)
        self._reserve("segment_alloc", size, block)
        return block

    def _expanded(self, pool: Pool, nbytes: int, stream: int) -> Block | None:
        """Map pages until a block is large enough (``try_allocate_expandable_block``).

        Pages mapped before the driver ran out stay mapped.
        """
        block = self._expandable(pool, nbytes, stream)
        if not block.is_mapped and not self._map(block, min(block.nbytes, nbytes)):
            return None
        while block.nbytes < nbytes:
            after = block.after
            assert after is not None
            assert not after.is_mapped
            if not self._map(after, min(nbytes - block.nbytes, after.nbytes)):
                return None
            block = after
        pool.remove(block)
        return block

    def _expandable(self, pool: Pool, nbytes: int, stream: int) -> Block:
        """Return the lowest run of free and unmapped blocks with room enough (``find_expandable_block``)."""
        for unmapped in pool.unmapped(stream):
            before = unmapped.before
            first = unmapped if before is None or before.is_used else before
            room, block = 0, first
            while room < nbytes:
                room += block.nbytes
                if block.after is None or block.after.is_used:
                    break
                block = block.after
            if room >= nbytes:
                return first
        # Address space for 9/8 of the device, in whole pages, as the constructor of ExpandableSegment reserves it.
        space = multiple_above(self.capacity_bytes + self.capacity_bytes // 8, page_size(pool.is_small, self.settings))
        address = self._new_address(space)
        block = Block(
            address=address, nbytes=space, stream=stream, pool=pool, base=address, is_expandable=True, is_mapped=False
        )
        pool.add(block)
        return block

    def _map(self, block: Block, nbytes: int) -> bool:
        """Back the beginning of an unmapped block with whole pages; all or nothing (``map_block``)."""
        pool = block.pool
        mapped = multiple_above(nbytes, page_size(pool.is_small, self.settings))
        if mapped == 0 or mapped > self.free_bytes:
            return False
        pool.remove(block)
        if mapped < block.nbytes:
            pool.add(block.cut(mapped))
        self._reserve("segment_map", mapped, block)
        block.is_mapped = True
        pool.merge(block)
        pool.add(block)
        return True

    def _unmap(self, block: Block) -> None:
        """Give back the pages that lie wholly inside a free block (``unmap_block``)."""
        pool = block.pool
        page = page_size(pool.is_small, self.settings)
        start = block.base + multiple_above(block.address - block.base, page)
        stop = block.base + (block.address + block.nbytes - block.base) // page * page
        if start >= stop:
            return
        pool.remove(block)
        if start > block.address:
            before, block = block, block.cut(start - block.address)
            pool.add(before)
        if stop < block.address + block.nbytes:
            pool.add(block.cut(stop - block.address))
        self._unreserve("segment_unmap", block)
        block.is_mapped = False
        pool.merge(block)
        if block.is_split:
            pool.add(block)

    def _release(self, block: Block) -> None:
        """Give a whole free segment back to the driver (``release_block``)."""
        block.pool.remove(block)
        self._unreserve("segment_free", block)

    def _release_oversize(self, pool: Pool, nbytes: int, stream: int) -> bool:
        """Release one oversize block that is large enough, or several (``release_available_cached_blocks``)."""
        least = self.settings.max_split_bytes
        if least is None or self.settings.expandable_segments:
            return False
        wanted = max(least, nbytes)
        for block in pool.free_from(stream, wanted):
            self._release(block)
            return True
        released = 0
        for block in pool.free_down_from(stream, wanted):
            if released >= wanted or block.nbytes < least:
                break
            released += block.nbytes
            self._release(block)
        return released >= wanted

    def _collect_garbage(self) -> None:
        """Release unsplit large blocks that are older than their average (``garbage_collect_cached_blocks``)."""
        assert self.allowed_bytes is not None
        wanted = self.reserved_bytes - int(self.settings.garbage_collection_threshold * self.allowed_bytes)
        blocks = [block for block in self._large if not block.is_split and not block.is_expandable]
        while wanted > 0 and blocks:
            ages = [self._large.searches - block.born for block in blocks]
            average = sum(ages) / len(ages)
            old = [block for block, age in zip(blocks, ages, strict=True) if age >= average]
            blocks = [block for block, age in zip(blocks, ages, strict=True) if age < average]
            for block in old:
                wanted -= block.nbytes
                self._release(block)

    def _new_address(self, nbytes: int) -> int:
        """Return where a new range of addresses begins; none is used twice, unless it is said to come."""
        if self.coming_addresses:
            return self.coming_addresses.popleft()
        if self.settings.segment_addresses == "descending":
            self._addresses -= nbytes
            return self._addresses
        self._addresses += nbytes
        return self._addresses - nbytes

    def _reserve(self, action: Literal["segment_alloc", "segment_map"], nbytes: int, block: Block) -> None:
        self.reserved_bytes += nbytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        self.segment_events.append(SegmentEvent(action, nbytes, block.stream, block.address))

    def _unreserve(self, action: Literal["segment_free", "segment_unmap"], block: Block) -> None:
        self.reserved_bytes -= block.nbytes
        self.segment_events.append(SegmentEvent(action, block.nbytes, block.stream, block.address))


def replay(trace: Trace, allocator: CachingAllocator) -> ReplayedPeak:
    """Return the peaks of an allocator while the events of a trace happen to it.

    The allocator keeps what the trace leaves live. A storage that vanishes without having appeared was live before the
    trace began; it is not the allocator's and is passed over.

    Raises:
        AllocatorOutOfMemoryError: The device has no room for an event.
        ValueError: A storage appeared that is live.
    """
    allocator.reset_peaks()
    handles: dict[int, int] = {}
    largest = 0
    for step in trace.steps:
        if not isinstance(step, Event):
            continue
        if step.delta_bytes > 0:
            if step.storage in handles:
                raise ValueError(f"storage {step.storage} appeared while it was live")
            handle = handles[step.storage] = allocator.allocate(step.delta_bytes)
            largest = max(largest, allocator.block_of(handle)[1])
        elif step.delta_bytes < 0 and step.storage in handles:
            allocator.free(handles.pop(step.storage))
    return ReplayedPeak(
        reserved_bytes=allocator.peak_reserved_bytes,
        allocated_bytes=allocator.peak_allocated_bytes,
        largest_block_bytes=largest,
    )
