"""Blocks of the allocator model and the pools that hold the free ones.

segment    [ used | free | used | free ]            a block knows its neighbours
expandable [ used | free | unmapped ... ]           unmapped address space is a block too
pool       free blocks by (stream, size, address), unmapped ones by (stream, address)
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(slots=True, eq=False, kw_only=True)
class Block:
    """A range of one segment: in use, free, or (expandable segments) address space without memory."""

    address: int
    nbytes: int
    stream: int
    pool: Pool
    base: int
    """Where its segment begins; pages are counted from there."""
    is_expandable: bool = False
    is_mapped: bool = True
    is_used: bool = False
    before: Block | None = None
    after: Block | None = None
    born: int = 0
    """Searches of the pool when the block was last put into it; its age is counted from there."""

    @property
    def is_split(self) -> bool:
        """Whether the segment has other blocks."""
        return self.before is not None or self.after is not None

    @property
    def room(self) -> int:
        """The size it can grow to by mapping what follows (``get_free_block``, ``expandable_size``)."""
        return self.nbytes + (self.after.nbytes if self.after is not None and not self.after.is_mapped else 0)

    def cut(self, nbytes: int) -> Block:
        """Shorten this block to its first bytes and return the rest, linked behind it and in no pool."""
        rest = Block(
            address=self.address + nbytes,
            nbytes=self.nbytes - nbytes,
            stream=self.stream,
            pool=self.pool,
            base=self.base,
            is_expandable=self.is_expandable,
            is_mapped=self.is_mapped,
            before=self,
            after=self.after,
        )
        if self.after is not None:
            self.after.before = rest
        self.after, self.nbytes = rest, nbytes
        return rest


class Pool:
    """Free and unmapped blocks of one size class; finding one takes logarithmic time."""

    def __init__(self, *, is_small: bool) -> None:
        self.is_small = is_small
        self.searches = 0
        self._free: list[tuple[int, int, int]] = []
        self._unmapped: list[tuple[int, int]] = []
        self._blocks: dict[int, Block] = {}

    def __iter__(self) -> Iterator[Block]:
        """Yield the free blocks in order; the pool may change meanwhile."""
        return iter([self._blocks[address] for _, _, address in self._free])

    def free_from(self, stream: int, nbytes: int) -> Iterator[Block]:
        """Yield the free blocks of a stream with at least ``nbytes``, best fit first."""
        for place in range(bisect_left(self._free, (stream, nbytes)), len(self._free)):
            if self._free[place][0] != stream:
                return
            yield self._blocks[self._free[place][2]]

    def free_down_from(self, stream: int, nbytes: int) -> list[Block]:
        """Return the free blocks of a stream below ``nbytes``, largest first."""
        stop, start = bisect_left(self._free, (stream, nbytes)), bisect_left(self._free, (stream,))
        return [self._blocks[address] for _, _, address in reversed(self._free[start:stop])]

    def unmapped(self, stream: int) -> Iterator[Block]:
        """Yield the unmapped blocks of a stream, lowest address first."""
        for place in range(bisect_left(self._unmapped, (stream,)), len(self._unmapped)):
            if self._unmapped[place][0] != stream:
                return
            yield self._blocks[self._unmapped[place][1]]

    def add(self, block: Block) -> None:
        """Put a block in (``insert_into_blocks``)."""
        if block.is_mapped:
            block.born = self.searches
            insort(self._free, (block.stream, block.nbytes, block.address))
        else:
            insort(self._unmapped, (block.stream, block.address))
        self._blocks[block.address] = block

    def remove(self, block: Block) -> None:
        """Take a block out."""
        if block.is_mapped:
            self._free.pop(bisect_left(self._free, (block.stream, block.nbytes, block.address)))
        else:
            self._unmapped.pop(bisect_left(self._unmapped, (block.stream, block.address)))
        del self._blocks[block.address]

    def merge(self, block: Block) -> None:
        """Let a block that is in no pool swallow its neighbours in the same state (``try_merge_blocks``)."""
        before, after = block.before, block.after
        if before is not None and not before.is_used and before.is_mapped == block.is_mapped:
            self.remove(before)
            block.address, block.before = before.address, before.before
            block.nbytes += before.nbytes
            if block.before is not None:
                block.before.after = block
        if after is not None and not after.is_used and after.is_mapped == block.is_mapped:
            self.remove(after)
            block.nbytes += after.nbytes
            block.after = after.after
            if block.after is not None:
                block.after.before = block


def laid_out(pool: Pool, address: int, nbytes: int, live: Mapping[int, int], stream: int) -> list[Block]:
    """Return the linked blocks of a segment, live ones as given by address and size, the gaps between them free."""
    whole = Block(address=address, nbytes=nbytes, stream=stream, pool=pool, base=address)
    blocks, rest = [], whole
    for start in sorted(live):
        if start > rest.address:
            blocks.append(rest)
            rest = rest.cut(start - rest.address)
        rest.is_used = True
        blocks.append(rest)
        if live[start] < rest.nbytes:
            rest = rest.cut(live[start])
    if not blocks or blocks[-1] is not rest:
        blocks.append(rest)
    return blocks
