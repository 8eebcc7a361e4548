"""A store that several processes share, that outlives damage, and that loses nothing."""

from __future__ import annotations

import json
import os
import random
import sqlite3
import subprocess
import sys
import time
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from trainer_rank.errors import StoreError
from trainer_rank.memory import Residual
from trainer_rank.memory.keep import KEPT
from trainer_rank.store import Entry, LearnedStore, database, default_path, digest_of
from trainer_rank.store.database import SCHEMA

HERE = {"model": {"family": "llama"}, "device": "cpu", "versions": {"torch": "2.13.0"}}
THERE = {**HERE, "device": "NVIDIA H200"}
SEEN = [[100, 400, 10_000, 12_000], [200, 300, 20_000, 20_000]]
PROFILE: dict[str, Any] = {"peak_rate": [459_782, 1], "retained_rate": None, "packed_rows": 700, "ratio": [7, 2]}


@pytest.fixture
def store(tmp_path: Path) -> LearnedStore:
    return LearnedStore(tmp_path / "data" / "learned.sqlite3")


def test_what_goes_in_comes_out(store: LearnedStore) -> None:
    """By environment and pricer; nothing is made by looking."""
    assert store.load(HERE, "envelope") == {}
    assert not store.path.exists()
    store.merge(HERE, "envelope", {"{}": SEEN})
    store.merge(HERE, "profile", {"{}": PROFILE})
    assert LearnedStore(store.path).load(HERE, "envelope") == {"{}": SEEN}
    assert store.load(HERE, "profile") == {"{}": PROFILE}


def test_another_device_or_version_is_kept_apart(store: LearnedStore) -> None:
    """Neither counts for the other, and neither is lost."""
    store.merge(HERE, "envelope", {"{}": SEEN})
    newer = {**HERE, "versions": {"torch": "2.14.0"}}
    for other in (THERE, newer):
        assert store.load(other, "envelope") == {}
        store.merge(other, "envelope", {"{}": SEEN[:1]})
    assert store.load(HERE, "envelope") == {"{}": SEEN}
    assert len(store.entries()) == 3


def test_what_two_processes_learned_is_put_together(store: LearnedStore) -> None:
    """Observations are joined, at most so many kept; of a profile the larger of each number."""
    store.merge(HERE, "envelope", {"{}": SEEN[:1]})
    store.merge(HERE, "envelope", {"{}": SEEN[1:], '{"a": 1}': SEEN})
    assert store.load(HERE, "envelope") == {"{}": SEEN, '{"a": 1}': SEEN}
    assert [one.observations for one in store.entries()] == [2, 2]
    for number in range(2 * KEPT):
        store.merge(HERE, "envelope", {"{}": [[100 + number, 500, 10_000, 10_001]]})
    kept = Residual.from_json(store.load(HERE, "envelope")["{}"])
    assert len(kept.seen) == KEPT
    assert kept.extra_bytes(100, 400, 10_000) >= 2000
    store.merge(HERE, "profile", {"{}": PROFILE})
    store.merge(HERE, "profile", {"{}": {**PROFILE, "peak_rate": [1, 1], "packed_rows": 900}})
    assert store.load(HERE, "profile")["{}"] == {**PROFILE, "packed_rows": 900}


WRITER = """
import sys
from pathlib import Path
from trainer_rank.store import LearnedStore
store = LearnedStore(Path(sys.argv[1]))
for number in range(25):
    store.merge({"device": "cpu"}, "profile", {'{"n": %d}' % number: {
        "peak_rate": [int(sys.argv[2]) + number, 1], "retained_rate": None, "packed_rows": number + 1,
        "ratio": [1, 1]}})
    store.merge({"device": "cpu"}, "envelope", {"{}": [[int(sys.argv[2]) + number, 1, 10, 9]]})
"""


def test_four_processes_write_one_store_and_nothing_is_lost(store: LearnedStore) -> None:
    """Every observation is counted, every maximum kept."""
    processes = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(store.path), str(1000 * number)], env=os.environ)
        for number in range(4)
    ]
    assert [one.wait(timeout=120) for one in processes] == [0, 0, 0, 0]
    profiles = store.load({"device": "cpu"}, "profile")
    assert len(profiles) == 25
    assert all(one["peak_rate"] == [3000 + number, 1] for number, one in enumerate(profiles.values()))
    (seen,) = (one for one in store.entries() if one.pricer == "envelope")
    assert seen.observations == 100


