"""Snapshots of the CUDA allocator: read safely, replayed on the model, the first difference named."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from trainer_rank.errors import SnapshotError, TrainerRankError
from trainer_rank.memory import (
    AllocatorSettings,
    CachingAllocator,
    SnapshotCheck,
    check_history,
    check_snapshot,
    load_snapshot,
    parse_snapshot,
)
from trainer_rank.units import MIB

A, B, C = 0x7F0000000000, 0x7E0000000000, 0x7D0000000000


def entry(action: str, size: int, addr: int = A, **more: Any) -> dict[str, Any]:
    """Return an entry of ``device_traces`` as ``_snapshot`` documents it."""
    place = {"device_free": 0} if action == "oom" else {"addr": addr}
    return {"action": action, "size": size, "stream": 0, "frames": [], "pool_id": (0, 0), "time_us": 1, **place, **more}


def snapshot(*entries: dict[str, Any]) -> dict[str, Any]:
    segment = {"device": 0, "address": A, "total_size": 20 * MIB, "stream": 0, "segment_type": "large", "blocks": []}
    return {"segments": [segment], "device_traces": [list(entries)], "allocator_settings": {"max_split_size": -1}}


def checked(*entries: dict[str, Any], capacity: int = 1024 * MIB, **settings: Any) -> SnapshotCheck:
    (history,) = parse_snapshot(snapshot(*entries)).histories
    return check_history(history, CachingAllocator(capacity, AllocatorSettings(**settings)))


ORDINARY = (
    entry("segment_alloc", 20 * MIB, A),
    entry("alloc", 5 * MIB, A),
    entry("alloc", 5 * MIB + 3, A + 5 * MIB),
    entry("free_requested", 5 * MIB, A),
    entry("free_completed", 5 * MIB, A),
    entry("segment_alloc", 2 * MIB, B),
    entry("alloc", 12, B),
    entry("alloc", 4 * MIB, A),
    entry("snapshot", 0, 0),
)


def test_an_ordinary_history_agrees() -> None:
    """The same segments in the same order, and the same peak."""
    check = checked(*ORDINARY)
    assert check.agrees
    assert check.first_difference is None
    assert check.recorded == check.modelled == (("segment_alloc", 20 * MIB, 0), ("segment_alloc", 2 * MIB, 0))
    assert check.recorded_peak_reserved_bytes == check.modelled_peak_reserved_bytes == 22 * MIB
    assert check.modelled_peak_allocated_bytes == 10 * MIB + 2 * 512  # 4 MiB get a block of 5: 1 MiB is not split off
    assert check.num_unknown_frees == 0


def test_a_file_is_read_as_dumped(tmp_path: Path) -> None:
    """Every protocol of pickle; sizes of segments are summed by device."""
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        path = tmp_path / f"{protocol}.pickle"
        path.write_bytes(pickle.dumps(snapshot(*ORDINARY), protocol=protocol))
        loaded = load_snapshot(path)
        assert loaded == parse_snapshot(snapshot(*ORDINARY))
        assert loaded.segment_bytes == {0: 20 * MIB}


def test_the_first_difference_is_named() -> None:
    """The device took 4 MiB where the model takes 20 MiB, at entry 1; later ones are not reported."""
    check = checked(entry("segment_alloc", 4 * MIB), entry("alloc", 3 * MIB), entry("segment_alloc", 6 * MIB, B))
    assert not check.agrees
    assert check.first_difference == (
        f"entry 1 (alloc of {3 * MIB} bytes), call 0 to the driver: "
        f"recorded segment_alloc of {4 * MIB} bytes on stream 0, modelled segment_alloc of {20 * MIB} bytes on stream 0"
    )


def test_a_segment_the_model_does_not_take_is_a_difference() -> None:
    """Also at the end, where no request follows."""
    check = checked(*ORDINARY, entry("segment_alloc", 30 * MIB, C))
    assert (
        check.first_difference
        == f"call 2 to the driver: recorded segment_alloc of {30 * MIB} bytes on stream 0, modelled none"
    )


def test_a_caller_who_empties_the_cache_is_followed() -> None:
    """Segments given back while there is room for more were given back on purpose."""
    check = checked(
        entry("segment_alloc", 30 * MIB), entry("alloc", 30 * MIB), entry("free_completed", 30 * MIB),
        entry("segment_free", 30 * MIB), entry("segment_alloc", 40 * MIB, B), entry("alloc", 40 * MIB, B),
        entry("free_completed", 40 * MIB, B), entry("segment_free", 40 * MIB, B),
    )  # fmt: skip
    assert check.first_difference is None
    assert check.recorded_peak_reserved_bytes == 40 * MIB


def test_a_release_by_a_request_is_the_request_s_own() -> None:
    """Without room, the model releases and tries again by itself; it runs out of memory where the device did."""
    history = (
        entry("segment_alloc", 60 * MIB), entry("alloc", 60 * MIB), entry("free_completed", 60 * MIB),
        entry("segment_free", 60 * MIB), entry("segment_alloc", 70 * MIB, B), entry("alloc", 70 * MIB, B),
        entry("oom", 50 * MIB),
    )  # fmt: skip
    assert checked(*history, capacity=100 * MIB).first_difference is None
    assert checked(*history, capacity=200 * MIB).first_difference == (
        f"entry 6: the device ran out of memory for {50 * MIB} bytes, the model did not"
    )
    assert "the model had not" in str(checked(*history, capacity=65 * MIB).first_difference)


def test_expandable_histories_agree() -> None:
    """Pages are mapped and unmapped in place of segments."""
    check = checked(
        entry("segment_map", 20 * MIB), entry("alloc", 5 * MIB), entry("segment_map", 20 * MIB, A + 20 * MIB),
        entry("alloc", 25 * MIB, A + 5 * MIB), entry("free_completed", 25 * MIB, A + 5 * MIB),
        entry("segment_unmap", 20 * MIB, A + 20 * MIB),
        expandable_segments=True,
    )  # fmt: skip
    assert check.first_difference is None


def test_blocks_from_before_the_history_are_counted() -> None:
    """Their frees are passed over."""
    assert checked(entry("free_completed", MIB)).num_unknown_frees == 1


def test_an_allocator_with_a_past_is_refused() -> None:
    """The history would begin in the middle."""
    used = CachingAllocator(1024 * MIB)
    used.allocate(1)
    with pytest.raises(ValueError, match="nothing has happened to yet"):
        check_history((), used)


def held(addr: int, total: int, *live: tuple[int, int], kind: str = "large") -> dict[str, Any]:
    """Return an entry of ``segments``: what is not live is free."""
    blocks, at = [], addr
    for start, size in live:
        if start > at:
            blocks.append({"size": start - at, "state": "inactive"})
        blocks.append({"size": size, "state": "active_allocated"})
        at = start + size
    if at < addr + total:
        blocks.append({"size": addr + total - at, "state": "inactive"})
    return {
        "device": 0, "address": addr, "total_size": total, "stream": 0, "segment_type": kind, "blocks": blocks,
    }  # fmt: skip


def rewound(*entries: dict[str, Any], segments: list[dict[str, Any]], capacity: int = 1024 * MIB) -> SnapshotCheck:
    snapshot = parse_snapshot({"segments": segments, "device_traces": [list(entries)]})
    return check_snapshot(snapshot, CachingAllocator(capacity))


def test_a_history_begins_with_what_was_there() -> None:
    """5 of 20 MiB are older and freed on the way, 4 older and kept; 3 lie where the 5 were, 12 in a new segment."""
    check = rewound(
        entry("free_completed", 5 * MIB - 100, A), entry("alloc", 3 * MIB, A), entry("segment_alloc", 12 * MIB, B),
        entry("alloc", 12 * MIB, B),
        segments=[held(A, 20 * MIB, (A, 3 * MIB), (A + 5 * MIB, 4 * MIB)), held(B, 12 * MIB, (B, 12 * MIB))],
    )  # fmt: skip
    assert check.first_difference is None
    assert (check.num_placed, check.num_unknown_frees) == (2, 0)
    assert check.recorded_peak_reserved_bytes == check.modelled_peak_reserved_bytes == 32 * MIB
    assert check.modelled_peak_allocated_bytes == 19 * MIB


def test_segments_given_back_on_the_way_were_there() -> None:
    """They were empty; the small pool's are those of 2 MiB."""
    check = rewound(
        entry("segment_free", 30 * MIB, B), entry("segment_free", 2 * MIB, C), entry("alloc", 9, A + 512),
        segments=[held(A, 2 * MIB, (A, 512), (A + 512, 512), kind="small")],
    )  # fmt: skip
    assert (check.first_difference, check.num_placed) == (None, 1)
    assert check.recorded_peak_reserved_bytes == check.modelled_peak_reserved_bytes == 34 * MIB


