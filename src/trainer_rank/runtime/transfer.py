"""Host index arrays onto a device, so that a dry run and a real run allocate alike."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return a copy of ``array`` on ``device``.

    A tensor that borrows NumPy's memory would be resident without being allocated, and a dry run could not see it;
    the copy is made by the device's own allocator everywhere. On ``meta`` only the shape is kept.
    """
    source = torch.from_numpy(array)
    tensor = torch.empty(source.shape, dtype=source.dtype, device=device)
    if device.type != "meta":
        tensor.copy_(source)
    return tensor