def test_news_that_are_none_leave_the_store_as_it_was(store: LearnedStore) -> None:
    """What was written of them before is not committed."""
    store.merge(HERE, "envelope", {"{}": SEEN})
    with pytest.raises(KeyError):
        store.merge(HERE, "unheard of", {"{}": SEEN})
    with pytest.raises(ValueError, match="an observation must be"):
        store.merge(HERE, "envelope", {"{}": [[3, 3, 3, 3]], '{"b": 2}': [[1, 2]]})
    assert store.load(HERE, "envelope") == {"{}": SEEN}


ENDLESS_WRITER = """
import itertools, sys
from pathlib import Path
from trainer_rank.store import LearnedStore
store = LearnedStore(Path(sys.argv[1]))
for number in itertools.count(1):
    store.merge({"device": "cpu"}, "envelope", {'{"a": 1}': [[number, 1, 10, 9]], '{"b": 1}': [[number, 1, 10, 9]]})
    print(number, flush=True)
"""


def test_a_process_that_is_killed_while_it_writes_leaves_whole_transactions(store: LearnedStore) -> None:
    """Two signatures are written at once: both know of every observation, or neither does."""
    for stop_after in (1, 7, 12):
        with subprocess.Popen(
            [sys.executable, "-c", ENDLESS_WRITER, str(store.path)], env=os.environ, stdout=subprocess.PIPE, text=True
        ) as writer:
            assert writer.stdout is not None
            for line in writer.stdout:
                if int(line) == stop_after:
                    writer.kill()
                    break
        first, second = (one.observations for one in store.entries())
        assert first == second >= stop_after


@pytest.mark.parametrize("seed", range(40))
def test_bytes_that_change_are_found_or_change_nothing(tmp_path: Path, filled: bytes, seed: int) -> None:
    """Cut off, or overwritten anywhere: nothing false is ever loaded, and the store goes on."""
    draw = random.Random(seed)
    content, at = bytearray(filled), draw.randrange(len(filled))
    if seed % 8 == 0:
        del content[at:]
    else:
        content[at : at + draw.choice([1, 16, 200])] = bytes(draw.randrange(256) for _ in range(16))
    store = LearnedStore(tmp_path / "learned.sqlite3")
    store.path.write_bytes(content)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = store.load(HERE, "envelope")
    if told:
        assert found == {}
        assert store.path.with_name(f"{store.path.name}.damaged-1").read_bytes() == content
    else:
        assert found == MANY
    store.merge(HERE, "envelope", {'{"new": 1}': SEEN})
    assert store.load(HERE, "envelope") == {**found, '{"new": 1}': SEEN}


