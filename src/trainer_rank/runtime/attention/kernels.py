"""Fused attention kernels that return the log-sum-exp and accept a merged one in backward.

Shape letters: B batch, H query heads, G key/value heads (G divides H), T query rows, S key rows, D head size.

``torch.nn.functional.scaled_dot_product_attention`` is never called: it hides the log-sum-exp and takes another,
heavier kernel on ``meta`` than on the device, which would make a dry run wrong by 20 % to 40 %.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

_aten = torch.ops.aten


class Kernel(ABC):
    """One fused attention kernel; abstract here, final below.

    ``top_left`` tells how the kernel aligns a causal mask when T > S: True when query i sees keys 0..i (so that one
    call serves a segment and its descendants), False when the mask is aligned at the bottom right.
    """

    name: str
    top_left: bool

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """Return (out, lse): (B, H, T, D) in the dtype of ``q`` and (B, H, T) in the accumulation dtype."""

    @abstractmethod
    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv) for softmax weights ``exp(q k^T * scale - lse)``; ``out`` and ``lse`` may be merged."""


@dataclass(frozen=True, slots=True)
class CpuFlashKernel(Kernel):
    """aten's CPU flash attention: float32, float64 and bfloat16, fewer key/value heads natively.

    On ``meta`` the per-thread scratch of the real kernel is allocated and dropped, so that a dry run sees the same
    peak. The scratch sizes follow ``aten/src/ATen/native/cpu/FlashAttentionKernel.cpp`` and were checked byte for byte
    against the profiler's allocator events (torch 2.13, float32, float64 and bfloat16, one and two threads).
    """

    threads: int
    name = "cpu-flash"
    top_left = True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        if q.is_meta:
            self._scratch(q, k, forward=True)
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        grads: tuple[Tensor, Tensor, Tensor] = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, scale=scale
        )
        if q.is_meta:
            self._scratch(q, k, forward=False)
        return grads

    def _scratch(self, q: Tensor, k: Tensor, *, forward: bool) -> None:
        """Allocate and drop what the kernel allocates inside."""
        nbytes = flash_scratch_bytes(
            num_queries=q.shape[2],
            num_keys=k.shape[2],
            head_size=q.shape[3],
            dtype=q.dtype,
            threads=self.threads,
            forward=forward,
        )
        torch.empty(nbytes, dtype=torch.uint8, device=q.device)


def flash_scratch_bytes(
    *, num_queries: int, num_keys: int, head_size: int, dtype: torch.dtype, threads: int, forward: bool
) -> int:
    """Return the bytes aten's CPU flash kernel allocates inside one call."""
    block = 256 if num_queries >= 768 else 64 if num_queries >= 192 else 32
    rows, cols = min(block, num_queries), min(512, num_keys)
    accumulate = 8 if dtype == torch.float64 else 4
    reduced = dtype.itemsize if dtype in (torch.bfloat16, torch.float16) else 0
    if forward:
        return threads * ((rows * cols + 2 * rows + rows * head_size) * accumulate + rows * cols * reduced)
    return threads * 2 * rows * cols * (accumulate + reduced) + rows * accumulate


@dataclass(frozen=True, slots=True)
class CudaFlashKernel(Kernel):
    """aten's CUDA flash attention: float16 and bfloat16, fewer key/value heads natively, bottom-right causal."""

    name = "cuda-flash"
    top_left = False

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        # The (B, T, H, D) entry point takes G < H; scaled_dot_product's own wrapper does not on every release.
        out, lse, *_ = _aten._flash_attention_forward(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), None, None,
            q.shape[2], k.shape[2], 0.0, causal, False, scale=scale,
        )  # fmt: skip
        return out.transpose(1, 2), lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Dropout is off, so the random state is read by nobody; the operator still wants the two tensors.
        state = torch.empty(2, dtype=torch.uint64, device=q.device)
        unused = torch.empty(0, dtype=torch.uint64, device=q.device)
        dq, dk, dv = _aten._flash_attention_backward(
            grad.transpose(1, 2), q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), out.transpose(1, 2),
            lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal, state, unused, scale=scale,
        )  # fmt: skip
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


@dataclass(frozen=True, slots=True)
class CudaEfficientKernel(Kernel):
    """aten's CUDA memory-efficient attention for float32: key/value heads are repeated per call."""

    name = "cuda-efficient"
    top_left = True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        groups = q.shape[1] // k.shape[1]
        out, lse, *_ = _aten._scaled_dot_product_efficient_attention(
            q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), None, True, 0.0, causal, scale=scale
        )
        return out, lse[:, :, : q.shape[2]]

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        groups = q.shape[1] // k.shape[1]
        # The kernel reads the log-sum-exp in rows padded to 32, as its own forward writes it.
        padded = -(-q.shape[2] // 32) * 32
        full = lse.new_full((*lse.shape[:2], padded), float("inf"))
        full[:, :, : q.shape[2]] = lse
        zero = torch.zeros((), dtype=torch.int64, device=q.device)
        dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
            grad, q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), None, out, full, zero, zero, 0.0,
            [True, True, True, False], causal, scale=scale,
        )  # fmt: skip
        shape = (k.shape[0], k.shape[1], groups, k.shape[2], k.shape[3])
        return dq, dk.reshape(shape).sum(2), dv.reshape(shape).sum(2)


def kernel_for(device: torch.device, dtype: torch.dtype) -> Kernel:
    """Return the kernel that runs tree attention on a device, also for the dry run that stands for it."""
    if device.type == "cuda":
        return CudaEfficientKernel() if dtype in (torch.float32, torch.float64) else CudaFlashKernel()
    return CpuFlashKernel(torch.get_num_threads())
