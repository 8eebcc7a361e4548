"""Random packed prefix forests as segment tables."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# Around one row, the rounding of buckets, their longest gathered leaf, and the kernels' own tiles.
_LENGTHS = (1, 1, 2, 3, 7, 16, 17, 24, 40, 63, 64, 65, 100, 129, 300)


class Table(NamedTuple):
    """Segments in depth-first preorder: first row, one past the last, one past the last descendant."""

    start: NDArray[np.int64]
    stop: NDArray[np.int64]
    subtree_stop: NDArray[np.int64]

    @property
    def num_rows(self) -> int:
        """Rows of the whole forest."""
        return int(self.stop[-1])


def random_forest(seed: int) -> Table:
    """Return one to three trees of up to four levels, the same for the same seed."""
    draw = np.random.default_rng(seed)
    segments: list[list[int]] = []

    def grow(row: int, depth: int) -> int:
        """Append a segment and its subtree from ``row`` on; return one past its last row."""
        stop = row + int(draw.choice(_LENGTHS))
        segment = [row, stop, stop]
        segments.append(segment)
        if depth < 4 and draw.random() < 0.7 - 0.15 * depth:
            for _ in range(int(draw.integers(1, 5))):
                segment[2] = grow(segment[2], depth + 1)
        return segment[2]

    row = 0
    for _ in range(int(draw.integers(1, 4))):
        row = grow(row, 0)
    return Table(*np.array(segments, dtype=np.int64).T.copy())


def flat_forest(prompt: int, *branches: int) -> Table:
    """Return one prompt with branches of these lengths."""
    stops = np.cumsum([prompt, *branches])
    starts = np.concatenate([[0], stops[:-1]])
    return Table(starts, stops, np.concatenate([stops[-1:], stops[1:]]))
