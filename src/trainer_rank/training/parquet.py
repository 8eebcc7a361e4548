"""The rows of a Parquet file as lines of JSON would hold them: every format's fields as columns. Imports no torch.

Either ``tokens`` (list of integers), or ``messages`` (list of structs), or ``prompt`` and ``completion``. Without a
column ``trained`` every token of a row of ids is trained. A null is a field that is not there, inside a message too:
a column's structs have the keys of all messages.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from trainer_rank.errors import ConfigError, DataError
from trainer_rank.training.formats import ALL_FIELDS

_ROWS_AT_ONCE: Final = 1024
_STRUCTS: Final = ("messages", "tools", "prompt", "completion")


def parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the fields of each row of the Parquet file ``path``, in file order.

    Raises:
        DataError: The file cannot be read, lacks the columns of every format, or has one of none.
        ConfigError: pyarrow is not installed.
    """
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
            _check_columns(path, file.schema_arrow.names)
            for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE):
                yield from map(_entries, batch.to_pylist())
    except OSError as error:
        raise DataError(f"cannot be read ({error}); give the path of a Parquet file", path=path) from error
    except pyarrow.ArrowException as error:
        raise DataError(f"is not a Parquet file that can be read: {error}", path=path) from error


def _check_columns(path: Path, names: list[str]) -> None:
    faults = []
    if not {"tokens", "messages"} & set(names) and not {"prompt", "completion"} <= set(names):
        missing = [name for name in ("prompt", "completion") if name not in names]
        faults.append(
            f"must have a column {missing[0]!r} beside the other"
            if len(missing) == 1
            else "must have a column 'tokens', or 'messages', or the columns 'prompt' and 'completion'"
        )
    for name in names:
        if name not in ALL_FIELDS:
            near = difflib.get_close_matches(name, ALL_FIELDS, n=1)
            faults.append(f"unknown column {name!r}{f', did you mean {near[0]!r}?' if near else ''}")
    if faults:
        raise DataError(
            f"{'; '.join(faults)}; got the columns {', '.join(names)}; rename or drop columns, "
            f"the known ones are {', '.join(ALL_FIELDS)}",
            path=path,
        )


def _entries(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row as a line of JSON would have it: a null is a field that is not there."""
    entries = {name: value for name, value in row.items() if value is not None}
    entries.update({name: _without_nulls(entries[name]) for name in _STRUCTS if name in entries})
    if "tokens" in entries:
        trained = entries.get("trained", [1] * len(entries["tokens"]))
        entries["trained"] = [int(one) if isinstance(one, bool) else one for one in trained]
    return entries


def _without_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nulls(one) for one in value]
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return value