def test_an_allocation_at_another_address_is_the_first_difference() -> None:
    """The device took the larger of two free blocks; nothing after it is compared."""
    check = rewound(
        entry("alloc", 3 * MIB, A + 10 * MIB), entry("alloc", 1, A + 19 * MIB),
        segments=[held(A, 20 * MIB, (A + 4 * MIB, 6 * MIB), (A + 10 * MIB, 3 * MIB))],
    )  # fmt: skip
    assert (check.num_placed, check.agrees) == (0, False)
    assert check.first_difference == (
        f"entry 0 (alloc of {3 * MIB} bytes): recorded at {A + 10 * MIB:#x}, modelled at {A:#x}"
    )


@pytest.mark.parametrize(
    ("entries", "segments", "message"),
    [
        ([entry("segment_alloc", 20 * MIB, B)], [held(A, 20 * MIB)], r"takes a segment at 0x7e\w+ that is never"),
        ([entry("segment_map", 20 * MIB, A)], [held(A, 20 * MIB)], "expandable segments cannot be rewound"),
        ([entry("free_completed", 512, B)], [held(A, 20 * MIB)], r"block at 0x7e\w+ is older than the history"),
    ],
)
def test_what_cannot_be_rewound_is_refused(
    entries: list[dict[str, Any]], segments: list[dict[str, Any]], message: str
) -> None:
    """A history that was cut off does not lead to what the snapshot holds."""
    with pytest.raises(SnapshotError, match=message):
        rewound(*entries, segments=segments)


