"""Rollouts from a Parquet file: the fields of ``rollouts`` as columns, one request per row. Imports no torch.

``tokens`` (list of integers) is required. Without a column ``trained`` every token is trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from trainer_rank.errors import ConfigError, DataError
from trainer_rank.training.rollouts import FIELDS, Limits, Rollout, read_rollouts, rollout_of

_ROWS_AT_ONCE: Final = 1024


def read_data(path: Path, limits: Limits | None = None) -> list[Rollout]:
    """Return the rollouts of a data file: Parquet by its suffix ``.parquet``, JSON Lines else.

    Raises:
        DataError, ConfigError: As ``read_rollouts`` and ``read_parquet``.
    """
    return read_parquet(path, limits) if path.suffix == ".parquet" else read_rollouts(path, limits)


def read_parquet(path: Path, limits: Limits | None = None) -> list[Rollout]:
    """Return the rollouts of the Parquet file ``path``, in file order; at least one.

    Raises:
        DataError: The file cannot be read, holds no request, lacks the column ``tokens``, or a row breaks a rule.
        ConfigError: pyarrow is not installed.
    """
    chosen = limits if limits is not None else Limits()
    rollouts = [rollout_of(path, number, entries, chosen) for number, entries in enumerate(_rows(path), start=1)]
    if not rollouts:
        raise DataError("holds no request; write one row per request", path=path)
    return rollouts


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{path}: Parquet files need the package 'pyarrow', which is not installed; run: pip install pyarrow, "
            "or write the data as JSON Lines"
        ) from error
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if "tokens" not in names:
                raise DataError(f"must have a column 'tokens', got the columns {', '.join(names)}", path=path)
            columns = [name for name in FIELDS if name in names]
            for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=columns):
                yield from map(_entries, batch.to_pylist())
    except OSError as error:
        raise DataError(f"cannot be read ({error}); give the path of a Parquet file", path=path) from error
    except pyarrow.ArrowException as error:
        raise DataError(f"is not a Parquet file that can be read: {error}", path=path) from error


def _entries(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row as a line of JSON would have it: a null is a field that is not there."""
    entries = {name: value for name, value in row.items() if value is not None}
    if "tokens" in entries:
        trained = entries.get("trained", [1] * len(entries["tokens"]))
        entries["trained"] = [int(one) if isinstance(one, bool) else one for one in trained]
    return entries
