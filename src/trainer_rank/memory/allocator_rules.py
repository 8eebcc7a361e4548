"""Sizes, settings and records of the model of the CUDA caching allocator.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp``; each function names the one it follows.
``docs/allocator.md`` lists them all, with what is not modelled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from trainer_rank.units import MIB, format_bytes

ROUNDING: Final = 512
"""``kMinBlockSize``: sizes are multiples of it, and the least remainder that the small pool splits off."""
SMALL_BYTES: Final = MIB
"""``kSmallSize``: the largest size of the small pool, and the remainder that the large pool must exceed to split."""
SMALL_SEGMENT: Final = 2 * MIB
"""``kSmallBuffer``: segment and page of the small pool."""
_LARGE_FROM: Final = 10 * MIB  # kMinLargeAlloc: from here on a segment is no larger than the request, but for rounding
_ROUND_LARGE: Final = 2 * MIB  # kRoundLarge
_NUM_INTERVALS: Final = 16  # intervals of roundup_power2_divisions: 1 MiB, 2 MiB, ... 32 GiB


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorSettings:
    """What ``PYTORCH_ALLOC_CONF`` and ``set_per_process_memory_fraction`` set; the defaults are those of PyTorch.

    Attributes:
        roundup_power2_divisions: Divisions of each power of two that sizes are rounded up to: none, one number for all
            sizes, or 16, for sizes from 1 MiB, 2 MiB, ... 32 GiB on (smaller and larger ones take the nearest).
        large_segment_bytes: Segment for sizes between 1 and 10 MiB, and page of the expandable large pool.
        max_split_bytes: Blocks of this size or more are never split; None means no limit.
        max_non_split_rounding_bytes: An oversize block serves a request that is smaller by less than this.
        expandable_segments: Whether segments grow by mapping pages.
        memory_fraction: Part of the device that may be reserved; None means that no fraction was set.
        garbage_collection_threshold: Part of what the fraction allows above which old blocks are returned before a new
            segment is taken; 0 means never. Does nothing without a fraction.
        segment_addresses: Where a new segment lies, which decides among free blocks of equal size: the one at the
            lowest address is taken. The driver hands addresses out downwards, so later segments lie lower.
    """

    roundup_power2_divisions: tuple[int, ...] = ()
    large_segment_bytes: int = 20 * MIB
    max_split_bytes: int | None = None
    max_non_split_rounding_bytes: int = 20 * MIB
    expandable_segments: bool = False
    memory_fraction: float | None = None
    garbage_collection_threshold: float = 0.0
    segment_addresses: Literal["descending", "ascending"] = "descending"

    def __post_init__(self) -> None:
        divisions = self.roundup_power2_divisions
        if len(divisions) not in (0, 1, _NUM_INTERVALS) or any(n < 1 or n & (n - 1) for n in divisions):
            raise ValueError(f"roundup_power2_divisions must be 0, 1 or 16 powers of two, got {divisions!r}")
        if self.large_segment_bytes < _LARGE_FROM or self.large_segment_bytes % _ROUND_LARGE:
            raise ValueError(
                "large_segment_bytes must be a multiple of 2 MiB and at least 10 MiB, "
                f"got {format_bytes(self.large_segment_bytes)}"
            )
        if self.max_split_bytes is not None and self.max_split_bytes < self.large_segment_bytes:
            raise ValueError(
                f"max_split_bytes must be at least large_segment_bytes ({format_bytes(self.large_segment_bytes)}), "
                f"got {format_bytes(self.max_split_bytes)}"
            )
        if self.memory_fraction is not None and not 0 <= self.memory_fraction <= 1:
            raise ValueError(f"memory_fraction must lie between 0 and 1, got {self.memory_fraction}")
        if not 0 <= self.garbage_collection_threshold < 1:
            raise ValueError(
                f"garbage_collection_threshold must be at least 0 and below 1, got {self.garbage_collection_threshold}"
            )

    @property
    def collects_garbage(self) -> bool:
        """Whether old blocks are returned before a new segment is taken."""
        return self.memory_fraction is not None and self.garbage_collection_threshold > 0

    def is_oversize(self, nbytes: int) -> bool:
        """Return whether a block of this size is never split."""
        return self.max_split_bytes is not None and nbytes >= self.max_split_bytes


class SegmentEvent(NamedTuple):
    """One call to the driver, under the name that a recorded history gives it."""

    action: Literal["segment_alloc", "segment_free", "segment_map", "segment_unmap"]
    nbytes: int
    stream: int
    address: int


class AllocatorOutOfMemoryError(MemoryError):
    """The modelled device has no room, also after cached blocks were released.

    Attributes:
        wanted_bytes: The request, rounded.
        free_bytes: Bytes of the device that no segment holds.
        reserved_bytes: Bytes of all segments, after the release.
        allocated_bytes: Bytes of all blocks in use.
        allowed_bytes: What the memory fraction allows to reserve; None without a fraction.
    """

    def __init__(
        self,
        *,
        wanted_bytes: int,
        free_bytes: int,
        reserved_bytes: int,
        allocated_bytes: int,
        allowed_bytes: int | None = None,
    ) -> None:
        allowed = "" if allowed_bytes is None else f"{format_bytes(allowed_bytes)} allowed, "
        super().__init__(
            f"tried to allocate {format_bytes(wanted_bytes)}: {format_bytes(free_bytes)} free on the device, {allowed}"
            f"{format_bytes(reserved_bytes)} reserved, {format_bytes(allocated_bytes)} of it in use"
        )
        self.wanted_bytes = wanted_bytes
        self.free_bytes = free_bytes
        self.reserved_bytes = reserved_bytes
        self.allocated_bytes = allocated_bytes
        self.allowed_bytes = allowed_bytes


def multiple_above(nbytes: int, unit: int) -> int:
    """Return the least multiple of ``unit`` that is not less than ``nbytes``."""
    return -(-nbytes // unit) * unit


def rounded_size(nbytes: int, settings: AllocatorSettings) -> int:
    """Return the size of the block that a request is given (``round_size``, ``roundup_power2_next_division``)."""
    divisions = _divisions(nbytes, settings.roundup_power2_divisions)
    if nbytes >= ROUNDING and divisions > 1 and nbytes > ROUNDING * divisions:
        power = 1 << (nbytes.bit_length() - 1)
        return multiple_above(nbytes, power // divisions)
    return max(ROUNDING, multiple_above(nbytes, ROUNDING))


def _divisions(nbytes: int, divisions: tuple[int, ...]) -> int:
    if len(divisions) < _NUM_INTERVALS:
        return divisions[0] if divisions else 0
    interval = nbytes.bit_length() - MIB.bit_length()
    return divisions[min(max(interval, 0), _NUM_INTERVALS - 1)]


def segment_size(nbytes: int, settings: AllocatorSettings) -> int:
    """Return the size of a new segment for a rounded request (``get_allocation_size``)."""
    if nbytes <= SMALL_BYTES:
        return SMALL_SEGMENT
    return settings.large_segment_bytes if nbytes < _LARGE_FROM else multiple_above(nbytes, _ROUND_LARGE)


def page_size(is_small: bool, settings: AllocatorSettings) -> int:
    """Return the unit in which expandable segments grow (``find_expandable_block``)."""
    return SMALL_SEGMENT if is_small else settings.large_segment_bytes


def splits(block_bytes: int, nbytes: int, is_small: bool, settings: AllocatorSettings) -> bool:
    """Return whether what a request leaves of a block becomes a block of its own (``should_split``)."""
    left = block_bytes - nbytes
    if is_small or settings.expandable_segments:
        return left >= ROUNDING
    return not settings.is_oversize(nbytes) and left > SMALL_BYTES
