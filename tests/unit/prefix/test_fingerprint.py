"""Fingerprints."""

from __future__ import annotations

import numpy as np

from trainer_rank.prefix import Layout, batch_fingerprint, build_tree, pack, shape_fingerprint, tree_fingerprint

ROWS = [np.array(row, dtype=np.int64) for row in ([1, 2, 3], [1, 2, 4], [1, 2])]


def test_fingerprints_are_pinned() -> None:
    """Stored keys stay valid across versions: a change here invalidates every cache."""
    tree = build_tree(ROWS)
    batch = pack(tree, Layout.full_sharing())
    assert tree_fingerprint(tree) == "ef7bb65cca8be4eb6f96bce16ef3e9a1"
    assert batch_fingerprint(batch) == "32be9160cf5e9e4634136495313c47a5"
    assert shape_fingerprint(batch) == "c5b09b6c157822b1837c078dbb50f381"


def test_a_token_changes_the_tree_and_the_batch_but_not_the_shape() -> None:
    """Tokens count everywhere but in the shape."""
    one, other = build_tree(ROWS), build_tree([*ROWS[:1], np.array([1, 2, 5]), *ROWS[2:]])
    assert tree_fingerprint(one) != tree_fingerprint(other)
    a, b = pack(one, Layout.full_sharing()), pack(other, Layout.full_sharing())
    assert batch_fingerprint(a) != batch_fingerprint(b)
    assert shape_fingerprint(a) == shape_fingerprint(b)


def test_a_duplicate_changes_the_tree_and_the_batch_but_not_the_shape() -> None:
    """How many requests end at a segment does not change the rows computed."""
    one, other = build_tree(ROWS), build_tree([*ROWS, ROWS[0]])
    assert tree_fingerprint(one) != tree_fingerprint(other)
    a, b = pack(one, Layout.full_sharing()), pack(other, Layout.full_sharing())
    assert batch_fingerprint(a) != batch_fingerprint(b)
    assert shape_fingerprint(a) == shape_fingerprint(b)


def test_layouts_differ_in_shape() -> None:
    """The same requests under another layout are another pass."""
    tree = build_tree(ROWS)
    shapes = {shape_fingerprint(pack(tree, layout)) for layout in (Layout.full_sharing(), Layout.no_sharing())}
    assert len(shapes) == 2
