"""Which kernel runs tree attention on which device."""

from __future__ import annotations

from typing import Final

import torch

from trainer_rank.errors import UnsupportedModelError
from trainer_rank.runtime.attention.cuda_kernels import CudaEfficientKernel, CudaFlashKernel
from trainer_rank.runtime.attention.kernels import CpuFlashKernel, Kernel

# Of an H100 or H200. Stands in where a dry run is for a CUDA device that this machine does not have.
_MULTIPROCESSORS: Final = 132


def kernel_for(device: torch.device, dtype: torch.dtype) -> Kernel:
    """Return the kernel that runs tree attention on a device, also for the dry run that stands for it.

    Raises:
        UnsupportedModelError: No fused kernel of the device computes in ``dtype``.
    """
    if device.type != "cuda":
        return CpuFlashKernel(torch.get_num_threads())
    if dtype == torch.float32:
        return CudaEfficientKernel()
    if dtype in (torch.bfloat16, torch.float16):
        return CudaFlashKernel(_multiprocessors(device))
    raise UnsupportedModelError(
        layer="attention",
        reason=f"no fused CUDA kernel computes in {str(dtype).removeprefix('torch.')}",
        next_step="Load the model in bfloat16, float16 or float32, or run it on the CPU",
    )


def _multiprocessors(device: torch.device) -> int:
    if not torch.cuda.is_available():
        return _MULTIPROCESSORS
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
