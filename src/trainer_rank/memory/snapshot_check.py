"""Replays recorded histories of the CUDA allocator on its model and says where the two part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from trainer_rank.errors import SnapshotError
from trainer_rank.memory.allocator import CachingAllocator
from trainer_rank.memory.allocator_rules import (
    ROUNDING,
    SMALL_BYTES,
    SMALL_SEGMENT,
    AllocatorOutOfMemoryError,
    multiple_above,
)
from trainer_rank.memory.snapshot import GIVES, TAKES, HeldSegment, HistoryEntry, Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotCheck:
    """A recorded history beside its replay on the model.

    Attributes:
        recorded, modelled: Calls to the driver, as (action, bytes, stream), in order.
        recorded_peak_reserved_bytes: Most bytes of the recorded segments.
        modelled_peak_reserved_bytes: Most bytes of the modelled ones.
        modelled_peak_allocated_bytes: Most bytes in blocks in use; a recorded history does not tell.
        num_placed: Allocations that lie where they were recorded; 0 where addresses are not compared.
        num_unknown_frees: Blocks freed that the history did not see allocated. The model starts empty, so agreement
            can only be expected when this is 0.
        first_difference: Where the two part, in words; None when they agree throughout.
    """

    recorded: tuple[tuple[str, int, int], ...]
    modelled: tuple[tuple[str, int, int], ...]
    recorded_peak_reserved_bytes: int
    modelled_peak_reserved_bytes: int
    modelled_peak_allocated_bytes: int
    num_placed: int
    num_unknown_frees: int
    first_difference: str | None

    @property
    def agrees(self) -> bool:
        """Whether the model made the recorded calls and no others, and ran out of memory where the device did."""
        return self.first_difference is None


def check_history(history: Sequence[HistoryEntry], allocator: CachingAllocator) -> SnapshotCheck:
    """Replay a history recorded from the start of its process on an empty allocator and return where the two part.

    A block counts as free from its ``free_completed`` on. Segments given back right before a new one belong to the
    request that needs it, if the model has neither room nor a cached block for that one; all others mean that the
    caller emptied the cache.
    Addresses are not compared.
    """
    _check_unused(allocator)
    run = _Replay(allocator=allocator)
    for place, entry in enumerate(history):
        run.step(place, entry, history)
    return _checked(run, history, 0)


def check_snapshot(snapshot: Snapshot, allocator: CachingAllocator, device: int = 0) -> SnapshotCheck:
    """Replay a device's history on an empty allocator that first takes over what was there when it began.

    That follows from what the snapshot holds, rewound. Segments get the addresses recorded for them, so each
    allocation is compared by address. The replay ends at the first difference.

    Raises:
        SnapshotError: The history does not lead to the segments (it was cut off), or maps expandable segments, which
            cannot be rewound.
    """
    _check_unused(allocator)
    if not 0 <= device < len(snapshot.histories):
        raise ValueError(f"device must be one of the {len(snapshot.histories)} recorded, got {device}")
    history = snapshot.histories[device]
    run = _Replay(allocator=allocator, compares_addresses=True)
    begun = _rewound(history, [one for one in snapshot.segments if one.device == device])
    for one in begun:
        run.handles |= allocator.adopt(one.address, one.nbytes, one.live, is_small=one.is_small, stream=one.stream)
    for place, entry in enumerate(history):
        run.step(place, entry, history)
        if run.difference is not None:
            break
    return _checked(run, history, sum(one.nbytes for one in begun))


def _rewound(history: Sequence[HistoryEntry], held: Sequence[HeldSegment]) -> list[HeldSegment]:
    """Return the segments that were there before a history that ended with ``held``."""
    segments = {one.address: one for one in held}
    for entry in reversed(history):
        if entry.action in ("segment_map", "segment_unmap"):
            raise SnapshotError("a history of expandable segments cannot be rewound; record it from the start")
        if entry.action == "segment_alloc" and segments.pop(entry.address, None) is None:
            raise SnapshotError(f"the history takes a segment at {entry.address:#x} that is never given back nor held")
        if entry.action == "segment_free":
            # Only the small pool has segments of that size.
            small = entry.nbytes == SMALL_SEGMENT
            segments[entry.address] = HeldSegment(0, entry.address, entry.nbytes, entry.stream, small, {})
    old = _older_blocks(history, held)
    found = []
    for address, segment in sorted(segments.items()):
        live = {at: size for at, size in old.items() if address <= at < address + segment.nbytes}
        old = {at: size for at, size in old.items() if at not in live}
        found.append(segment._replace(live=_with_tails(segment, live)))
    if old:
        raise SnapshotError(
            f"a block at {min(old):#x} is older than the history and lies in no segment of its beginning"
        )
    return found


def _older_blocks(history: Sequence[HistoryEntry], held: Sequence[HeldSegment]) -> dict[int, int]:
    """Return sizes by address of the blocks allocated before a history: those it frees, and those still there."""
    new: set[int] = set()
    old: dict[int, int] = {}
    for entry in history:
        if entry.action == "alloc":
            new.add(entry.address)
        elif entry.action == "free_completed" and entry.address not in new:
            old[entry.address] = entry.nbytes
        elif entry.action == "free_completed":
            new.remove(entry.address)
    return old | {at: size for one in held for at, size in one.live.items() if at not in new}


def _with_tails(segment: HeldSegment, live: dict[int, int]) -> dict[int, int]:
    """Return live blocks at their full sizes: a history tells what was asked for.

    The small pool splits off whatever is left. In the large pool what is left up to ``SMALL_BYTES`` stays with the
    block, and no free block is that small; beside a free block that rule cannot tell the tail from its neighbour.
    """
    starts, found = sorted(live), {}
    for at, end in zip(starts, [*starts[1:], segment.address + segment.nbytes], strict=False):
        size = multiple_above(live[at], ROUNDING)
        found[at] = end - at if not segment.is_small and end - at - size <= SMALL_BYTES else size
    return found


def _check_unused(allocator: CachingAllocator) -> None:
    if allocator.segment_events or allocator.reserved_bytes:
        raise ValueError("a history is replayed on an allocator that nothing has happened to yet")


def _checked(run: _Replay, history: Sequence[HistoryEntry], begun_bytes: int) -> SnapshotCheck:
    allocator = run.allocator
    modelled = tuple((one.action, one.nbytes, one.stream) for one in allocator.segment_events)
    recorded = tuple((one.action, one.nbytes, one.stream) for one in history if one.action in TAKES + GIVES)
    reserved = peak = begun_bytes
    for action, nbytes, _ in recorded:
        reserved += nbytes if action in TAKES else -nbytes
        peak = max(peak, reserved)
    return SnapshotCheck(
        recorded=recorded,
        modelled=modelled,
        recorded_peak_reserved_bytes=peak,
        modelled_peak_reserved_bytes=allocator.peak_reserved_bytes,
        modelled_peak_allocated_bytes=allocator.peak_allocated_bytes,
        num_placed=run.num_placed,
        num_unknown_frees=run.num_unknown_frees,
        first_difference=run.difference or _length_difference(recorded, modelled),
    )


@dataclass(slots=True, kw_only=True)
class _Replay:
    """One replay: live handles by recorded address, and the first difference seen."""

    allocator: CachingAllocator
    compares_addresses: bool = False
    num_placed: int = 0
    num_unknown_frees: int = 0
    difference: str | None = None
    handles: dict[int, int] = field(default_factory=dict)
    compared: int = 0
    seen: list[tuple[str, int, int]] = field(default_factory=list)
    is_releasing: bool = False

    def step(self, place: int, entry: HistoryEntry, history: Sequence[HistoryEntry]) -> None:
        """Do what one entry says; the driver's calls are only noted, until a caller's action has followed."""
        if entry.action in TAKES + GIVES:
            self.seen.append((entry.action, entry.nbytes, entry.stream))
            if entry.action in TAKES and self.compares_addresses:
                self.allocator.coming_addresses.append(entry.address)
            if entry.action in GIVES and not self.is_releasing and self._by_caller(place, history):
                self.allocator.release_cached()
            self.is_releasing = entry.action in GIVES
            return
        self.is_releasing = False
        if entry.action == "free_completed":
            handle = self.handles.pop(entry.address, None)
            if handle is None:
                self.num_unknown_frees += 1
            else:
                self.allocator.free(handle)
        elif entry.action in ("alloc", "oom"):
            self._allocate(place, entry)
            self._compare(place, entry)

    def _allocate(self, place: int, entry: HistoryEntry) -> None:
        try:
            handle = self.allocator.allocate(entry.nbytes, entry.stream)
        except AllocatorOutOfMemoryError as error:
            if entry.action == "alloc":
                self._differ(
                    f"entry {place}: the device had room for {entry.nbytes} bytes, the model had not ({error})"
                )
            return
        if entry.action == "oom":
            self.allocator.free(handle)
            self._differ(f"entry {place}: the device ran out of memory for {entry.nbytes} bytes, the model did not")
        else:
            self.handles[entry.address] = handle
            if self.compares_addresses:
                self._compare_address(place, entry, self.allocator.block_of(handle)[0])

    def _compare_address(self, place: int, entry: HistoryEntry, address: int) -> None:
        if address == entry.address:
            self.num_placed += 1
        else:
            self._differ(
                f"entry {place} (alloc of {entry.nbytes} bytes): recorded at {entry.address:#x}, "
                f"modelled at {address:#x}"
            )

    def _by_caller(self, place: int, history: Sequence[HistoryEntry]) -> bool:
        """Return whether the release that begins here was asked for, rather than made by a request."""
        following = next((one for one in history[place:] if one.action not in GIVES), None)
        if following is None or following.action not in (*TAKES, "oom"):
            return True
        # A request that the cache could have served would have released nothing.
        request = next((one for one in history[place:] if one.action in ("alloc", "oom")), None)
        if request is not None and self.allocator.has_cached(request.nbytes, request.stream):
            return True
        if self.allocator.settings.collects_garbage:
            return False
        allowed = self.allocator.allowed_bytes
        room = self.allocator.free_bytes if allowed is None else allowed - self.allocator.reserved_bytes
        return following.action in TAKES and following.nbytes <= min(room, self.allocator.free_bytes)

    def _compare(self, place: int, entry: HistoryEntry) -> None:
        made = self.allocator.segment_events
        for number in range(self.compared, max(len(made), len(self.seen))):
            recorded = self.seen[number] if number < len(self.seen) else None
            modelled = made[number][:3] if number < len(made) else None
            if recorded != modelled:
                self._differ(
                    f"entry {place} ({entry.action} of {entry.nbytes} bytes), call {number} to the driver: "
                    f"recorded {_spelled(recorded)}, modelled {_spelled(modelled)}"
                )
        self.compared = max(len(made), len(self.seen))

    def _differ(self, difference: str) -> None:
        self.difference = self.difference or difference


def _length_difference(
    recorded: tuple[tuple[str, int, int], ...], modelled: tuple[tuple[str, int, int], ...]
) -> str | None:
    """Return where two sequences of calls first differ; what follows the last request is compared only here."""
    if recorded == modelled:
        return None
    number = next(
        (place for place, (one, other) in enumerate(zip(recorded, modelled, strict=False)) if one != other),
        min(len(recorded), len(modelled)),
    )
    one, other = recorded[number : number + 1], modelled[number : number + 1]
    return (
        f"call {number} to the driver: recorded {_spelled(one[0] if one else None)}, "
        f"modelled {_spelled(other[0] if other else None)}"
    )


def _spelled(call: tuple[str, int, int] | None) -> str:
    return "none" if call is None else f"{call[0]} of {call[1]} bytes on stream {call[2]}"