MANY = {f'{{"n": {number}}}': [[100 + one, 400, 10_000, 12_000 + one] for one in range(15)] for number in range(30)}


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of a store that knows ``MANY``."""
    store = LearnedStore(tmp_path_factory.mktemp("filled") / "learned.sqlite3")
    store.merge(HERE, "envelope", MANY)
    store.close()
    return store.path.read_bytes()


def test_several_processes_that_meet_a_damaged_file_set_it_aside_once(store: LearnedStore) -> None:
    """None of them takes the new file of another for the damaged one."""
    store.path.parent.mkdir()
    store.path.write_bytes(b"not a database at all, " * 100)
    processes = [
        subprocess.Popen([sys.executable, "-W", "ignore", "-c", WRITER, str(store.path), "0"], env=os.environ)
        for _ in range(4)
    ]
    assert [one.wait(timeout=120) for one in processes] == [0, 0, 0, 0]
    assert [one.name for one in store.path.parent.glob("*damaged*")] == ["learned.sqlite3.damaged-1"]
    (seen,) = (one for one in store.entries() if one.pricer == "envelope")
    assert seen.observations == 100


def test_a_store_that_another_process_holds_is_named(store: LearnedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a while, with what to do; what it held is still there."""
    monkeypatch.setattr(database, "WAIT_SECONDS", 0.05)
    store.merge(HERE, "envelope", {"{}": SEEN})
    with closing(sqlite3.connect(store.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(
            StoreError, match=r"database is locked\); another process has held it .* end its transaction"
        ):
            store.merge(HERE, "envelope", {"{}": SEEN[:1]})
        # Who only reads waits for nobody.
        assert store.load(HERE, "envelope") == {"{}": SEEN}


@pytest.mark.parametrize("content", [b"not a database at all, " * 100, b"SQLite format 3\0" + b"\xff" * 5000])
def test_a_damaged_file_is_set_aside_and_named(store: LearnedStore, content: bytes) -> None:
    """It is never overwritten: what a user wants to recover is still there, twice over."""
    for number in (1, 2):
        store.close()
        store.path.parent.mkdir(exist_ok=True)
        store.path.write_bytes(content)
        with pytest.warns(RuntimeWarning, match=rf"is damaged .* it is now .*damaged-{number}, .* sqlite3 shell"):
            store.merge(HERE, "envelope", {"{}": SEEN})
        assert store.path.with_name(f"{store.path.name}.damaged-{number}").read_bytes() == content
        assert store.load(HERE, "envelope") == {"{}": SEEN}


def test_a_store_of_a_newer_schema_is_left_alone(store: LearnedStore) -> None:
    """Byte by byte; the message says what it is and what to do."""
    store.merge(HERE, "envelope", {"{}": SEEN})
    with sqlite3.connect(store.path) as connection:
        connection.execute(f"PRAGMA user_version = {SCHEMA + 1}")
    connection.close()
    store.close()
    before = store.path.read_bytes()
    for use in (store.entries, lambda: store.merge(HERE, "envelope", {"{}": SEEN}), lambda: store.forget("x")):
        with pytest.raises(StoreError, match=f"has schema {SCHEMA + 1}, .* update trainer-rank, or set XDG_DATA_HOME"):
            use()
    assert store.path.read_bytes() == before


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    """A file where the folder should be stands for a home that is read-only."""
    (tmp_path / "home").write_text("")
    store = LearnedStore(tmp_path / "home" / "learned.sqlite3")
    with pytest.raises(StoreError, match=r"learned.sqlite3 cannot be used .* make its folder writable, or set XDG"):
        store.merge(HERE, "envelope", {"{}": SEEN})


def test_a_path_that_cannot_be_looked_at_is_named(tmp_path: Path) -> None:
    """Reading fails in the same words as writing."""
    with pytest.raises(StoreError, match="cannot be used"):
        LearnedStore(tmp_path / ("x" * 300) / "learned.sqlite3").load(HERE, "envelope")


def test_a_clock_that_goes_backwards_changes_nothing_but_the_date(
    store: LearnedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Order is by sequence number."""
    for now, facts in ((2e9, HERE), (1e9, THERE), (-5.0, HERE)):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        store.merge(facts, "envelope", {"{}": SEEN})
    assert [(one.facts, one.written_at) for one in store.entries()] == [(HERE, -5.0), (THERE, 1e9)]
    assert store.load(HERE, "envelope") == {"{}": SEEN}


def test_entries_go_to_json_and_into_another_store(store: LearnedStore, tmp_path: Path) -> None:
    """Exported and imported they are what they were; imported twice as well."""
    store.merge(HERE, "envelope", {"{}": SEEN})
    store.merge(THERE, "profile", {"{}": PROFILE})
    other = LearnedStore(tmp_path / "other.sqlite3")
    entries = [Entry.from_json(json.loads(json.dumps(one.to_json()))) for one in store.entries()]
    for _ in range(2):
        other.add(entries)
        assert other.load(HERE, "envelope") == {"{}": SEEN}
        assert other.load(THERE, "profile") == {"{}": PROFILE}


@pytest.mark.parametrize(
    "wrong",
    [
        {"pricer": "x"},
        {"value": [[1]]},
        {"signature": "{"},
        {"facts": 3},
        {"observations": None},
        {"written_at": float("nan")},
    ],
)
def test_a_malformed_entry_is_refused(store: LearnedStore, wrong: dict[str, Any]) -> None:
    """Before anything is written."""
    store.merge(HERE, "envelope", {"{}": SEEN})
    (entry,) = store.entries()
    with pytest.raises(StoreError, match="an entry is malformed"):
        Entry.from_json({**entry.to_json(), **wrong})


def test_an_environment_or_a_signature_is_forgotten(store: LearnedStore) -> None:
    """And the others stay."""
    assert store.forget(digest_of(HERE)) == 0
    for facts in (HERE, THERE):
        store.merge(facts, "envelope", {"{}": SEEN, '{"a": 1}': SEEN})
    assert store.forget(digest_of(HERE), signature="{}") == 1
    assert store.forget(digest_of(THERE)) == 2
    assert [(one.facts, one.signature) for one in store.entries()] == [(HERE, '{"a": 1}')]


def test_the_user_s_own_store_is_in_the_data_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """XDG_DATA_HOME decides, then the home folder."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert default_path() == tmp_path / "trainer-rank" / "learned.sqlite3"
    monkeypatch.setenv("XDG_DATA_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    assert default_path() == tmp_path / "me" / ".local" / "share" / "trainer-rank" / "learned.sqlite3"
