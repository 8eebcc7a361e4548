"""What aten's CUDA attention kernels allocate inside one call. Integers only.

A dry run on ``meta`` does not see these allocations, and they are large: flash backward keeps a float32 copy of the
query gradient with every sequence padded to 128 rows. Sizes follow ``flash_attn/flash_api.cpp``,
``attention_backward.cu`` and ``mem_eff_attention/kernel_backward.h`` under ``aten/src/ATen/native/transformers/cuda``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

FLASH_ROWS: Final = 128
"""Flash backward pads the queries of each sequence to a multiple of this."""

_SPLIT_ROWS: Final = 64
_MOST_SPLITS: Final = 128
_FLOAT32: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSizes:
    """Sizes of one kernel call: B sequences of T queries with H heads on S keys with G heads, head size D."""

    batch: int
    heads: int
    groups: int
    queries: int
    keys: int
    head_size: int


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


def flash_forward_bytes(sizes: CallSizes, multiprocessors: int) -> int:
    """Return the bytes of the partial outputs of a flash forward that splits its keys; 0 when it does not.

    Few queries on many keys leave multiprocessors idle; the kernel then shares out the keys and adds the parts up.
    """
    heads, queries = sizes.heads, sizes.queries
    if queries == 1 and sizes.groups < heads:
        # A single query row with grouped heads is run with the heads of a group as its rows.
        heads, queries = sizes.groups, heads // sizes.groups
    splits = _num_splits(
        tiles=sizes.batch * heads * -(-queries // _SPLIT_ROWS),
        slots=2 * multiprocessors,
        key_blocks=-(-sizes.keys // _keys_per_block(sizes.head_size)),
    )
    if splits == 1:
        return 0
    return splits * sizes.batch * heads * queries * (_padded_head(sizes.head_size) + 1) * _FLOAT32


def flash_forward_at_most(*, keys: int, head_size: int, multiprocessors: int) -> int:
    """Return what ``flash_forward_bytes`` never exceeds on at most ``keys`` keys, whatever the batch and the queries.

    Keys are only split while the tiles of 64 query rows leave a fifth of the slots idle.
    """
    slots = 2 * multiprocessors
    splits = min(_MOST_SPLITS, slots, -(-keys // _keys_per_block(head_size)))
    return 0 if splits <= 1 else splits * _SPLIT_ROWS * slots * (_padded_head(head_size) + 1) * _FLOAT32


def flash_backward_bytes(sizes: CallSizes, multiprocessors: int, *, itemsize: int, deterministic: bool) -> int:
    """Return the bytes a flash backward holds beside its results.

    They are the float32 query gradient and row sums, both padded, and with grouped heads the gradients of keys and
    values per query head. torch's deterministic mode keeps one query gradient per group of multiprocessors.
    """
    rows = sizes.batch * sizes.heads * round_up(sizes.queries, FLASH_ROWS)
    copies = -(-multiprocessors // (sizes.batch * sizes.heads)) if deterministic else 1
    grouped = 2 * sizes.batch * sizes.keys * sizes.heads * sizes.head_size * itemsize
    return rows * (copies * _padded_head(sizes.head_size) + 1) * _FLOAT32 + (
        grouped if sizes.groups < sizes.heads else 0
    )


def efficient_backward_bytes(sizes: CallSizes) -> int:
    """Return the bytes a memory-efficient float32 backward holds beside its results; it knows no groups.

    First grad times out with its row sums, twice; then the row sums beside the query gradient in tiles.
    """
    tile_rows, tile_columns = (64 if sizes.head_size <= 64 else 128), 64
    sequences = sizes.batch * sizes.heads
    sums = sequences * sizes.queries * _FLOAT32
    tiles = -(-sizes.queries // tile_rows) * -(-sizes.head_size // tile_columns)
    # Each tile carries a lock, a counter and padding: 16 bytes.
    workspace = sequences * tiles * (tile_rows * tile_columns * _FLOAT32 + 16)
    return max(sums * sizes.head_size + 2 * sums, sums + workspace)


def _keys_per_block(head_size: int) -> int:
    return 256 if head_size <= 64 else 128 if head_size <= 128 else 64


def _padded_head(head_size: int) -> int:
    return round_up(head_size, 32 if head_size <= 128 else 64)


def _num_splits(*, tiles: int, slots: int, key_blocks: int) -> int:
    """Return into how many parts the kernel cuts the keys: the fewest within 85 % of the best occupancy."""
    if tiles >= 0.8 * slots:
        return 1
    efficiency: dict[int, float] = {}
    for splits in range(1, min(_MOST_SPLITS, slots, key_blocks) + 1):
        if splits > 1 and -(-key_blocks // splits) == -(-key_blocks // (splits - 1)):
            continue
        waves = tiles * splits / slots
        efficiency[splits] = waves / -(-tiles * splits // slots)
    best = max(efficiency.values())
    return next(splits for splits, found in efficiency.items() if found >= 0.85 * best)
