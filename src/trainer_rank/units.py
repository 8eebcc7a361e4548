"""Bytes for people: ``parse_bytes("2GiB")`` and ``format_bytes(2**31)``. The only module that knows 1024**3."""

from __future__ import annotations

import re
from typing import Final

KIB: Final = 1024
MIB: Final = 1024**2
GIB: Final = 1024**3

_SCALE: Final = {
    "": 1,
    "B": 1,
    "KIB": KIB,
    "MIB": MIB,
    "GIB": GIB,
    "TIB": 1024 * GIB,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
_PATTERN: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(value: int | str, *, field: str = "bytes") -> int:
    """Return a number of bytes from an int or a string such as ``"2GiB"``, ``"1.5 GB"`` or ``"4096"``.

    Raises:
        ValueError: Not a non-negative number with one of the known suffixes. The message names ``field``.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(
            f"{field} must be an int or a string such as '2GiB', got {value!r} of type {type(value).__name__}"
        )
    if isinstance(value, int):
        if value < 0:
            raise ValueError(f"{field} must not be negative, got {value}")
        return value
    match = _PATTERN.fullmatch(value)
    if match is None or match[2].upper() not in _SCALE:
        raise ValueError(
            f"{field} must be a number of bytes with an optional suffix (KiB, MiB, GiB, TiB or KB, MB, GB, TB), "
            f"got {value!r}; write for example '2GiB'"
        )
    return int(float(match[1]) * _SCALE[match[2].upper()])


def format_bytes(value: int) -> str:
    """Return bytes as people read them, in binary units: ``"512 B"``, ``"63.2 KiB"``, ``"1.50 GiB"``."""
    sign, size = ("-" if value < 0 else ""), abs(value)
    if size < KIB:
        return f"{sign}{size} B"
    if size < MIB:
        return f"{sign}{size / KIB:.1f} KiB"
    if size < GIB:
        return f"{sign}{size / MIB:.1f} MiB"
    return f"{sign}{size / GIB:.2f} GiB"
