"""An SQLite file of what passes taught, for every process of a user.

One row holds what one pricer learned of one signature in one environment: the model, the device and the versions of
whatever allocates. An entry of another environment is another row, so nothing has to be thrown away when a library is
updated, and nothing of it counts.

Several processes may write at once: the file is in WAL mode, and a writer merges what it has to say into what is there
within one transaction. Rows are told apart by a sequence number; the clock is for people only. A file that is damaged
is set aside under another name, never overwritten. A file of a newer schema is left alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from trainer_rank.errors import StoreError
from trainer_rank.memory import Profile, Residual, Seen

SCHEMA: Final = 1

WAIT_SECONDS: Final = 10.0
"""How long a process waits for another one's transaction, which takes milliseconds."""

_TABLES: Final = """
CREATE TABLE environments (digest TEXT PRIMARY KEY, facts TEXT NOT NULL);
CREATE TABLE learned (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT,
    environment TEXT NOT NULL REFERENCES environments (digest),
    pricer TEXT NOT NULL,
    signature TEXT NOT NULL,
    value TEXT NOT NULL,
    observations INTEGER NOT NULL,
    written_at REAL NOT NULL,
    UNIQUE (environment, pricer, signature)
);
"""


def default_path() -> Path:
    """Return the user's own store: ``trainer-rank/learned.sqlite3`` in ``XDG_DATA_HOME`` or ``~/.local/share``."""
    base = os.environ.get("XDG_DATA_HOME")
    return (Path(base) if base else Path.home() / ".local" / "share") / "trainer-rank" / "learned.sqlite3"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What one pricer learned of one signature in one environment.

    Attributes:
        environment: Digest of ``facts``.
        facts: Model, device and versions, as plain values.
        pricer: ``envelope`` or ``profile``, or ``speed``.
        signature: What passes have in common, as JSON text.
        value: What was learned, as plain values; the pricer's own.
        observations: Observations it was learned from.
        written_at: Seconds since 1970 by the clock of the process that wrote it last.
    """

    environment: str
    facts: Mapping[str, Any]
    pricer: str
    signature: str
    value: Any
    observations: int
    written_at: float

    def to_json(self) -> dict[str, Any]:
        """Return the entry as plain values."""
        return {
            "facts": dict(self.facts),
            "pricer": self.pricer,
            "signature": self.signature,
            "value": self.value,
            "observations": self.observations,
            "written_at": self.written_at,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Entry:
        """Return the entry that ``to_json`` gave as ``values``.

        Raises:
            StoreError: A field is missing or is not what it must be.
        """
        try:
            merged = MERGES[values["pricer"]](None, values["value"])
            facts = dict(values["facts"])
            json.loads(values["signature"] or "{}")
            return cls(
                environment=digest_of(facts), facts=facts, pricer=values["pricer"], signature=values["signature"],
                value=merged, observations=int(values["observations"]), written_at=float(values["written_at"]),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise StoreError(f"an entry is malformed ({error!r}); export the store again with this version") from error


def _merge_residuals(known: Any, more: Any) -> list[list[int]]:
    seen = [Seen(packed_rows=a, logical_tokens=b, predicted_bytes=c, peak_bytes=d) for a, b, c, d in more]
    return Residual.from_json(known or []).observe(*seen).to_json()


def _merge_profiles(known: Any, more: Any) -> dict[str, Any]:
    found = Profile.from_json(more)
    return (found if known is None else Profile.from_json(known).join(found)).to_json()


def _latest(known: Any, more: Any) -> Any:
    return dict(more)


SPEED: Final = "speed"
"""What stands for a pricer where speed is kept, under an empty signature: the latest measurement counts."""

MERGES: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "envelope": _merge_residuals, "profile": _merge_profiles, SPEED: _latest,
}  # fmt: skip
"""How what a pricer learned is put together from two processes: ``merge(known or None, more)``."""


def digest_of(facts: Mapping[str, Any]) -> str:
    """Return the digest of an environment."""
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


class LearnedStore:
    """The store in one file.

    Args:
        path: The file; made, with its folder, when something is first written.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path: Final = default_path() if path is None else path

    def load(self, facts: Mapping[str, Any], pricer: str) -> dict[str, Any]:
        """Return what a pricer learned in an environment, by signature; empty without a file.

        Raises:
            StoreError: The file cannot be read, or is of a newer schema.
        """
        digest = digest_of(facts)
        return {one.signature: one.value for one in self.entries() if (one.environment, one.pricer) == (digest, pricer)}

    def entries(self) -> list[Entry]:
        """Return everything in the store, in the order in which it was first written; empty without a file.

        Raises:
            StoreError: The file cannot be read, or is of a newer schema.
        """
        if not self.path.exists():
            return []
        with self._open() as connection:
            rows = connection.execute(
                "SELECT environment, facts, pricer, signature, value, observations, written_at FROM learned "
                "JOIN environments ON digest = environment ORDER BY sequence"
            ).fetchall()
        return [
            Entry(
                environment=digest, facts=json.loads(facts), pricer=pricer, signature=signature,
                value=json.loads(value), observations=observations, written_at=written_at,
            )
            for digest, facts, pricer, signature, value, observations, written_at in rows
        ]  # fmt: skip

    def merge(self, facts: Mapping[str, Any], pricer: str, news: Mapping[str, Any]) -> None:
        """Put what a process learned together with what is there.

        Args:
            facts: Of the environment.
            pricer: Whose it is.
            news: What it learned since it last wrote, by signature.

        Raises:
            StoreError: The file cannot be written, or is of a newer schema. It is as it was.
        """
        counts = {signature: len(value) if pricer == "envelope" else 1 for signature, value in news.items()}
        self._merge((facts, pricer, signature, value, counts[signature]) for signature, value in news.items())

    def add(self, entries: Iterable[Entry]) -> None:
        """Put entries of another store together with what is there.

        Raises:
            StoreError: As for ``merge``.
        """
        self._merge((one.facts, one.pricer, one.signature, one.value, one.observations) for one in entries)

    def forget(self, environment: str, *, signature: str | None = None) -> int:
        """Delete what was learned in an environment, or one signature of it; return how many entries that were.

        Raises:
            StoreError: The file cannot be written, or is of a newer schema.
        """
        if not self.path.exists():
            return 0
        with self._open() as connection:
            where = "environment = ?" + ("" if signature is None else " AND signature = ?")
            values = (environment,) if signature is None else (environment, signature)
            return connection.execute(f"DELETE FROM learned WHERE {where}", values).rowcount

    def _merge(self, rows: Iterable[tuple[Mapping[str, Any], str, str, Any, int]]) -> None:
        with self._open() as connection:
            # Nobody else writes between the reading of a row and its writing.
            connection.execute("BEGIN IMMEDIATE")
            try:
                for facts, pricer, signature, value, count in rows:
                    self._merge_one(connection, facts, pricer, signature, value, count)
                connection.execute("COMMIT")
            except BaseException:
                connection.execute("ROLLBACK")
                raise

    def _merge_one(
        self,
        connection: sqlite3.Connection,
        facts: Mapping[str, Any],
        pricer: str,
        signature: str,
        value: Any,
        count: int,
    ) -> None:
        digest = digest_of(facts)
        text = json.dumps(facts, sort_keys=True, default=str)
        connection.execute("INSERT OR IGNORE INTO environments VALUES (?, ?)", (digest, text))
        key = (digest, pricer, signature)
        known = connection.execute(
            "SELECT value, observations FROM learned WHERE environment = ? AND pricer = ? AND signature = ?", key
        ).fetchone()
        merged = MERGES[pricer](None if known is None else json.loads(known[0]), value)
        total = count + (0 if known is None else known[1])
        connection.execute(
            "INSERT INTO learned (environment, pricer, signature, value, observations, written_at) "
            "VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (environment, pricer, signature) DO UPDATE SET "
            "value = excluded.value, observations = excluded.observations, written_at = excluded.written_at",
            (*key, json.dumps(merged), total, time.time()),
        )

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """Open the file for one operation; a damaged one is set aside, and the operation meets an empty store."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unusable(error) from error
        try:
            connection = self._connect()
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                raise self._unusable(error) from error
            self._set_aside(error)
            connection = self._connect()
        with closing(connection):
            try:
                yield connection
            except sqlite3.OperationalError as error:
                raise self._unusable(error) from error
            except sqlite3.DatabaseError as error:
                self._set_aside(error)
                raise StoreError(f"{self.path} was damaged and is set aside; do it again") from error

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=WAIT_SECONDS, isolation_level=None)
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute("BEGIN IMMEDIATE")
            (found,) = connection.execute("PRAGMA user_version").fetchone()
            if found == 0:
                for statement in _TABLES.split(";"):
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {SCHEMA}")
            connection.execute("COMMIT")
        except sqlite3.DatabaseError:
            connection.close()
            raise
        if found > SCHEMA:
            connection.close()
            raise StoreError(
                f"{self.path} has schema {found}, and this version knows {SCHEMA}; update trainer-rank, or set "
                "XDG_DATA_HOME to another folder to keep a store of its own. The file is as it was"
            )
        return connection

    def _set_aside(self, error: Exception) -> None:
        """Rename the damaged file and what belongs to it."""
        number = 1
        while (aside := self.path.with_name(f"{self.path.name}.damaged-{number}")).exists():
            number += 1
        for suffix in ("", "-wal", "-shm"):
            part = self.path.with_name(self.path.name + suffix)
            if part.exists():
                part.rename(aside.with_name(aside.name + suffix))
        warnings.warn(
            f"{self.path} is damaged ({error}); it is now {aside}, and what is learned from here on goes into a new "
            "file. Delete the old one, or recover it with the sqlite3 shell",
            RuntimeWarning,
            stacklevel=5,
        )

    def _unusable(self, error: Exception) -> StoreError:
        return StoreError(
            f"{self.path} cannot be used ({error}); make its folder writable, or set XDG_DATA_HOME to one that is"
        )
