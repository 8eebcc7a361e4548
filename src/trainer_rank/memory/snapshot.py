"""Recorded histories of the CUDA allocator, and the check that the allocator model takes the same segments.

``torch.cuda.memory._dump_snapshot`` pickles what ``_record_memory_history`` recorded. ``load_snapshot`` reads it
without torch and without running anything: a pickle that asks for anything but plain data is refused.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from trainer_rank.errors import SnapshotError
from trainer_rank.memory.allocator import CachingAllocator
from trainer_rank.memory.allocator_rules import AllocatorOutOfMemoryError

_TAKES: Final = ("segment_alloc", "segment_map")
_GIVES: Final = ("segment_free", "segment_unmap")
_CALLER: Final = ("alloc", "free_completed", "oom")
_BAD_PICKLE: Final = (
    pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, IndexError, KeyError, OverflowError,
    MemoryError, RecursionError,
)  # fmt: skip


class HistoryEntry(NamedTuple):
    """One action of the allocator; an ``oom`` has no address."""

    action: str
    nbytes: int
    stream: int
    address: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What a snapshot file says.

    Attributes:
        histories: The recorded actions, one tuple per device.
        segment_bytes: Bytes of all segments when the snapshot was taken, by device.
    """

    histories: tuple[tuple[HistoryEntry, ...], ...]
    segment_bytes: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotCheck:
    """A recorded history beside its replay on the model.

    Attributes:
        recorded, modelled: Calls to the driver, as (action, bytes, stream), in order. Addresses are not compared.
        recorded_peak_reserved_bytes: Most bytes of the recorded segments.
        modelled_peak_reserved_bytes: Most bytes of the modelled ones.
        modelled_peak_allocated_bytes: Most bytes in blocks in use; a recorded history does not tell.
        num_unknown_frees: Blocks freed that the history did not see allocated. The model starts empty, so agreement
            can only be expected when this is 0.
        first_difference: Where the two part, in words; None when they agree throughout.
    """

    recorded: tuple[tuple[str, int, int], ...]
    modelled: tuple[tuple[str, int, int], ...]
    recorded_peak_reserved_bytes: int
    modelled_peak_reserved_bytes: int
    modelled_peak_allocated_bytes: int
    num_unknown_frees: int
    first_difference: str | None

    @property
    def agrees(self) -> bool:
        """Whether the model made the recorded calls and no others, and ran out of memory where the device did."""
        return self.first_difference is None


