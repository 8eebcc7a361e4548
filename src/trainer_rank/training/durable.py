"""A folder that is there whole or not at all, whatever stops the process or fills the disk. Imports no torch.

Files go into a hidden sibling of the folder; every file and the sibling are forced onto the disk before it takes the
folder's name, and the parent is forced after. What an earlier process left half done has a name of its own, so it is
never taken for a whole folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

PARTIAL: Final = ".partial"
REPLACED: Final = ".replaced"

Data = bytes | memoryview


class Disk:
    """What writes; tests give one that is full."""

    def write(self, file: BinaryIO, data: Data) -> None:
        """Write all of ``data``; raises OSError."""
        left = memoryview(data)
        # One call of the system may write less than it was given.
        while left:
            left = left[file.write(left) :]

    def sync(self, descriptor: int) -> None:
        """Force an open file or folder onto the disk; raises OSError."""
        os.fsync(descriptor)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFacts:
    """Size in bytes and SHA-256 in hexadecimal of a file."""

    num_bytes: int
    sha256: str


class DurableFolder:
    """Collects files for the folder ``target`` and then gives it all of them at once.

    ``files`` has the facts of each file written so far, by name.
    """

    def __init__(self, target: Path, *, disk: Disk) -> None:
        self.target: Final = target
        self.files: dict[str, FileFacts] = {}
        self._disk = disk
        self._partial = target.with_name(f".{target.name}{PARTIAL}")
        self._replaced = target.with_name(f".{target.name}{REPLACED}")

    def __enter__(self) -> DurableFolder:
        shutil.rmtree(self._partial, ignore_errors=True)
        self._partial.mkdir(parents=True)
        return self

    def __exit__(self, *exception: object) -> None:
        """Remove what was not committed."""
        shutil.rmtree(self._partial, ignore_errors=True)

    def write(self, name: str, pieces: Iterable[Data]) -> None:
        """Write a file from its pieces, in order, and force it onto the disk.

        Raises:
            OSError: It cannot be written.
        """
        digest, num_bytes = hashlib.sha256(), 0
        # Unbuffered: closing a file whose last write failed must not try to write again.
        with (self._partial / name).open("wb", buffering=0) as file:
            for piece in pieces:
                self._disk.write(file, piece)
                digest.update(piece)
                num_bytes += len(piece)
            self._disk.sync(file.fileno())
        self.files[name] = FileFacts(num_bytes=num_bytes, sha256=digest.hexdigest())

    def commit(self) -> None:
        """Give the folder its name; one that has it already is replaced.

        Raises:
            OSError: It cannot be done; the folder that was there before is there still.
        """
        self._sync_folder(self._partial)
        shutil.rmtree(self._replaced, ignore_errors=True)
        if self.target.exists():
            self.target.rename(self._replaced)
        self._partial.rename(self.target)
        self._sync_folder(self.target.parent)
        shutil.rmtree(self._replaced, ignore_errors=True)

    def _sync_folder(self, folder: Path) -> None:
        with _opened(folder) as descriptor:
            self._disk.sync(descriptor)


def replace_file(path: Path, data: bytes, *, disk: Disk) -> None:
    """Give the file ``path`` the content ``data``; it has the old content or the new, never a part of either."""
    partial = path.with_name(f".{path.name}{PARTIAL}")
    try:
        with partial.open("wb", buffering=0) as file:
            disk.write(file, data)
            disk.sync(file.fileno())
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)
    with _opened(path.parent) as descriptor:
        disk.sync(descriptor)


def facts_of(path: Path) -> FileFacts:
    """Return the facts of a file as it is on the disk."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileFacts(num_bytes=path.stat().st_size, sha256=digest)


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
