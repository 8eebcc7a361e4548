"""The naive twin of tree attention: a dense P x P mask and plain arithmetic. For tests and small inputs."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def dense_mask(start: NDArray[np.int64], stop: NDArray[np.int64], subtree_stop: NDArray[np.int64]) -> Tensor:
    """Return the (P, P) bool mask, True where query row (first axis) sees key row: on its path and not after it."""
    num_rows = int(stop[-1]) if len(stop) else 0
    visible = torch.zeros(num_rows, num_rows, dtype=torch.bool)
    for begin, end, reach in zip(start.tolist(), stop.tolist(), subtree_stop.tolist(), strict=True):
        visible[begin:reach, begin:end] = True
    return visible.tril()


def naive_tree_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Return (1, P, H, D) from q (1, H, P, D), k and v (1, G, P, D) and a dense mask (P, P)."""
    groups = q.shape[1] // k.shape[1]
    keys, values = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = (q @ keys.transpose(-1, -2)) * scale
    weights = scores.masked_fill(~mask.to(q.device), float("-inf")).softmax(-1)
    return (weights @ values).transpose(1, 2)
