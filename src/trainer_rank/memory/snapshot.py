"""Recorded histories of the CUDA allocator, as files hold them. ``snapshot_check`` replays them.

``torch.cuda.memory._dump_snapshot`` pickles what ``_record_memory_history`` recorded. ``load_snapshot`` reads it
without torch and without running anything: a pickle that asks for anything but plain data is refused.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from trainer_rank.errors import SnapshotError

TAKES: Final = ("segment_alloc", "segment_map")
GIVES: Final = ("segment_free", "segment_unmap")
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


class HeldSegment(NamedTuple):
    """A segment when the snapshot was taken, with the sizes of its live blocks by address."""

    device: int
    address: int
    nbytes: int
    stream: int
    is_small: bool
    live: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What a snapshot file says.

    Attributes:
        histories: The recorded actions, one tuple per device.
        segments: What the allocator held when the snapshot was taken, after the last action.
    """

    histories: tuple[tuple[HistoryEntry, ...], ...]
    segments: tuple[HeldSegment, ...]

    @property
    def segment_bytes(self) -> dict[int, int]:
        """Bytes of all segments by device."""
        found: dict[int, int] = {}
        for segment in self.segments:
            found[segment.device] = found.get(segment.device, 0) + segment.nbytes
        return found


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
    held = _list(data, "segments", "snapshot")
    segments = tuple(_segment(one, f"segments[{place}]") for place, one in enumerate(held))
    histories = []
    for device, trace in enumerate(_list(data, "device_traces", "snapshot")):
        if not isinstance(trace, list | tuple):
            raise SnapshotError(f"device_traces[{device}] must be a list, got {type(trace).__name__}")
        entries = (_entry(one, f"device_traces[{device}][{place}]") for place, one in enumerate(trace))
        histories.append(tuple(entries))
    return Snapshot(histories=tuple(histories), segments=segments)


def _segment(data: object, where: str) -> HeldSegment:
    nbytes = _int(data, "total_size", where)
    address = end = _int(data, "address", where)
    live: dict[int, int] = {}
    for place, block in enumerate(_list(data, "blocks", where)):
        state = block.get("state") if isinstance(block, dict) else None
        if not isinstance(state, str):
            raise SnapshotError(f"{where}.blocks[{place}]: needs a 'state' that is a string, got {state!r}")
        # Files from before blocks carried their addresses list them in order.
        start, size = _int(block, "address", where, default=end), _int(block, "size", f"{where}.blocks[{place}]")
        if start < end or start + size > address + nbytes:
            raise SnapshotError(f"{where}.blocks[{place}]: lies outside its segment or over the block before it")
        end = start + size
        if state != "inactive":
            live[start] = size
    kind = data.get("segment_type", "large") if isinstance(data, dict) else None
    return HeldSegment(
        device=_int(data, "device", where, default=0), address=address, nbytes=nbytes,
        stream=_int(data, "stream", where, default=0), is_small=kind == "small", live=live,
    )  # fmt: skip


def _entry(data: object, where: str) -> HistoryEntry:
    action = data.get("action") if isinstance(data, dict) else None
    if not isinstance(action, str):
        raise SnapshotError(f"{where}: needs an 'action' that is a string, got {action!r}")
    pool = data.get("pool_id", (0, 0)) if isinstance(data, dict) else (0, 0)
    if action not in _CALLER + TAKES + GIVES:
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