def test_a_device_that_was_not_recorded_is_refused() -> None:
    """By number."""
    with pytest.raises(ValueError, match="device must be one of the 1 recorded, got 1"):
        check_snapshot(parse_snapshot(snapshot()), CachingAllocator(1), device=1)


class Malicious:
    """Unpickles as a call."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return Path.touch, ("never",)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_that_calls_something_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: int
) -> None:
    """The error names what it asked for, and nothing was run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.pickle").write_bytes(pickle.dumps({"segments": [Malicious()]}, protocol=protocol))
    with pytest.raises(SnapshotError, match=r"bad\.pickle: the pickle asks for \S+; a snapshot holds plain data only"):
        load_snapshot("bad.pickle")
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (b"cos\nsystem\n(S'true'\ntR.", "os.system"),
        (b"cbuiltins\neval\n(S'1'\ntR.", "builtins.eval"),
        (b"Pkey\n.", "key"),
    ],
)
def test_hand_made_opcodes_are_refused(tmp_path: Path, content: bytes, name: str) -> None:
    """By name of the global, or of the object outside."""
    (tmp_path / "bad.pickle").write_bytes(content)
    with pytest.raises(SnapshotError, match=name):
        load_snapshot(tmp_path / "bad.pickle")


def test_every_truncation_is_an_error(tmp_path: Path) -> None:
    """Wherever the file ends, it says so and nothing else goes wrong."""
    whole = pickle.dumps(snapshot(*ORDINARY[:2]))
    path = tmp_path / "cut.pickle"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(SnapshotError, match=r"cut\.pickle: not a whole pickle"):
            load_snapshot(path)
    assert len(whole) > 100


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "snapshot: needs 'segments', a list"),
        ({"segments": []}, "snapshot: needs 'device_traces', a list"),
        ({"segments": [{}], "device_traces": []}, r"segments\[0\]: needs 'total_size'"),
        (
            {"segments": [{"total_size": 1, "address": 0}], "device_traces": []},
            r"segments\[0\]: needs 'blocks', a list",
        ),
        (
            {"segments": [{"total_size": 1, "address": 0, "blocks": [{"size": 1}]}], "device_traces": []},
            r"segments\[0\]\.blocks\[0\]: needs a 'state'",
        ),
        (
            {"segments": [held(A, 512, (A, 1024))], "device_traces": []},
            r"segments\[0\]\.blocks\[0\]: lies outside its segment",
        ),
        ({"segments": [], "device_traces": [3]}, r"device_traces\[0\] must be a list, got int"),
        (snapshot({"size": 1}), r"device_traces\[0\]\[0\]: needs an 'action'"),
        (snapshot(entry("alloc", -1)), r"needs 'size', an integer that is not negative, got -1"),
        (snapshot(entry("alloc", 1, True)), r"needs 'addr', an integer that is not negative, got True"),
        (
            snapshot(entry("alloc", 1, pool_id=(0, 1))),
            r"alloc in private pool \(0, 1\); private pools are not modelled",
        ),
    ],
)
def test_malformed_data_is_named(data: object, message: str) -> None:
    """The place, the field and what it holds."""
    with pytest.raises(SnapshotError, match=message) as caught:
        parse_snapshot(data)
    assert isinstance(caught.value, TrainerRankError | ValueError)
