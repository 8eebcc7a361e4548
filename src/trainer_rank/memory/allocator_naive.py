"""The allocator model the obvious way: one list of ranges in the order of their addresses, and scans over all of it.

The twin of ``allocator``, for tests and for reading. It shares the sizes of ``allocator_rules`` and nothing else, and
merges by going over the whole list after every step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainer_rank.memory.allocator_rules import (
    AllocatorOutOfMemoryError,
    AllocatorSettings,
    SegmentEvent,
    multiple_above,
    page_size,
    rounded_size,
    segment_size,
    splits,
)
from trainer_rank.units import MIB

FIRST_ADDRESS = 1 << 60


@dataclass(slots=True, eq=False, kw_only=True)
class NaiveRange:
    """Bytes from ``start`` to ``stop`` of the segment that begins at ``segment``; ``handle`` while in use."""

    segment: int
    start: int
    stop: int
    stream: int
    is_small: bool
    state: Literal["used", "free", "unmapped"] = "free"
    handle: int = 0
    born: int = 0

    @property
    def nbytes(self) -> int:
        """Its length."""
        return self.stop - self.start


class NaiveAllocator:
    """The same promises as ``CachingAllocator``, slowly."""

    def __init__(self, capacity_bytes: int, settings: AllocatorSettings) -> None:
        self.capacity_bytes, self.settings = capacity_bytes, settings
        self.ranges: list[NaiveRange] = []
        self.segment_events: list[SegmentEvent] = []
        self.num_alloc_retries = self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self._handles = 0
        self._edge = FIRST_ADDRESS
        self._searches = {True: 0, False: 0}

    @property
    def allocated_bytes(self) -> int:
        """Bytes of ranges in use."""
        return sum(one.nbytes for one in self.ranges if one.state == "used")

    @property
    def reserved_bytes(self) -> int:
        """Bytes of ranges that have memory."""
        return sum(one.nbytes for one in self.ranges if one.state != "unmapped")

    @property
    def largest_free_block_bytes(self) -> int:
        """The largest free range."""
        return max((one.nbytes for one in self.ranges if one.state == "free"), default=0)

    def allocate(self, size_bytes: int, stream: int = 0) -> int:
        """Return the handle of a new range."""
        nbytes = rounded_size(size_bytes, self.settings)
        is_small = nbytes <= MIB
        if self.settings.collects_garbage:
            self._searches[is_small] += 1
        one = self._fit(nbytes, is_small, stream)
        if one is None:
            if self.settings.collects_garbage:
                self._collect()
            one = self._grow(nbytes, is_small, stream)
        if one is None and self._release_oversize(nbytes, is_small, stream):
            one = self._grow(nbytes, is_small, stream)
        if one is None:
            self.num_alloc_retries += 1
            self.release_cached()
            one = self._grow(nbytes, is_small, stream)
        if one is None:
            free, reserved = self.capacity_bytes - self.reserved_bytes, self.reserved_bytes
            raise AllocatorOutOfMemoryError(
                wanted_bytes=nbytes, free_bytes=free, reserved_bytes=reserved, allocated_bytes=self.allocated_bytes,
                allowed_bytes=self._allowed(),
            )  # fmt: skip
        one.state = "used"
        if splits(one.nbytes, nbytes, is_small, self.settings):
            self._cut(one, one.start + nbytes, "free")
        self._handles += 1
        one.handle = self._handles
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return one.handle

    def free(self, handle: int) -> None:
        """Make a range free."""
        (one,) = [one for one in self.ranges if one.handle == handle and one.state == "used"]
        one.state, one.handle, one.born = "free", 0, self._searches[one.is_small]
        self._join()

    def release_cached(self) -> None:
        """Drop the free ranges that are whole segments; turn whole free pages into address space."""
        for is_small in (False, True):
            for one in self._free(is_small):
                if not self.settings.expandable_segments:
                    if self._is_whole(one):
                        self._drop(one)
                    continue
                page = page_size(is_small, self.settings)
                starts = [at for at in range(one.segment, one.stop, page) if one.start <= at and at + page <= one.stop]
                if not starts:
                    continue
                if starts[0] > one.start:
                    one = self._cut(one, starts[0], "free")
                if starts[-1] + page < one.stop:
                    self._cut(one, starts[-1] + page, "free")
                one.state = "unmapped"
                self.segment_events.append(SegmentEvent("segment_unmap", one.nbytes, one.stream, one.start))
                self._join()
                self.ranges = [o for o in self.ranges if not (o.start <= one.start < o.stop and self._is_whole(o))]

    def block_of(self, handle: int) -> tuple[int, int]:
        """Return the address and the size of a range in use."""
        (one,) = [one for one in self.ranges if one.handle == handle and one.state == "used"]
        return one.start, one.nbytes

    def _allowed(self) -> int | None:
        fraction = self.settings.memory_fraction
        return None if fraction is None else int(fraction * self.capacity_bytes)

    def _free(self, is_small: bool, stream: int | None = None) -> list[NaiveRange]:
        """Return the free ranges of a pool, in order of stream, size and address."""
        free = [one for one in self.ranges if one.state == "free" and one.is_small == is_small]
        if stream is not None:
            free = [one for one in free if one.stream == stream]
        return sorted(free, key=lambda one: (one.stream, one.nbytes, one.start))

    def _neighbours(self, one: NaiveRange) -> list[NaiveRange]:
        """Return a range and those behind it in its segment."""
        return sorted((o for o in self.ranges if o.segment == one.segment and o.start >= one.start), key=_start)

    def _is_whole(self, one: NaiveRange) -> bool:
        return [o for o in self.ranges if o.segment == one.segment] == [one]

    def _fit(self, nbytes: int, is_small: bool, stream: int) -> NaiveRange | None:
        fitting = [one for one in self._free(is_small, stream) if one.nbytes >= nbytes]
        if not fitting:
            return None
        best = fitting[0]
        if self.settings.expandable_segments:
            for other in fitting[1:]:
                if self._room(other) >= self._room(best):
                    break
                best = other
        most = self.settings.max_split_bytes
        if most is not None and nbytes < most <= best.nbytes:
            return None
        if most is not None and nbytes >= most and best.nbytes - nbytes >= self.settings.max_non_split_rounding_bytes:
            return None
        return best

    def _room(self, one: NaiveRange) -> int:
        return one.nbytes + sum(o.nbytes for o in self._neighbours(one)[1:2] if o.state == "unmapped")

    def _grow(self, nbytes: int, is_small: bool, stream: int) -> NaiveRange | None:
        allowed, size = self._allowed(), segment_size(nbytes, self.settings)
        if allowed is not None and self.reserved_bytes + size > allowed:
            return None
        if self.settings.expandable_segments:
            return self._grow_pages(nbytes, is_small, stream)
        if self.reserved_bytes + size > self.capacity_bytes:
            return None
        one = self._new(size, is_small, stream)
        self._note("segment_alloc", one)
        return one

    def _grow_pages(self, nbytes: int, is_small: bool, stream: int) -> NaiveRange | None:
        at = self._lowest_start(nbytes, is_small, stream)
        if at is None:
            space = self.capacity_bytes + self.capacity_bytes // 8
            one = self._new(multiple_above(space, page_size(is_small, self.settings)), is_small, stream)
            one.state, at = "unmapped", one.start
        while True:
            (one,) = [o for o in self.ranges if o.start == at]
            if one.state == "free" and one.nbytes >= nbytes:
                return one
            missing = nbytes - (one.nbytes if one.state == "free" else 0)
            bare = one if one.state == "unmapped" else self._neighbours(one)[1]
            mapped = multiple_above(min(missing, bare.nbytes), page_size(is_small, self.settings))
            if mapped == 0 or self.reserved_bytes + mapped > self.capacity_bytes:
                return None
            if mapped < bare.nbytes:
                self._cut(bare, bare.start + mapped, "unmapped")
            bare.state, bare.born = "free", self._searches[is_small]
            self._note("segment_map", bare)
            self._join()
            at = next(o.start for o in self.ranges if o.start <= at < o.stop)

    def _lowest_start(self, nbytes: int, is_small: bool, stream: int) -> int | None:
        """Return where free and unmapped ranges, with an unmapped one first or second, run on for ``nbytes``."""
        pool = [o for o in self.ranges if o.is_small == is_small and o.stream == stream]
        for bare in sorted((o for o in pool if o.state == "unmapped"), key=_start):
            in_front = [o for o in pool if o.segment == bare.segment and o.stop == bare.start and o.state == "free"]
            first = (in_front or [bare])[0]
            room = 0
            for one in self._neighbours(first):
                if one.state == "used":
                    break
                room += one.nbytes
            if room >= nbytes:
                return first.start
        return None

    def _release_oversize(self, nbytes: int, is_small: bool, stream: int) -> bool:
        least = self.settings.max_split_bytes
        if least is None or self.settings.expandable_segments:
            return False
        wanted = max(least, nbytes)
        free = self._free(is_small, stream)
        enough = [one for one in free if one.nbytes >= wanted]
        if enough:
            self._drop(enough[0])
            return True
        released = 0
        for one in reversed(free):
            if released < wanted and one.nbytes >= least:
                released += one.nbytes
                self._drop(one)
        return released >= wanted

    def _collect(self) -> None:
        allowed = self._allowed()
        assert allowed is not None
        most = int(self.settings.garbage_collection_threshold * allowed)
        whole = [] if self.settings.expandable_segments else [one for one in self._free(False) if self._is_whole(one)]
        while self.reserved_bytes > most and whole:
            ages = {id(one): self._searches[False] - one.born for one in whole}
            old = [one for one in whole if ages[id(one)] * len(whole) >= sum(ages.values())]
            for one in old:
                self._drop(one)
            whole = [one for one in whole if one not in old]

    def _new(self, nbytes: int, is_small: bool, stream: int) -> NaiveRange:
        start = self._edge - nbytes if self.settings.segment_addresses == "descending" else self._edge
        self._edge = start if self.settings.segment_addresses == "descending" else start + nbytes
        one = NaiveRange(segment=start, start=start, stop=start + nbytes, stream=stream, is_small=is_small)
        self.ranges.append(one)
        return one

    def _cut(self, one: NaiveRange, at: int, state: Literal["free", "unmapped"]) -> NaiveRange:
        """Shorten a range and return the rest, in a state of its own."""
        rest = NaiveRange(
            segment=one.segment, start=at, stop=one.stop, stream=one.stream, is_small=one.is_small, state=state,
            born=self._searches[one.is_small],
        )  # fmt: skip
        one.stop = at
        self.ranges.append(rest)
        return rest

    def _drop(self, one: NaiveRange) -> None:
        self.segment_events.append(SegmentEvent("segment_free", one.nbytes, one.stream, one.start))
        self.ranges.remove(one)

    def _note(self, action: Literal["segment_alloc", "segment_map"], one: NaiveRange) -> None:
        self.segment_events.append(SegmentEvent(action, one.nbytes, one.stream, one.start))
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _join(self) -> None:
        """Make one range of neighbours in the same state, unless in use."""
        joined: list[NaiveRange] = []
        for one in sorted(self.ranges, key=_start):
            last = joined[-1] if joined else None
            if last is not None and last.segment == one.segment and last.state == one.state != "used":
                last.stop, last.born = one.stop, max(last.born, one.born)
            else:
                joined.append(one)
        self.ranges = joined


def _start(one: NaiveRange) -> int:
    return one.start