class _PlainUnpickler(pickle.Unpickler):
    """Builds plain containers, strings and numbers; nothing is imported and nothing is called."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        raise SnapshotError(f"the pickle asks for {module_name}.{global_name}; a snapshot holds plain data only")

    def persistent_load(self, pid: Any, /) -> Any:
        raise SnapshotError(
            f"the pickle refers to an object outside itself ({pid!r}); a snapshot holds plain data only"
        )


def load_snapshot(path: Path | str) -> Snapshot:
    """Return what a file written by ``torch.cuda.memory._dump_snapshot`` says.

    Raises:
        SnapshotError: The pickle is cut off, asks for anything but plain data, or does not have the snapshot's fields.
        OSError: The file cannot be read.
    """
    with Path(path).open("rb") as file:
        try:
            data = _PlainUnpickler(file).load()
        except SnapshotError as error:
            raise SnapshotError(f"{path}: {error}") from None
        except _BAD_PICKLE as error:
            raise SnapshotError(f"{path}: not a whole pickle: {error}") from error
    try:
        return parse_snapshot(data)
    except SnapshotError as error:
        raise SnapshotError(f"{path}: {error}") from None


def parse_snapshot(data: object) -> Snapshot:
    """Return the snapshot in the dictionary that ``torch.cuda.memory._snapshot`` returns.

    Raises:
        SnapshotError: A field is missing or has another type; the message names it.
    """
    segment_bytes: dict[int, int] = {}
    for place, segment in enumerate(_list(data, "segments", "snapshot")):
        device = _int(segment, "device", f"segments[{place}]", default=0)
        size = _int(segment, "total_size", f"segments[{place}]")
        segment_bytes[device] = segment_bytes.get(device, 0) + size
    histories = []
    for device, trace in enumerate(_list(data, "device_traces", "snapshot")):
        if not isinstance(trace, list | tuple):
            raise SnapshotError(f"device_traces[{device}] must be a list, got {type(trace).__name__}")
        entries = (_entry(one, f"device_traces[{device}][{place}]") for place, one in enumerate(trace))
        histories.append(tuple(entries))
    return Snapshot(histories=tuple(histories), segment_bytes=segment_bytes)


def check_history(history: Sequence[HistoryEntry], allocator: CachingAllocator) -> SnapshotCheck:
    """Replay a recorded history on an empty allocator and return where the two part.

    A block counts as free from its ``free_completed`` on. Segments given back right before a new one belong to the
    request that needs it, if the model has no room for that one; all others mean that the caller emptied the cache.
    """
    if allocator.segment_events or allocator.allocated_bytes:
        raise ValueError("a history is replayed on an allocator that nothing has happened to yet")
    run = _Replay(allocator=allocator)
    for place, entry in enumerate(history):
        run.step(place, entry, history)
    modelled = tuple((one.action, one.nbytes, one.stream) for one in allocator.segment_events)
    recorded = tuple((one.action, one.nbytes, one.stream) for one in history if one.action in _TAKES + _GIVES)
    reserved = peak = 0
    for action, nbytes, _ in recorded:
        reserved += nbytes if action in _TAKES else -nbytes
        peak = max(peak, reserved)
    return SnapshotCheck(
        recorded=recorded,
        modelled=modelled,
        recorded_peak_reserved_bytes=peak,
        modelled_peak_reserved_bytes=allocator.peak_reserved_bytes,
        modelled_peak_allocated_bytes=allocator.peak_allocated_bytes,
        num_unknown_frees=run.num_unknown_frees,
        first_difference=run.difference or _length_difference(recorded, modelled),
    )


@dataclass(slots=True, kw_only=True)
class _Replay:
    """One replay: live handles by recorded address, and the first difference seen."""

    allocator: CachingAllocator
    num_unknown_frees: int = 0
    difference: str | None = None
    handles: dict[int, int] = field(default_factory=dict)
    compared: int = 0
    seen: list[tuple[str, int, int]] = field(default_factory=list)
    is_releasing: bool = False

    def step(self, place: int, entry: HistoryEntry, history: Sequence[HistoryEntry]) -> None:
        """Do what one entry says; the driver's calls are only noted, until a caller's action has followed."""
        if entry.action in _TAKES + _GIVES:
            self.seen.append((entry.action, entry.nbytes, entry.stream))
            if entry.action in _GIVES and not self.is_releasing and self._by_caller(place, history):
                self.allocator.release_cached()
            self.is_releasing = entry.action in _GIVES
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

    def _by_caller(self, place: int, history: Sequence[HistoryEntry]) -> bool:
        """Return whether the release that begins here was asked for, rather than made by a request."""
        following = next((one for one in history[place:] if one.action not in _GIVES), None)
        if following is None or following.action not in (*_TAKES, "oom"):
            return True
        if self.allocator.settings.collects_garbage:
            return False
        allowed = self.allocator.allowed_bytes
        room = self.allocator.free_bytes if allowed is None else allowed - self.allocator.reserved_bytes
        return following.action in _TAKES and following.nbytes <= min(room, self.allocator.free_bytes)

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


def _entry(data: object, where: str) -> HistoryEntry:
    action = data.get("action") if isinstance(data, dict) else None
    if not isinstance(action, str):
        raise SnapshotError(f"{where}: needs an 'action' that is a string, got {action!r}")
    pool = data.get("pool_id", (0, 0)) if isinstance(data, dict) else (0, 0)
    if action not in _CALLER + _TAKES + _GIVES:
        return HistoryEntry(action, 0, 0)
    if pool not in ((0, 0), [0, 0]):
        raise SnapshotError(f"{where}: {action} in private pool {pool!r}; private pools are not modelled")
    address = 0 if action == "oom" else _int(data, "addr", where)
    return HistoryEntry(action, _int(data, "size", where), _int(data, "stream", where, default=0), address)


def _list(data: object, key: str, where: str) -> Sequence[object]:
    value = data.get(key) if isinstance(data, dict) else None
    if not isinstance(value, list | tuple):
        raise SnapshotError(f"{where}: needs {key!r}, a list, got {type(value).__name__}")
    return value


def _int(data: object, key: str, where: str, *, default: int | None = None) -> int:
    value = data.get(key, default) if isinstance(data, dict) else None
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise SnapshotError(f"{where}: needs {key!r}, an integer that is not negative, got {value!r}")
    return value
