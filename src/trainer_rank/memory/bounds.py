"""Bounds as types. A function that discards work because it cannot fit takes a ``LowerBound`` and nothing else.

An estimate passed by accident where a bound is needed prunes work that fits; the type checker refuses it here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class LowerBound:
    """No pass in question needs fewer bytes than this."""

    num_bytes: int


@dataclass(frozen=True, slots=True, order=True)
class UpperBound:
    """No pass in question needs more bytes than this."""

    num_bytes: int
