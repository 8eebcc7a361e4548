"""A device's out-of-memory error, mapped once to the library's own."""

from __future__ import annotations

import gc
import traceback
from typing import Final

import torch

from trainer_rank.admission import Admission
from trainer_rank.errors import TrainerRankMemoryError

# How memory that no caching allocator hands out runs out: the plain CPU allocator, library handles, the driver.
_OTHER_WORDS: Final = (
    "DefaultCPUAllocator: can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory",
    "CUDA out of memory",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception is a device that ran out of memory, on any device."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OTHER_WORDS)


def map_out_of_memory(error: BaseException, *, admission: Admission, phase: str) -> BaseException:
    """Return the library's error for an out-of-memory in an admitted pass, any other error unchanged.

    The tensors of the failed pass hang on the frames of the traceback; they are let go here, so that the memory is back
    before the caller sees the error.
    """
    if not is_out_of_memory(error):
        return error
    traceback.clear_frames(error.__traceback__)
    gc.collect()
    return TrainerRankMemoryError(
        f"out of memory in {phase} of an admitted pass: it {admission.explain()}. The device said: {error}. Gradients "
        f"are unchanged and training may go on; lower memory_budget or report this pass with its decision record",
        admission=admission,
        refused=False,
        phase=phase,
        term=admission.largest_term.name,
    )
