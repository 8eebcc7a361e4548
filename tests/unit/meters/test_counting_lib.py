"""Building the counting allocator: once per machine, by one process, with a clear error when it cannot be."""

from __future__ import annotations

import stat
import threading
from pathlib import Path

import pytest

from trainer_rank.meters.counting_lib import AllocatorBuildError, build, cache_folder, find_compiler


def test_a_second_build_uses_the_first(tmp_path: Path) -> None:
    """The library is made once; the second call only finds it."""
    first = build(tmp_path, find_compiler())
    made = first.stat().st_mtime_ns
    assert build(tmp_path, find_compiler()) == first
    assert first.stat().st_mtime_ns == made
    assert sorted(path.suffix for path in tmp_path.iterdir()) == ["", ".so"]


def test_builds_at_once_agree(tmp_path: Path) -> None:
    """Three builders wait for each other and return one library."""
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(build(tmp_path, find_compiler()))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    assert len(set(found)) == 1
    assert len(list(tmp_path.glob("*.so"))) == 1


def test_another_compiler_builds_its_own(tmp_path: Path) -> None:
    """The compiler's command is part of the name."""
    plain = build(tmp_path, find_compiler())
    assert build(tmp_path, [*find_compiler(), "-O1"]) != plain


def test_the_cache_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """XDG_CACHE_HOME decides, then the home folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "trainer-rank" / "meters"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "trainer-rank" / "meters"


def test_no_compiler_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says what was looked for and what to do."""
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(AllocatorBuildError, match=r"looked for c\+\+, g\+\+, clang\+\+ on PATH\); install g\+\+"):
        find_compiler()


def test_a_named_compiler_is_not_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A CXX that does not exist is the user's mistake to see."""
    monkeypatch.setenv("CXX", str(tmp_path / "nothing"))
    with pytest.raises(AllocatorBuildError, match="looked for CXX="):
        find_compiler()


def test_a_failing_compiler_is_quoted(tmp_path: Path) -> None:
    """What the compiler said reaches the user, and no half-written library stays."""
    compiler = tmp_path / "cxx"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "disk on fire" >&2\nexit 1\n')
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    with pytest.raises(AllocatorBuildError, match="failed: disk on fire"):
        build(tmp_path / "cache", [str(compiler)])
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["lock"]


def test_an_unusable_cache_names_the_setting(tmp_path: Path) -> None:
    """A file where the folder should be."""
    (tmp_path / "taken").write_text("")
    with pytest.raises(AllocatorBuildError, match="set XDG_CACHE_HOME"):
        build(tmp_path / "taken", find_compiler())
