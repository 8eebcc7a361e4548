"""Prefix trees of token rows: canonical tree, layouts, packing, fingerprints. NumPy only, no torch, no clock.

The way through: rows --build_tree--> PrefixTree --choose_layout--> Layout --pack--> PackedBatch
"""

from trainer_rank.prefix.choose import DEFAULT_SEGMENT_COST_ROWS, choose_layout
from trainer_rank.prefix.divergence import Divergence, first_divergences
from trainer_rank.prefix.fingerprint import batch_fingerprint, shape_fingerprint, tree_fingerprint
from trainer_rank.prefix.layout import Layout, layout_rows
from trainer_rank.prefix.order import IntArray
from trainer_rank.prefix.pack import PackedBatch, pack
from trainer_rank.prefix.tree import PrefixTree, build_tree

__all__ = [
    "DEFAULT_SEGMENT_COST_ROWS",
    "Divergence",
    "IntArray",
    "Layout",
    "PackedBatch",
    "PrefixTree",
    "batch_fingerprint",
    "build_tree",
    "choose_layout",
    "first_divergences",
    "layout_rows",
    "pack",
    "shape_fingerprint",
    "tree_fingerprint",
]
