"""The device of these tests, and the marks that skip them where there is none."""

from __future__ import annotations

from typing import Final

import pytest
import torch

CUDA: Final = torch.device("cuda", 0)
META: Final = torch.device("meta")

needs_cuda: Final = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


def requested_bytes() -> int:
    """Return the live bytes of the caching allocator, as asked for."""
    return int(torch.cuda.memory_stats(CUDA)["requested_bytes.all.current"])


def peak_requested_bytes() -> int:
    """Return their peak since ``torch.cuda.reset_peak_memory_stats``."""
    return int(torch.cuda.memory_stats(CUDA)["requested_bytes.all.peak"])
