"""Envelopes on disk, under a digest of everything they depend on.

One JSON file per envelope. A file that is damaged, or was written for another version of this code, of torch or of the
model's library, is made anew: the first is told in a warning, the second has another name to begin with.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import numpy as np

from trainer_rank.memory import Envelope, Piece
from trainer_rank.memory.envelope import COLUMNS

_LIBRARIES: Final = ("torch", "transformers", "peft")
_CODE: Final = ("memory", "executor", "runtime", "meters", "planner", "prefix")


def default_folder() -> Path:
    """Return where envelopes are kept: ``trainer-rank/envelopes`` in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "trainer-rank" / "envelopes"


class EnvelopeStore:
    """A folder of envelopes.

    Args:
        folder: Where they are; made when the first is saved.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, facts: Mapping[str, Any]) -> Envelope | None:
        """Return the envelope saved under the same facts; None when there is none or its file is damaged."""
        path = self._path(facts)
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except OSError as error:
            warnings.warn(f"the envelope cache {path} cannot be read ({error}); it is made anew", RuntimeWarning,
                          stacklevel=2)  # fmt: skip
            return None
        try:
            return _from_json(json.loads(text))
        except (ValueError, KeyError, TypeError) as error:
            warnings.warn(f"the envelope cache {path} is damaged ({error!r}); it is made anew", RuntimeWarning,
                          stacklevel=2)  # fmt: skip
            return None

    def save(self, facts: Mapping[str, Any], envelope: Envelope) -> None:
        """Write an envelope; a folder that cannot be written is told in a warning, because nothing depends on it."""
        path = self._path(facts)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=self._folder, delete=False) as file:
                json.dump(_to_json(envelope), file)
            # Another process may write the same envelope at the same time; each file appears whole.
            os.replace(file.name, path)
        except OSError as error:
            warnings.warn(f"the envelope cache {path} cannot be written ({error})", RuntimeWarning, stacklevel=2)

    def _path(self, facts: Mapping[str, Any]) -> Path:
        everything = {"facts": facts, "code": code_digest(), "libraries": _versions()}
        text = json.dumps(everything, sort_keys=True, default=str)
        return self._folder / f"{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}.json"


@cache
def code_digest() -> str:
    """Digest of the source that decides what a pass allocates and how that is solved for."""
    root = Path(__file__).parents[1]
    digest = hashlib.blake2b(digest_size=16)
    for package in _CODE:
        for path in sorted((root / package).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


@cache
def _versions() -> dict[str, str]:
    found = {}
    for library in _LIBRARIES:
        try:
            found[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            continue
    return found


def _to_json(envelope: Envelope) -> dict[str, Any]:
    return {
        "columns": COLUMNS,
        "categories": envelope.categories,
        "retained": envelope.retained.tolist(),
        "pieces": [
            {"phase": piece.phase, "layer": piece.layer, "call": piece.call, "terms": piece.terms.tolist()}
            for piece in envelope.pieces
        ],
    }


def _from_json(data: dict[str, Any]) -> Envelope:
    """Raise KeyError, TypeError or ValueError for anything that ``_to_json`` does not write."""
    if tuple(data["columns"]) != COLUMNS:
        raise ValueError("other columns")
    categories = tuple(str(name) for name in data["categories"])
    pieces = tuple(
        Piece(
            phase=str(item["phase"]),
            layer=None if item["layer"] is None else int(item["layer"]),
            call=str(item["call"]),
            terms=_whole(item["terms"], (len(categories), len(COLUMNS))),
        )
        for item in data["pieces"]
    )
    if not any(not piece.call for piece in pieces):
        raise ValueError("no piece outside calls")
    return Envelope(categories=categories, pieces=pieces, retained=_whole(data["retained"], (len(COLUMNS),)))


def _whole(values: Any, shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.int64]]:
    array = np.array(values)
    if array.shape != shape or array.dtype.kind != "i" or array.min() < 0:
        raise ValueError("a coefficient is missing, negative or no whole number")
    return array.astype(np.int64)
