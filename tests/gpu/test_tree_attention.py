"""Tree attention on CUDA against a dense mask in float64: outputs and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.gpu.device import CUDA, needs_cuda
from tests.gpu.forests import Table, flat_forest, random_forest
from trainer_rank.runtime.attention import (
    BoundAttention,
    attention_plan,
    dense_mask,
    kernel_for,
    naive_tree_attention,
    tree_attention,
)

pytestmark = needs_cuda

# Largest error, relative to the largest entry: the rounding of the results and, in half precision, of sums of parts.
TOLERANCE = {torch.float32: 5e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
SCALE = 0.1

each_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def check(segments: Table, dtype: torch.dtype, *, heads: int = 4, groups: int = 2, size: int = 64) -> None:
    """Assert that output, dq, dk and dv are those of the dense mask."""
    draw = torch.Generator(CUDA).manual_seed(segments.num_rows)
    # Row-major in memory, as a projection leaves them.
    q, k, v, grad = (
        torch.randn(1, segments.num_rows, count, size, generator=draw, device=CUDA).to(dtype).transpose(1, 2)
        for count in (heads, groups, groups, heads)
    )
    found = _packed(segments, q, k, v, grad.transpose(1, 2))
    wanted = _naive(segments, q.double(), k.double(), v.double(), grad.double().transpose(1, 2))
    # A lone row's dq is zero, so all errors are measured by the largest entry of all.
    scale = max(float(x.abs().max()) for x in wanted)
    errors = {
        name: float((a.double() - b).abs().max()) / scale
        for name, a, b in zip(("out", "dq", "dk", "dv"), found, wanted, strict=True)
    }
    assert {x.dtype for x in found} == {dtype}
    assert all(error <= TOLERANCE[dtype] for error in errors.values()), errors


def _packed(segments: Table, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    bound = BoundAttention.bind(attention_plan(*segments), kernel_for(CUDA, q.dtype), CUDA)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = tree_attention(*leaves, bound, SCALE)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def _naive(segments: Table, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = naive_tree_attention(*leaves, dense_mask(*segments), SCALE)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


@each_dtype
@pytest.mark.parametrize("seed", range(12))
def test_any_forest_equals_the_dense_mask(seed: int, dtype: torch.dtype) -> None:
    """Random trees of one to four levels, with grouped-query heads."""
    check(random_forest(seed), dtype)


@each_dtype
@pytest.mark.parametrize(("heads", "groups", "size"), [(1, 1, 64), (4, 4, 128), (8, 1, 128), (6, 2, 32), (2, 1, 96)])
def test_any_heads_equal_the_dense_mask(heads: int, groups: int, size: int, dtype: torch.dtype) -> None:
    """Multi-head, grouped-query and multi-query attention, with the head sizes of real models."""
    check(flat_forest(70, 3, 17, 20, 1, 90), dtype, heads=heads, groups=groups, size=size)


@each_dtype
def test_a_long_prompt_whose_keys_are_split_equals_the_dense_mask(dtype: torch.dtype) -> None:
    """Few queries on many keys take flash's split forward, and a single query its swapped heads."""
    check(flat_forest(4000, 1), dtype)
    check(flat_forest(4000, 5, 30), dtype)


@each_dtype
def test_more_branches_than_one_backward_call_takes(dtype: torch.dtype) -> None:
    """300 equal branches run in three calls, and a bucket of ragged ones beside them."""
    check(flat_forest(9, *[4] * 300, *[17, 19, 23] * 10), dtype)


@each_dtype
def test_logits_far_apart_merge_without_overflow(dtype: torch.dtype) -> None:
    """A prompt whose logits lie hundreds above its branches' keeps finite numbers."""
    segments = flat_forest(4, 2, 3)
    q, k, v = (torch.randn(1, 9, 2, 64, device=CUDA).to(dtype).transpose(1, 2) for _ in range(3))
    k[:, :, :4] *= 100
    found = _packed(segments, q, k, v, torch.ones(1, 9, 2, 64, device=CUDA, dtype=dtype))
    assert all(bool(x.isfinite().all()) for x in found)
