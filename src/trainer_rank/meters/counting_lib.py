"""The counting allocator as a Python object: built once per machine with the system compiler, loaded once per process.

The library lands in a per-user cache, under a name made of everything it depends on, so a second process only loads it
and a new torch or compiler builds its own.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Final, final

from trainer_rank.errors import MeterError

_SOURCE: Final = Path(__file__).with_name("counting_allocator.cpp")
_HEADER: Final = Path(__file__).with_name("page_heap.h")
_COMPILERS: Final = ("c++", "g++", "clang++")
_FLAGS: Final = ("-O2", "-std=c++20", "-fPIC", "-shared", "-pthread")


class AllocatorBuildError(MeterError):
    """The counting allocator cannot be built or installed here; the message says why and what would help."""


@final
class CountingLibrary:
    """The functions of ``counting_allocator.cpp``. One per process: the allocator it controls is torch's own.

    Attributes:
        path: The shared library.
        owner: The meter whose cap is armed now, if any.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.owner: object | None = None
        try:
            self._dll = ctypes.CDLL(str(path))
        except OSError as error:
            raise AllocatorBuildError(
                f"{path} cannot be loaded ({error}); delete it so that it is built again"
            ) from error

    def install(self) -> None:
        """Make torch allocate CPU tensors here. Tensors that exist already keep their own allocator."""
        if self._call("install") != 1:
            raise AllocatorBuildError("another library has installed a CPU allocator of higher priority")

    def live_bytes(self) -> int:
        return self._call("live")

    def peak_bytes(self) -> int:
        return self._call("peak")

    def cached_bytes(self) -> int:
        return self._call("cached")

    def reserved_bytes(self) -> int:
        return self._call("reserved")

    def peak_reserved_bytes(self) -> int:
        return self._call("peak_reserved")

    def resident_bytes(self) -> int:
        """Return the bytes of the allocator's own memory that are really in memory: untouched pages do not count."""
        return self._call("resident")

    def failed_bytes(self) -> int:
        """Return the size of the last allocation refused; 0 when none was."""
        return self._call("failed_bytes")

    def failed_count(self) -> int:
        return self._call("failed_count")

    def reset_peak(self) -> None:
        self._call("reset_peak")

    def release_cached(self) -> None:
        self._call("release_cached")

    def set_cap(self, cap_bytes: int | None) -> None:
        """Bound live plus cached bytes from now on; None lifts the bound."""
        self._call("set_cap", -1 if cap_bytes is None else cap_bytes)

    def set_cache_limit(self, limit_bytes: int) -> None:
        self._call("set_cache_limit", limit_bytes)

    def set_huge_pages(self, enabled: bool) -> None:
        self._call("set_huge_pages", int(enabled))

    def _call(self, name: str, *values: int) -> int:
        function = self._dll[f"trainer_rank_{name}"]
        function.restype = ctypes.c_int64
        return int(function(*map(ctypes.c_int64, values)))


@cache
def load() -> CountingLibrary:
    """Return the process's counting allocator, built if this is its first use on the machine. Not installed yet.

    Raises:
        AllocatorBuildError: No compiler, or it failed; the message ends with what it said.
    """
    return CountingLibrary(build(cache_folder(), find_compiler()))


def cache_folder() -> Path:
    """Return the per-user folder for built libraries: below ``XDG_CACHE_HOME``, or ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "trainer-rank" / "meters"


def find_compiler() -> list[str]:
    """Return the C++ compiler as a command: what ``CXX`` names, else the first usual name on ``PATH``.

    Raises:
        AllocatorBuildError: There is none. A ``CXX`` that does not exist is not replaced by another.
    """
    wanted = shlex.split(os.environ.get("CXX", ""))
    for name in wanted[:1] or _COMPILERS:
        found = shutil.which(name)
        if found is not None:
            return [found, *wanted[1:]]
    looked = f"CXX={os.environ['CXX']!r}" if wanted else f"{', '.join(_COMPILERS)} on PATH"
    raise AllocatorBuildError(f"no C++ compiler found (looked for {looked}); install g++ or set CXX")


def build(folder: Path, compiler: list[str]) -> Path:
    """Return the shared library for this source, torch and compiler, building it in ``folder`` when it is missing.

    Processes that build at once wait for the first; a build that is killed leaves no half-written library.
    """
    import torch

    version = _run([*compiler, "--version"])
    source = _SOURCE.read_text() + _HEADER.read_text()
    parts = (source, torch.__version__, " ".join(compiler), version, " ".join(_FLAGS), platform.machine())
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
    target = folder / f"counting_allocator-{key}.so"
    if target.exists():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                _compile(
                    compiler, target, torch_folder=Path(torch.__file__).parent, abi=torch.compiled_with_cxx11_abi()
                )
    except OSError as error:
        raise AllocatorBuildError(
            f"{folder} cannot be written ({error}); set XDG_CACHE_HOME to a folder that can"
        ) from error
    return target


def _compile(compiler: list[str], target: Path, *, torch_folder: Path, abi: bool) -> None:
    handle, partial = tempfile.mkstemp(dir=target.parent, suffix=".partial")
    os.close(handle)
    try:
        # libc10 is named without a path to it: torch has loaded it already, and the loader takes that one.
        _run(
            [
                *compiler,
                *_FLAGS,
                f"-D_GLIBCXX_USE_CXX11_ABI={int(abi)}",
                f"-I{torch_folder / 'include'}",
                str(_SOURCE),
                "-o",
                partial,
                f"-L{torch_folder / 'lib'}",
                "-lc10",
            ]
        )
        os.replace(partial, target)
    finally:
        Path(partial).unlink(missing_ok=True)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise AllocatorBuildError(f"{command[0]} cannot be run ({error}); install g++ or set CXX") from error
    if done.returncode != 0:
        raise AllocatorBuildError(f"{shlex.join(command)} failed: {done.stderr.strip()[-2000:]}")
    return done.stdout
