"""Each rule of the CUDA caching allocator by an example."""

from __future__ import annotations

from typing import Any

import pytest

from trainer_rank.memory import (
    AllocatorOutOfMemoryError,
    AllocatorSettings,
    CachingAllocator,
    Event,
    Mark,
    ReplayedPeak,
    Trace,
    replay,
)
from trainer_rank.memory.allocator_rules import rounded_size, segment_size
from trainer_rank.units import GIB, KIB, MIB


def allocator(capacity_bytes: int = GIB, **settings: Any) -> CachingAllocator:
    return CachingAllocator(capacity_bytes, AllocatorSettings(**settings))


def calls(one: CachingAllocator) -> list[tuple[str, int]]:
    """Return the calls to the driver, sizes in MiB."""
    return [(event.action.removeprefix("segment_"), event.nbytes // MIB) for event in one.segment_events]


@pytest.mark.parametrize(
    ("wanted", "rounded"),
    [(1, 512), (512, 512), (513, 1024), (1024, 1024), (MIB - 1, MIB), (3 * MIB + 1, 3 * MIB + 512)],
)
def test_sizes_are_multiples_of_512(wanted: int, rounded: int) -> None:
    """At least one unit, else the next multiple."""
    assert rounded_size(wanted, AllocatorSettings()) == rounded


@pytest.mark.parametrize(
    ("wanted", "rounded"),
    [
        (2048, 2048),
        (2049, 2560),
        (5 * MIB - 1, 5 * MIB),
        (4 * MIB, 4 * MIB),
        (5 * MIB + 1, 6 * MIB),
        (7 * MIB + 1, 8 * MIB),
    ],
)
def test_four_divisions_of_a_power_of_two(wanted: int, rounded: int) -> None:
    """Between 4 and 8 MiB they are 1 MiB apart; up to 512 bytes times four, the plain rule holds."""
    assert rounded_size(wanted, AllocatorSettings(roundup_power2_divisions=(4,))) == rounded


def test_divisions_by_size_interval() -> None:
    """The first entry counts from 1 MiB on and below, the second from 2 MiB, the last for all that is larger."""
    settings = AllocatorSettings(roundup_power2_divisions=(2, 4, *(1,) * 13, 8))
    wanted = [600 * KIB + 1, MIB + 1, 2 * MIB + 1, 4 * MIB + 1, 64 * GIB + 1]
    rounded = [768 * KIB, MIB + 512 * KIB, 2 * MIB + 512 * KIB, 4 * MIB + 512, 72 * GIB]
    assert [rounded_size(size, settings) for size in wanted] == rounded


@pytest.mark.parametrize(
    ("wanted", "segment"),
    [(512, 2), (MIB, 2), (MIB + 512, 20), (10 * MIB - 512, 20), (10 * MIB, 10), (10 * MIB + 512, 12), (33 * MIB, 34)],
)
def test_segments(wanted: int, segment: int) -> None:
    """2 MiB, 20 MiB, or the next multiple of 2 MiB."""
    assert segment_size(wanted, AllocatorSettings()) == segment * MIB


def test_the_small_pool_splits_off_512_bytes_and_the_large_more_than_one_mebibyte() -> None:
    """A large block keeps a remainder of exactly 1 MiB: it is allocated, not free."""
    small = allocator()
    small.allocate(MIB)
    small.allocate(MIB - 512)
    assert (small.reserved_bytes, small.allocated_bytes, small.largest_free_block_bytes) == (
        2 * MIB,
        2 * MIB - 512,
        512,
    )
    large = allocator()
    large.allocate(9 * MIB)
    large.allocate(10 * MIB)
    assert (large.reserved_bytes, large.allocated_bytes, large.largest_free_block_bytes) == (20 * MIB, 20 * MIB, 0)


def test_small_and_large_requests_do_not_share() -> None:
    """The rest of a 20 MiB segment serves no small request."""
    one = allocator()
    one.allocate(2 * MIB)
    one.allocate(512)
    assert calls(one) == [("alloc", 20), ("alloc", 2)]


def test_streams_do_not_share() -> None:
    """A free block of another stream is not seen."""
    one = allocator()
    one.free(one.allocate(2 * MIB, stream=1))
    one.allocate(2 * MIB, stream=2)
    assert calls(one) == [("alloc", 20), ("alloc", 20)]


def test_best_fit_is_the_smallest() -> None:
    """Of free blocks of 40 and 30 MiB, a request for 29 MiB takes the smaller."""
    one = allocator()
    large, small = one.allocate(40 * MIB), one.allocate(30 * MIB)
    address = one.block_of(small)[0]
    one.free(large)
    one.free(small)
    assert one.block_of(one.allocate(29 * MIB)) == (address, 30 * MIB)


@pytest.mark.parametrize(("order", "taken"), [("descending", 1), ("ascending", 0)])
def test_of_equal_blocks_the_lowest_address_is_taken(order: str, taken: int) -> None:
    """Which is that of the later segment where addresses descend."""
    one = allocator(segment_addresses=order)
    handles = [one.allocate(30 * MIB), one.allocate(30 * MIB)]
    addresses = [one.block_of(handle)[0] for handle in handles]
    for handle in handles:
        one.free(handle)
    assert one.block_of(one.allocate(30 * MIB))[0] == addresses[taken]


def test_free_neighbours_become_one() -> None:
    """Three blocks freed in any order make one that serves what none of them could."""
    one = allocator()
    handles = [one.allocate(5 * MIB) for _ in range(4)]
    for place in (0, 2, 1):
        one.free(handles[place])
    assert one.largest_free_block_bytes == 15 * MIB
    one.allocate(15 * MIB)
    assert one.reserved_bytes == 20 * MIB


def test_cached_memory_is_released_once_and_the_request_tried_again() -> None:
    """60 of 100 MiB are cached; 70 MiB fit only after their release."""
    one = allocator(100 * MIB)
    one.free(one.allocate(60 * MIB))
    one.allocate(70 * MIB)
    assert (one.num_alloc_retries, one.reserved_bytes, one.peak_reserved_bytes) == (1, 70 * MIB, 70 * MIB)
    assert calls(one) == [("alloc", 60), ("free", 60), ("alloc", 70)]


def test_out_of_memory_tells_the_numbers() -> None:
    """A split segment cannot be released: 15 MiB of it are free and of no use."""
    one = allocator(100 * MIB)
    one.allocate(5 * MIB)
    with pytest.raises(AllocatorOutOfMemoryError, match=r"tried to allocate 81\.0 MiB: 80\.0 MiB free") as caught:
        one.allocate(81 * MIB)
    error = caught.value
    assert (error.wanted_bytes, error.free_bytes) == (81 * MIB, 80 * MIB)
    assert (error.reserved_bytes, error.allocated_bytes, error.allowed_bytes) == (20 * MIB, 5 * MIB, None)
    assert one.num_alloc_retries == 1


def test_a_memory_fraction_limits_what_is_reserved() -> None:
    """Half of 100 MiB: 40 are granted, 20 more are not."""
    one = allocator(100 * MIB, memory_fraction=0.5)
    one.allocate(40 * MIB)
    with pytest.raises(AllocatorOutOfMemoryError, match=r"50\.0 MiB allowed"):
        one.allocate(2 * MIB)


def test_garbage_collection_releases_the_old_before_a_new_segment() -> None:
    """Of two cached segments the one not put back for longer goes; the fraction alone would have allowed all three."""
    one = allocator(200 * MIB, memory_fraction=1.0, garbage_collection_threshold=0.4)
    first, second = one.allocate(40 * MIB), one.allocate(60 * MIB)
    one.free(first)
    one.free(one.allocate(2 * MIB, stream=1))
    one.free(second)
    one.allocate(70 * MIB)
    assert calls(one) == [("alloc", 40), ("alloc", 60), ("free", 40), ("alloc", 20), ("alloc", 70)]
    assert one.num_alloc_retries == 0


def test_oversize_blocks_are_neither_split_nor_given_to_smaller_requests() -> None:
    """With max_split 40 MiB, a cached block of 60 MiB serves 41 MiB whole, 40 MiB not at all, 30 MiB not at all."""
    one = allocator(max_split_bytes=40 * MIB)
    cached = one.allocate(60 * MIB)
    one.free(cached)
    assert one.block_of(one.allocate(41 * MIB))[1] == 60 * MIB
    other = allocator(max_split_bytes=40 * MIB)
    other.free(other.allocate(60 * MIB))
    other.allocate(40 * MIB)
    other.allocate(30 * MIB)
    assert calls(other) == [("alloc", 60), ("alloc", 40), ("alloc", 30)]


def test_oversize_blocks_are_released_first_and_only_as_many_as_needed() -> None:
    """A full device gives back one oversize block of two, without a retry."""
    one = allocator(150 * MIB, max_split_bytes=40 * MIB)
    for handle in [one.allocate(70 * MIB), one.allocate(80 * MIB)]:
        one.free(handle)
    one.allocate(45 * MIB)
    assert calls(one) == [("alloc", 70), ("alloc", 80), ("free", 70), ("alloc", 46)]
    assert one.num_alloc_retries == 0


def test_expandable_segments_map_only_what_is_missing() -> None:
    """15 of 20 MiB free at the end: 25 MiB need one page more, and lie where the free bytes began."""
    one = allocator(expandable_segments=True)
    first = one.allocate(5 * MIB)
    second = one.allocate(25 * MIB)
    assert calls(one) == [("map", 20), ("map", 20)]
    assert one.block_of(second)[0] == one.block_of(first)[0] + 5 * MIB
    assert one.largest_free_block_bytes == 10 * MIB


def test_expandable_segments_split_off_512_bytes_in_the_large_pool_too() -> None:
    """Nothing is stranded in a block."""
    one = allocator(expandable_segments=True)
    one.allocate(20 * MIB - 512)
    assert (one.allocated_bytes, one.largest_free_block_bytes) == (20 * MIB - 512, 512)


def test_whole_free_pages_are_unmapped() -> None:
    """Of free bytes 5 to 65 MiB the pages from 20 to 60 go; the gap is filled again first."""
    one = allocator(expandable_segments=True)
    one.allocate(5 * MIB)
    middle = one.allocate(60 * MIB)
    one.allocate(15 * MIB)
    one.free(middle)
    one.release_cached()
    assert calls(one) == [("map", 20), ("map", 60), ("unmap", 40)]
    assert one.block_of(one.allocate(60 * MIB))[1] == 60 * MIB
    assert calls(one)[3:] == [("map", 40)]


def test_peaks_are_reset_to_the_present() -> None:
    """What was before counts no longer; what is live does."""
    one = allocator()
    one.free(one.allocate(100 * MIB))
    one.release_cached()
    one.allocate(30 * MIB)
    one.reset_peaks()
    assert (one.peak_allocated_bytes, one.peak_reserved_bytes) == (30 * MIB, 30 * MIB)


def test_replay_gives_the_peaks_of_a_trace() -> None:
    """The rest of a 20 MiB segment, 11 MiB, serves 10 MiB unsplit; storages from before the trace are passed over."""
    before, after = (Event(9 * MIB, 1),), (Event(-9 * MIB, 1), Event(3 * MIB, 3))
    steps = (*before, Mark("forward"), Event(10 * MIB, 2), Event(-7, 99), *after)
    peak = replay(Trace(steps=steps, num_layers=1), allocator())
    assert peak == ReplayedPeak(reserved_bytes=20 * MIB, allocated_bytes=20 * MIB, largest_block_bytes=11 * MIB)


def test_replay_refuses_a_storage_that_is_live_twice() -> None:
    """The second appearance is a fault of the trace."""
    with pytest.raises(ValueError, match="storage 1 appeared while it was live"):
        replay(Trace(steps=(Event(1, 1), Event(1, 1)), num_layers=1), allocator())


def test_a_handle_is_freed_once() -> None:
    """Also one that never was is refused."""
    one = allocator()
    handle = one.allocate(1)
    one.free(handle)
    with pytest.raises(ValueError, match=f"handle {handle} names no block in use"):
        one.free(handle)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"roundup_power2_divisions": (3,)}, "powers of two"),
        ({"roundup_power2_divisions": (2, 2)}, "powers of two"),
        ({"large_segment_bytes": 21 * MIB}, "multiple of 2 MiB"),
        ({"max_split_bytes": 19 * MIB}, "at least large_segment_bytes"),
        ({"memory_fraction": 1.5}, "between 0 and 1"),
        ({"garbage_collection_threshold": 1.0}, "below 1"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], message: str) -> None:
    """Each names the field and the rule."""
    with pytest.raises(ValueError, match=message):
        AllocatorSettings(**settings)


def test_sizes_must_be_positive() -> None:
    """PyTorch allocates nothing for nothing, and a device without memory is none."""
    with pytest.raises(ValueError, match="size_bytes must be positive, got 0"):
        allocator().allocate(0)
    with pytest.raises(ValueError, match="capacity_bytes must be positive, got 0"):
        CachingAllocator(0)
