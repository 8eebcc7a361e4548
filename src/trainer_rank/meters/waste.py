"""What CUDA's caching allocator wastes between its blocks, as a share of the live bytes it is asked for.

The allocator cuts blocks from segments and can give a segment back only when none of its blocks is in use, so a pass
needs more physical memory than its live bytes. How much depends on the sizes and on their order. The shares are what
`benchmarks/waste.py` found enough: on simulated devices filled to the brim no admitted pass ran out of memory.
Expandable segments grow and shrink page by page and waste less.
"""

from __future__ import annotations

import os
from typing import Final

from trainer_rank.units import MIB

CUT_SEGMENTS: Final = 0.15
"""Share with torch's default settings."""

EXPANDABLE_SEGMENTS: Final = 0.05
"""Share with ``expandable_segments:True``."""


SEGMENTS_BYTES: Final = 40 * MIB
"""Besides the share: the two segments of 20 MiB of which blocks of up to 10 MiB are cut, each held by a block that
stays. On a small device this is most of the waste."""


def waste_share(expandable: bool) -> float:
    """Return the share for an allocator with these settings."""
    return EXPANDABLE_SEGMENTS if expandable else CUT_SEGMENTS


def expandable_by_environment() -> bool:
    """Return whether torch's allocator was told to use expandable segments; it reads the same variables."""
    said = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    return "expandable_segments:true" in said.replace(" ", "").lower()


def waste_bytes(free_bytes: int, share: float, fixed_bytes: int = 0) -> int:
    """Return the part of ``free_bytes`` that is left for waste when the rest is handed out as live bytes.

    It is never less than ``fixed_bytes``, and so more than is free where even that is missing.
    """
    return max(fixed_bytes, free_bytes - int((free_bytes - fixed_bytes) / (1 + share)))
