"""CUDA's kernels on ``meta``: the path a dry run for a CUDA device takes."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.unit.runtime.attention.strategies import Tree, leaves, table
from trainer_rank.errors import UnsupportedModelError
from trainer_rank.executor.recorder import AllocationRecorder
from trainer_rank.memory import fold
from trainer_rank.runtime.attention import (
    BoundAttention,
    CudaEfficientKernel,
    CudaFlashKernel,
    Kernel,
    attention_plan,
    kernel_for,
    tree_attention,
)

META, CUDA = torch.device("meta"), torch.device("cuda", 0)
FLASH, EFFICIENT = CudaFlashKernel(132), CudaEfficientKernel()
KERNELS = [(FLASH, torch.bfloat16), (FLASH, torch.float16), (EFFICIENT, torch.float32)]
each_kernel = pytest.mark.parametrize(("kernel", "dtype"), KERNELS, ids=["flash bf16", "flash fp16", "efficient"])

FORESTS: dict[str, list[Tree]] = {
    "one run": [(9, [])],
    "one-row branches": [(3, leaves(1, 1))],
    "padded bucket": [(5, leaves(17, 19, 24, 23))],
    "view of equal leaves": [(5, leaves(*[40] * 8))],
    "depth 5": [(2, [(2, [(2, [(2, leaves(2, 3)), (1, [])]), (1, [])]), (1, [])])],
    "forest": [(4, leaves(2, 3)), (3, []), (5, [(1, leaves(1, 1)), (70, [])])],
}


class Shape(NamedTuple):
    """Sizes of one kernel call."""

    batch: int
    heads: int
    groups: int
    queries: int
    keys: int
    size: int


SHAPES = [Shape(1, 4, 2, 33, 33, 64), Shape(3, 4, 4, 1, 1, 128), Shape(300, 8, 1, 5, 5, 64), Shape(1, 4, 2, 7, 20, 8)]


def inputs(shape: Shape, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return (B, H, T, D) queries and (B, G, S, D) keys and values on ``meta``, row-major in memory."""
    return tuple(  # type: ignore[return-value]
        torch.empty(shape.batch, rows, count, shape.size, dtype=dtype, device=META).transpose(1, 2)
        for rows, count in ((shape.queries, shape.heads), (shape.keys, shape.groups), (shape.keys, shape.groups))
    )


def peak_bytes(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> int:
    """Return the peak of one backward call of a kernel."""
    out, lse = kernel.forward(q, k, v, causal=True, scale=0.1)
    recorder = AllocationRecorder(META, CUDA)
    with recorder:
        kernel.backward(grad, q, k, v, out, lse, causal=True, scale=0.1)
    return fold(recorder.trace(1)).peak.peak_bytes


@each_kernel
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_forward_gives_outputs_and_a_float32_log_sum_exp(shape: Shape, kernel: Kernel, dtype: torch.dtype) -> None:
    """(B, H, T, D) in the inputs' dtype and (B, H, T) in float32, without padding."""
    out, lse = kernel.forward(*inputs(shape, dtype), causal=False, scale=0.1)
    assert (out.shape, out.dtype) == ((shape.batch, shape.heads, shape.queries, shape.size), dtype)
    assert (lse.shape, lse.dtype) == ((shape.batch, shape.heads, shape.queries), torch.float32)


@each_kernel
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_backward_gives_gradients_like_its_inputs(shape: Shape, kernel: Kernel, dtype: torch.dtype) -> None:
    """dk and dv have the few key/value heads, also where the batch is run in parts or the kernel repeats heads."""
    q, k, v = inputs(shape, dtype)
    out, lse = kernel.forward(q, k, v, causal=False, scale=0.1)
    grads = kernel.backward(torch.empty_like(out), q, k, v, out, lse, causal=False, scale=0.1)
    assert [(grad.shape, grad.dtype) for grad in grads] == [(x.shape, dtype) for x in (q, k, v)]


@each_kernel
@pytest.mark.parametrize("forest", FORESTS.values(), ids=FORESTS.keys())
def test_tree_attention_traces(forest: list[Tree], kernel: Kernel, dtype: torch.dtype) -> None:
    """Forward and backward of whole trees run without data."""
    segments = table(*forest)
    rows = int(segments.stop[-1])
    q, k, v = (x.requires_grad_() for x in inputs(Shape(1, 4, 2, rows, rows, 64), dtype))
    bound = BoundAttention.bind(attention_plan(*segments), kernel, META)
    out = tree_attention(q, k, v, bound, 0.1)
    assert (out.shape, out.dtype, out.is_contiguous()) == ((1, rows, 4, 64), dtype, True)
    grads = torch.autograd.grad(out, (q, k, v), torch.empty_like(out))
    assert [(grad.shape, grad.dtype) for grad in grads] == [(x.shape, dtype) for x in (q, k, v)]


def test_a_dry_run_sees_what_flash_backward_allocates_inside() -> None:
    """4,096 rows of 32 heads on 8: results of 48 MiB, 64 MiB and a half of query gradient and sums, 64 MiB per head."""
    q, k, v = inputs(Shape(1, 32, 8, 4096, 4096, 128), torch.bfloat16)
    peak = peak_bytes(FLASH, q, k, v, torch.empty_like(q))
    assert peak == pytest.approx((48 + 64.5 + 64) * 2**20, rel=1e-3)


@pytest.mark.parametrize(("kernel", "dtype"), [(FLASH, torch.bfloat16), (EFFICIENT, torch.float32)])
def test_many_short_branches_need_bounded_memory(kernel: Kernel, dtype: torch.dtype) -> None:
    """1,024 branches of one row would be padded to 131,072 rows, 2 GiB of float32; in parts it is 256 MiB and some."""
    q, k, v = inputs(Shape(1024, 32, 32, 1, 1, 128), dtype)
    assert peak_bytes(kernel, q, k, v, torch.empty_like(q)) < 400 * 2**20


@pytest.mark.parametrize(
    ("dtype", "kernel"),
    [(torch.float32, CudaEfficientKernel), (torch.bfloat16, CudaFlashKernel), (torch.float16, CudaFlashKernel)],
)
def test_the_kernel_follows_the_device_a_dry_run_stands_for(dtype: torch.dtype, kernel: type[Kernel]) -> None:
    """A machine without CUDA can ask for CUDA's kernels."""
    assert type(kernel_for(CUDA, dtype)) is kernel


def test_float64_is_refused_on_cuda() -> None:
    """No fused kernel there computes in it; the message says what to do."""
    with pytest.raises(UnsupportedModelError, match=r"computes in float64\. Load the model in bfloat16"):
        kernel_for(CUDA, torch.float64)


@pytest.mark.parametrize(("kernel", "dtype", "size"), [(FLASH, torch.bfloat16, 12), (EFFICIENT, torch.float32, 6)])
def test_a_head_size_the_kernel_cannot_take_is_refused(kernel: Kernel, dtype: torch.dtype, size: int) -> None:
    """Already in a dry run, where the operator itself would not notice."""
    with pytest.raises(UnsupportedModelError, match=f"not {size}"):
        kernel.forward(*inputs(Shape(1, 2, 2, 5, 5, size), dtype), causal=True, scale=0.1)
