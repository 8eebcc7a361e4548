"""An SQLite file of what passes taught, for every process of a user.

One row holds what one pricer learned of one signature in one environment: the model, the device and the versions of
whatever allocates. An entry of another environment is another row, so nothing has to be thrown away when a library is
updated, and nothing of it counts.

Several processes may write at once: the file is in WAL mode, and a writer merges what it has to say into what is there
within one transaction. Rows are told apart by a sequence number; the clock is for people only. Each has a checksum.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from trainer_rank.store.database import DamageError, Database
from trainer_rank.store.entry import MERGES, Entry, digest_of, digest_of_text, text_of

_SELECT: Final = (
    "SELECT environment, facts, pricer, signature, value, observations, written_at, checksum FROM learned "
    "JOIN environments ON digest = environment"
)


def default_path() -> Path:
    """Return the user's own store: ``trainer-rank/learned.sqlite3`` in ``XDG_DATA_HOME`` or ``~/.local/share``."""
    base = os.environ.get("XDG_DATA_HOME")
    return (Path(base) if base else Path.home() / ".local" / "share") / "trainer-rank" / "learned.sqlite3"


class LearnedStore:
    """The store in one file.

    Args:
        path: The file; made, with its folder, when something is first written.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path: Final = default_path() if path is None else path
        self._file = Database(self.path)

    def close(self) -> None:
        """Let go of the file; it is opened again when it is used. Not needed: it is closed when the store goes."""
        self._file.close()

    def load(self, facts: Mapping[str, Any], pricer: str) -> dict[str, Any]:
        """Return what a pricer learned in an environment, by signature; empty without a file.

        Raises:
            StoreError: The file cannot be read, or is of a newer schema.
        """
        found = self._entries("environment = ? AND pricer = ?", (digest_of(facts), pricer))
        return {one.signature: one.value for one in found}

    def entries(self) -> list[Entry]:
        """Return everything in the store, in the order in which it was first written; empty without a file.

        Raises:
            StoreError: The file cannot be read, or is of a newer schema.
        """
        return self._entries("TRUE", ())

    def merge(self, facts: Mapping[str, Any], pricer: str, news: Mapping[str, Any]) -> None:
        """Put what a process learned together with what is there.

        Args:
            facts: Of the environment.
            pricer: Whose it is.
            news: What it learned since it last wrote, by signature.

        Raises:
            StoreError: The file cannot be written, or is of a newer schema. It is as it was.
        """
        self._merge(
            (facts, pricer, signature, value, len(value) if pricer == "envelope" else 1)
            for signature, value in news.items()
        )

    def add(self, entries: Iterable[Entry]) -> None:
        """Put entries of another store together with what is there.

        Raises:
            StoreError: As for ``merge``.
        """
        self._merge((one.facts, one.pricer, one.signature, one.value, one.observations) for one in entries)

    def forget(self, environment: str, *, pricer: str | None = None, signature: str | None = None) -> int:
        """Delete what was learned in an environment, or part of it; return how many entries that were.

        Args:
            environment: Its digest.
            pricer, signature: Only this one's, only of this; None for all.

        Raises:
            StoreError: The file cannot be written, or is of a newer schema.
        """
        if not self._file.exists():
            return 0
        wanted = {"environment": environment, "pricer": pricer, "signature": signature}
        given = {name: value for name, value in wanted.items() if value is not None}
        where = " AND ".join(f"{name} = ?" for name in given)

        def delete(connection: sqlite3.Connection) -> int:
            return connection.execute(f"DELETE FROM learned WHERE {where}", tuple(given.values())).rowcount

        return self._file.use(delete)

    def _entries(self, where: str, values: Sequence[str]) -> list[Entry]:
        if not self._file.exists():
            return []
        statement = f"{_SELECT} WHERE {where} ORDER BY sequence"
        return self._file.read(lambda connection: [_entry(row) for row in connection.execute(statement, values)])

    def _merge(self, rows: Iterable[tuple[Mapping[str, Any], str, str, Any, int]]) -> None:
        news = list(rows)

        def write(connection: sqlite3.Connection) -> None:
            # Nobody else writes between the reading of a row and its writing. Without the commit nothing is written.
            connection.execute("BEGIN IMMEDIATE")
            for one in news:
                _merge_one(connection, *one)
            connection.execute("COMMIT")

        self._file.use(write)


def _merge_one(
    connection: sqlite3.Connection, facts: Mapping[str, Any], pricer: str, signature: str, value: Any, count: int
) -> None:
    text = text_of(facts)
    environment = digest_of_text(text)
    connection.execute("INSERT OR IGNORE INTO environments VALUES (?, ?)", (environment, text))
    key = (environment, pricer, signature)
    row = connection.execute(f"{_SELECT} WHERE environment = ? AND pricer = ? AND signature = ?", key).fetchone()
    known = None if row is None else _entry(row)
    merged = json.dumps(MERGES[pricer](None if known is None else known.value, value))
    total = count + (0 if known is None else known.observations)
    connection.execute(
        "INSERT INTO learned (environment, pricer, signature, value, observations, written_at, checksum) "
        "VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (environment, pricer, signature) DO UPDATE SET value = "
        "excluded.value, observations = excluded.observations, written_at = excluded.written_at, checksum = "
        "excluded.checksum",
        (*key, merged, total, time.time(), _checksum(*key, merged, total)),
    )


def _entry(row: Sequence[Any]) -> Entry:
    """Return a row as an entry; raise ``DamageError`` unless it is as it was written."""
    try:
        *texts, observations, written_at, checksum = row
        environment, facts, pricer, signature, value = (one.decode() for one in texts)
        as_written = digest_of_text(facts) == environment
        if not as_written or _checksum(environment, pricer, signature, value, observations) != checksum.decode():
            raise DamageError(f"the entry {signature!r} of {environment!r} is not what its checksum says")
        return Entry(
            environment=environment, facts=json.loads(facts), pricer=pricer, signature=signature,
            value=json.loads(value), observations=observations, written_at=float(written_at),
        )  # fmt: skip
    except (AttributeError, TypeError, ValueError) as error:
        raise DamageError(f"an entry cannot be read: {error}") from error


def _checksum(environment: str, pricer: str, signature: str, value: str, observations: int) -> str:
    return digest_of_text(json.dumps([environment, pricer, signature, value, observations]))
