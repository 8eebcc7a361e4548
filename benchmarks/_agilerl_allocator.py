"""Reserved peak of an allocation history under the rules of torch's CUDA caching allocator, default settings.

Rules (c10/cuda/CUDACachingAllocator.cpp): sizes are rounded up to 512 bytes; up to 1 MiB comes from a pool of 2 MiB
segments, more from a second pool, in segments of 20 MiB below 10 MiB and of whole 2 MiB from there; the smallest free
block that is large enough is taken, the one at the lowest address among equals; what is left of it becomes a free block
if it is 512 bytes or more (small pool) or more than 1 MiB (large pool); free neighbours merge.

Addresses are the driver's. It takes them from the operating system, which hands them out downwards, so a later segment
is taken to lie lower. Only ties among equal blocks depend on it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

_MIB = 1 << 20
_ROUNDING = 512
_SMALL = _MIB
_LARGE = 10 * _MIB


class Peaks(NamedTuple):
    """Largest sum of live sizes, each rounded, and largest sum of segments, in bytes."""

    live_bytes: int
    reserved_bytes: int


@dataclass(slots=True, eq=False)
class _Block:
    segment: int
    offset: int
    nbytes: int
    is_small: bool
    before: _Block | None = None
    after: _Block | None = None
    is_free: bool = False

    @property
    def key(self) -> tuple[int, int, int]:
        return self.nbytes, -self.segment, self.offset


class _Pools:
    def __init__(self) -> None:
        self._keys: dict[bool, list[tuple[int, int, int]]] = {True: [], False: []}
        self._blocks: dict[tuple[bool, tuple[int, int, int]], _Block] = {}
        self._segments = 0
        self.reserved_bytes = 0

    def take(self, nbytes: int) -> _Block:
        is_small = nbytes <= _SMALL
        keys = self._keys[is_small]
        place = bisect_left(keys, (nbytes, -self._segments - 1, 0))
        found = place < len(keys)
        block = self._blocks.pop((is_small, keys.pop(place))) if found else self._segment(nbytes, is_small)
        block.is_free = False
        left = block.nbytes - nbytes
        if left >= _ROUNDING if is_small else left > _SMALL:
            rest = _Block(block.segment, block.offset + nbytes, left, is_small, block, block.after)
            if block.after is not None:
                block.after.before = rest
            block.after, block.nbytes = rest, nbytes
            self._add(rest)
        return block

    def give(self, block: _Block) -> None:
        if block.after is not None and block.after.is_free:
            self._remove(block.after)
            block = _merged(block, block.after)
        if block.before is not None and block.before.is_free:
            self._remove(block.before)
            block = _merged(block.before, block)
        self._add(block)

    def _segment(self, nbytes: int, is_small: bool) -> _Block:
        size = 2 * _MIB if is_small else 20 * _MIB if nbytes < _LARGE else -(-nbytes // (2 * _MIB)) * 2 * _MIB
        self._segments += 1
        self.reserved_bytes += size
        return _Block(self._segments, 0, size, is_small)

    def _add(self, block: _Block) -> None:
        block.is_free = True
        insort(self._keys[block.is_small], block.key)
        self._blocks[block.is_small, block.key] = block

    def _remove(self, block: _Block) -> None:
        keys = self._keys[block.is_small]
        keys.pop(bisect_left(keys, block.key))
        del self._blocks[block.is_small, block.key]


def _merged(first: _Block, second: _Block) -> _Block:
    first.nbytes += second.nbytes
    first.after = second.after
    if second.after is not None:
        second.after.before = first
    return first


def peaks(operations: Iterable[tuple[int, int]]) -> Peaks:
    """Return the peaks of (storage, bytes) allocations and (storage, 0) releases, from an empty allocator."""
    pools = _Pools()
    blocks: dict[int, tuple[_Block, int]] = {}
    live = most_live = 0
    for storage, nbytes in operations:
        if nbytes:
            size = -(-nbytes // _ROUNDING) * _ROUNDING
            blocks[storage] = pools.take(size), size
            live += size
            most_live = max(most_live, live)
        else:
            block, size = blocks.pop(storage)
            pools.give(block)
            live -= size
    return Peaks(most_live, pools.reserved_bytes)
