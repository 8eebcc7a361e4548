"""Stable fingerprints: equal on every machine, in every process, for equal content.

    tree_fingerprint    tokens and shape of a tree, whatever the arrival order of its requests
    batch_fingerprint   tokens, positions, segments and request ends of a batch, whatever the numbering of its requests
    shape_fingerprint   the segment table alone: equal for passes that cost the same to run, whatever their tokens

Each is 32 hexadecimal digits of BLAKE2b.
"""

from __future__ import annotations

import hashlib

import numpy as np

from trainer_rank.prefix.order import IntArray
from trainer_rank.prefix.pack import PackedBatch
from trainer_rank.prefix.tree import PrefixTree

_DIGEST_BYTES = 16


def tree_fingerprint(tree: PrefixTree) -> str:
    """Return the fingerprint of the tokens and the shape of ``tree``."""
    digest = _digest("tree", tree.depth_start, tree.depth_stop, tree.parent, tree.num_ends)
    for segment in range(tree.num_segments):
        digest.update(_little_endian(tree.segment_tokens(segment)))
    return digest.hexdigest()


def batch_fingerprint(batch: PackedBatch) -> str:
    """Return the fingerprint of everything in ``batch`` but the numbering of its requests."""
    ends = np.bincount(batch.request_segment, minlength=batch.num_segments)
    return _digest("batch", *_segment_table(batch), ends, batch.token_ids, batch.positions).hexdigest()


def shape_fingerprint(batch: PackedBatch) -> str:
    """Return the fingerprint of the segment table of ``batch``."""
    return _digest("shape", *_segment_table(batch)).hexdigest()


def _segment_table(batch: PackedBatch) -> tuple[IntArray, IntArray, IntArray]:
    return batch.segment_start, batch.segment_stop, batch.segment_parent


def _digest(kind: str, *arrays: IntArray) -> hashlib.blake2b:
    # The kind separates equal bytes of different meaning, the sizes separate neighbouring arrays.
    digest = hashlib.blake2b(kind.encode(), digest_size=_DIGEST_BYTES)
    for array in arrays:
        digest.update(array.size.to_bytes(8, "little"))
        digest.update(_little_endian(array))
    return digest


def _little_endian(array: IntArray) -> bytes:
    return array.astype("<i8", copy=False).tobytes()
