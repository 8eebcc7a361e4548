"""The allocator model against its twin, a plain list of ranges."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

from hypothesis import example, given, settings
from hypothesis import strategies as st

from trainer_rank.memory import check_snapshot, parse_snapshot
from trainer_rank.memory.allocator import CachingAllocator
from trainer_rank.memory.allocator_naive import NaiveAllocator
from trainer_rank.memory.allocator_rules import AllocatorOutOfMemoryError, AllocatorSettings, rounded_size
from trainer_rank.units import KIB, MIB


class Step(NamedTuple):
    """Allocate bytes on a stream; free the pick-th live block (0 bytes); or release the cache (-1)."""

    nbytes: int
    stream: int = 0
    pick: int = 0


sizes = st.one_of(
    st.integers(1, 4 * KIB),
    st.sampled_from([512, MIB - 512, MIB, MIB + 1, 9 * MIB, 10 * MIB, 20 * MIB, 21 * MIB]),
    st.integers(1, 40).map(lambda n: n * 256 * KIB),
    st.integers(10, 120).map(lambda n: n * MIB),
)
steps = st.lists(
    st.one_of(
        st.builds(Step, sizes, st.integers(0, 1)),
        st.builds(Step, sizes, st.just(0)),
        st.builds(Step, st.just(0), st.just(0), st.integers(0, 100)),
        st.builds(Step, st.just(0), st.just(0), st.integers(0, 100)),
        st.just(Step(-1)),
    ),
    max_size=40,
)
rules = st.builds(
    AllocatorSettings,
    roundup_power2_divisions=st.sampled_from([(), (4,), (8, 8, 4, 4, *(1,) * 12)]),
    max_split_bytes=st.sampled_from([None, None, 20 * MIB, 40 * MIB]),
    max_non_split_rounding_bytes=st.sampled_from([2 * MIB, 20 * MIB]),
    expandable_segments=st.booleans(),
    memory_fraction=st.sampled_from([None, 0.5, 1.0]),
    garbage_collection_threshold=st.sampled_from([0.0, 0.3, 0.8]),
    segment_addresses=st.sampled_from(["descending", "ascending"]),
)
capacities = st.sampled_from([1, 30 * MIB, 150 * MIB, 400 * MIB, 10_000 * MIB])


def attempt(action: Callable[[], int]) -> tuple[int, str]:
    """Return the handle, or 0 and the numbers of the out-of-memory error."""
    try:
        return action(), ""
    except AllocatorOutOfMemoryError as error:
        return 0, str((error.wanted_bytes, error.free_bytes, error.reserved_bytes, error.allocated_bytes))


def counters(allocator: CachingAllocator | NaiveAllocator) -> tuple[int, ...]:
    return (
        allocator.allocated_bytes, allocator.reserved_bytes, allocator.peak_allocated_bytes,
        allocator.peak_reserved_bytes, allocator.num_alloc_retries, allocator.largest_free_block_bytes,
    )  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(capacities, rules, steps)
def test_placements_and_counters_equal_those_of_the_twin(
    capacity: int, chosen: AllocatorSettings, script: list[Step]
) -> None:
    """Every address, size, call to the driver, counter and error is the same after every step."""
    fast, naive = CachingAllocator(capacity, chosen), NaiveAllocator(capacity, chosen)
    live: list[int] = []
    for step in script:
        if step.nbytes > 0:
            handle, error = attempt(lambda step=step: fast.allocate(step.nbytes, step.stream))  # type: ignore[misc]
            assert attempt(lambda step=step: naive.allocate(step.nbytes, step.stream)) == (handle, error)  # type: ignore[misc]
            live += [handle] if handle else []
        elif step.nbytes < 0:
            fast.release_cached()
            naive.release_cached()
        elif live:
            handle = live.pop(step.pick % len(live))
            fast.free(handle)
            naive.free(handle)
        assert [fast.block_of(one) for one in live] == [naive.block_of(one) for one in live]
        assert counters(fast) == counters(naive)
        assert fast.segment_events == naive.segment_events
        check_ranges(naive)


def check_ranges(naive: NaiveAllocator) -> None:
    """No two ranges overlap, and no two neighbours of one segment are both free or both without memory."""
    ordered = sorted(naive.ranges, key=lambda one: one.start)
    for one, other in itertools.pairwise(ordered):
        assert one.stop <= other.start
        assert one.segment != other.segment or one.state == "used" or one.state != other.state


@settings(max_examples=200, deadline=None)
@given(capacities, rules, steps)
def test_bytes_are_conserved(capacity: int, chosen: AllocatorSettings, script: list[Step]) -> None:
    """In use <= reserved <= capacity; live blocks never overlap and hold what was asked; the end returns everything."""
    allocator = CachingAllocator(capacity, chosen)
    live: dict[int, int] = {}
    for step in script:
        if step.nbytes > 0:
            handle, _ = attempt(lambda step=step: allocator.allocate(step.nbytes, step.stream))  # type: ignore[misc]
            if handle:
                live[handle] = step.nbytes
        elif step.nbytes < 0:
            allocator.release_cached()
        elif live:
            handle = sorted(live)[step.pick % len(live)]
            del live[handle]
            allocator.free(handle)
        blocks = sorted(allocator.block_of(handle) for handle in live)
        assert all(start + size <= other for (start, size), (other, _) in itertools.pairwise(blocks))
        assert all(allocator.block_of(handle)[1] >= rounded_size(live[handle], chosen) for handle in live)
        assert sum(size for _, size in blocks) == allocator.allocated_bytes
        assert allocator.allocated_bytes <= allocator.reserved_bytes <= capacity
        signs = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
        assert sum(signs[event.action] * event.nbytes for event in allocator.segment_events) == allocator.reserved_bytes
    for handle in live:
        allocator.free(handle)
    allocator.release_cached()
    assert (allocator.allocated_bytes, allocator.reserved_bytes, allocator.largest_free_block_bytes) == (0, 0, 0)


class Recording:
    """A device played by the twin, recorded as torch records one, from some step on."""

    def __init__(self, capacity: int) -> None:
        self.naive = NaiveAllocator(capacity, AllocatorSettings())
        self.trace: list[dict[str, Any]] | None = None
        self.live: dict[int, tuple[int, int, bool]] = {}
        self._seen = 0

    def begin(self) -> None:
        """Record from here on."""
        self.trace, self._seen = [], len(self.naive.segment_events)

    def step(self, step: Step) -> None:
        """Do a step and note what torch would. A block with a tail of older date is not freed: its size is lost."""
        if step.nbytes > 0:
            handle, error = attempt(lambda: self.naive.allocate(step.nbytes, step.stream))
            self._note_calls()
            address = 0 if error else self.naive.block_of(handle)[0]
            self._note("oom" if error else "alloc", step.nbytes, step.stream, address)
            if not error:
                exact = self.naive.block_of(handle)[1] == rounded_size(step.nbytes, self.naive.settings)
                self.live[handle] = (step.nbytes, step.stream, exact or self.trace is not None)
        elif step.nbytes < 0:
            self.naive.release_cached()
            self._note_calls()
        else:
            handles = [one for one, (_, _, is_known) in self.live.items() if is_known or self.trace is None]
            if handles:
                handle = handles[step.pick % len(handles)]
                nbytes, stream, _ = self.live.pop(handle)
                address = self.naive.block_of(handle)[0]
                self.naive.free(handle)
                self._note("free_completed", nbytes, stream, address)

    def snapshot(self) -> dict[str, Any]:
        """Return it as ``torch.cuda.memory._snapshot`` does."""
        segments = []
        ordered = sorted(self.naive.ranges, key=lambda one: one.start)
        for base, group in itertools.groupby(ordered, key=lambda one: one.segment):
            ranges = list(group)
            states = {"used": "active_allocated", "free": "inactive"}
            blocks = [{"size": one.nbytes, "address": one.start, "state": states[one.state]} for one in ranges]
            segments.append(
                {
                    "device": 0, "address": base, "total_size": sum(one.nbytes for one in ranges),
                    "stream": ranges[0].stream, "segment_type": "small" if ranges[0].is_small else "large",
                    "blocks": blocks,
                }
            )  # fmt: skip
        return {"segments": segments, "device_traces": [self.trace]}

    def _note_calls(self) -> None:
        for event in self.naive.segment_events[self._seen :]:
            self._note(event.action, event.nbytes, event.stream, event.address)
        self._seen = len(self.naive.segment_events)

    def _note(self, action: str, size: int, stream: int, address: int) -> None:
        if self.trace is not None:
            self.trace.append({"action": action, "size": size, "stream": stream, "addr": address})


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([150 * MIB, 400 * MIB, 10_000 * MIB]), steps, steps)
@example(150 * MIB, [], [Step(75 * MIB), Step(0), Step(-1), Step(75 * MIB)])
def test_a_history_recorded_from_some_step_on_is_replayed_to_the_address(
    capacity: int, before: list[Step], during: list[Step]
) -> None:
    """What was there before is rewound from what is there in the end; every allocation then lies where it lay."""
    device = Recording(capacity)
    for step in before:
        device.step(step)
    device.begin()
    for step in during:
        device.step(step)
    found = device.snapshot()
    check = check_snapshot(parse_snapshot(found), CachingAllocator(capacity))
    assert check.first_difference is None
    placed = sum(entry["action"] == "alloc" for entry in found["device_traces"][0])
    assert check.num_placed == placed
    assert check.modelled_peak_reserved_bytes == check.recorded_peak_reserved_bytes
