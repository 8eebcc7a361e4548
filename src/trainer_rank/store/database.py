"""One SQLite file that several processes share: opened for one operation at a time, and never overwritten when damaged.

A file in which SQLite or a checksum finds damage is set aside under another name, with what belongs to it, and the
operation meets an empty one. A file of a newer schema is left as it is.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final, TypeVar

from trainer_rank.errors import StoreError

SCHEMA: Final = 1

WAIT_SECONDS: Final = 10.0
"""How long a process waits for another one's transaction, which takes milliseconds."""

_TABLES: Final = (
    "CREATE TABLE environments (digest TEXT PRIMARY KEY, facts TEXT NOT NULL)",
    "CREATE TABLE learned (sequence INTEGER PRIMARY KEY AUTOINCREMENT, "
    "environment TEXT NOT NULL REFERENCES environments (digest), pricer TEXT NOT NULL, signature TEXT NOT NULL, "
    "value TEXT NOT NULL, observations INTEGER NOT NULL, written_at REAL NOT NULL, checksum TEXT NOT NULL, "
    "UNIQUE (environment, pricer, signature))",
)

# Statements are constants, so one that SQLite cannot make sense of stands for tables that are not as they were made.
_DAMAGE: Final = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT, sqlite3.SQLITE_ERROR)

_Found = TypeVar("_Found")


class DamageError(Exception):
    """Something in the file is not what was written; raised by operations, never out of ``Database``."""


class Database:
    """The file.

    Args:
        path: Made, with its folder, when it is first used.
    """

    def __init__(self, path: Path) -> None:
        self.path: Final = path
        self._held: tuple[int, weakref.finalize[[], Database]] | None = None

    def exists(self) -> bool:
        """Return whether there is a file.

        Raises:
            StoreError: It cannot be told.
        """
        try:
            return self._inode() is not None
        except OSError as error:
            raise self._unusable(error) from error

    def read(self, operation: Callable[[sqlite3.Connection], _Found]) -> _Found:
        """Return what an operation finds in the file, once the whole of it was checked.

        Raises:
            StoreError: As for ``use``.
        """

        def checked(connection: sqlite3.Connection) -> _Found:
            (verdict,) = connection.execute("PRAGMA integrity_check (1)").fetchone()
            if verdict != b"ok":
                raise DamageError(verdict.decode(errors="replace"))
            return operation(connection)

        return self.use(checked)

    def use(self, operation: Callable[[sqlite3.Connection], _Found]) -> _Found:
        """Return what an operation returns; it is done again, on an empty file, where it meets damage.

        Args:
            operation: Gets a connection without an open transaction, on which text is bytes; may raise ``DamageError``.

        Raises:
            StoreError: The file cannot be read or written, or is of a newer schema.
        """
        for damaged_before in (False, True):
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                inode = self._inode()
                with closing(sqlite3.connect(self.path, timeout=WAIT_SECONDS, isolation_level=None)) as connection:
                    # Bytes that are no text are damage, and no reason to fail in words of the decoder.
                    connection.text_factory = bytes
                    self._check_schema(connection)
                    found = operation(connection)
                    self._hold()
                    return found
            except (sqlite3.Error, DamageError, UnicodeDecodeError, OSError) as error:
                if damaged_before or not _is_damage(error):
                    raise self._unusable(error) from error
                self._set_aside(inode, error)
        raise AssertionError("the second attempt returns or raises")

    def close(self) -> None:
        """Let go of the file; it is opened again when it is used."""
        if self._held is not None:
            self._held[1]()
            self._held = None

    def _hold(self) -> None:
        """Keep an idle connection: when the last one closes, SQLite waits for the disk, and a step would wait too."""
        inode = self._inode()
        if inode is None or (self._held is not None and self._held[0] == inode):
            return
        self.close()
        idle = sqlite3.connect(self.path, timeout=WAIT_SECONDS, isolation_level=None, check_same_thread=False)
        _schema(idle)
        self._held = inode, weakref.finalize(self, idle.close)

    def _check_schema(self, connection: sqlite3.Connection) -> None:
        found = _schema(connection)
        if found == 0:
            # Changing the journal waits for nobody, so only one process makes the file.
            with self._locked():
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute("BEGIN IMMEDIATE")
                if _schema(connection) == 0:
                    for statement in _TABLES:
                        connection.execute(statement)
                    connection.execute(f"PRAGMA user_version = {SCHEMA}")
                connection.execute("COMMIT")
        elif found != SCHEMA:
            raise StoreError(
                f"{self.path} has schema {found}, and this version knows {SCHEMA}; update trainer-rank, or set "
                "XDG_DATA_HOME to another folder to keep a store of its own. The file is as it was"
            )
        # Losing the last transaction to a power cut is fine, a damaged file is not.
        connection.execute("PRAGMA synchronous = NORMAL")

    def _set_aside(self, inode: int | None, error: Exception) -> None:
        """Rename the damaged file and what belongs to it, unless another process did so meanwhile."""
        try:
            with self._locked():
                if self._inode() != inode:
                    return
                number = 1
                while (aside := self.path.with_name(f"{self.path.name}.damaged-{number}")).exists():
                    number += 1
                # The log first: SQLite would take it for that of the file made next.
                for suffix in ("-wal", "-shm", ""):
                    part = self.path.with_name(self.path.name + suffix)
                    if part.exists():
                        part.rename(aside.with_name(aside.name + suffix))
        except OSError as failure:
            raise self._unusable(failure) from error
        warnings.warn(
            f"{self.path} is damaged ({_words(error)}); it is now {aside}, and what is learned from here on goes into "
            "a new file. Delete the old one, or recover it with the sqlite3 shell",
            RuntimeWarning,
            stacklevel=5,
        )

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold what only one process may hold; released when it ends, however it ends."""
        with self.path.with_name(f"{self.path.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _inode(self) -> int | None:
        try:
            return os.stat(self.path).st_ino
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _unusable(self, error: Exception) -> StoreError:
        step = "make its folder writable, or set XDG_DATA_HOME to one that is"
        if _kind(error) == sqlite3.SQLITE_BUSY:
            step = f"another process has held it for {WAIT_SECONDS:.0f} seconds: end its transaction"
        return StoreError(f"{self.path} cannot be used ({_words(error)}); {step}")


def _schema(connection: sqlite3.Connection) -> int:
    found: int = connection.execute("PRAGMA user_version").fetchone()[0]
    return found


def _is_damage(error: Exception) -> bool:
    if isinstance(error, DamageError | UnicodeDecodeError):
        return True
    return _kind(error) in _DAMAGE


def _kind(error: Exception) -> int:
    # The low byte is the kind, the others tell more of it.
    code: int = getattr(error, "sqlite_errorcode", 0)
    return code & 0xFF


def _words(error: Exception) -> str:
    return "a message that is no text" if isinstance(error, UnicodeDecodeError) else str(error)
