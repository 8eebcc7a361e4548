"""Tree attention against a dense mask: outputs and gradients."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.unit.runtime.attention.strategies import Table, Tree, forests, leaves, table
from trainer_rank.runtime.attention import (
    BoundAttention,
    CpuFlashKernel,
    Kernel,
    attention_plan,
    dense_mask,
    naive_tree_attention,
    tree_attention,
)

HEADS, GROUPS, SIZE = 4, 2, 8
CPU = torch.device("cpu")


class BottomRightKernel(CpuFlashKernel):
    """A kernel that, like CUDA's, aligns a causal mask at the bottom right: it refuses causal calls with T > S."""

    top_left = False

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        assert not causal or q.shape[2] == k.shape[2]
        return CpuFlashKernel.forward(self, q, k, v, causal=causal, scale=scale)


@dataclass(frozen=True)
class Inputs:
    """Queries, keys, values and a cotangent for one forest."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor

    @classmethod
    def draw(cls, num_rows: int, dtype: torch.dtype, *, heads: int = HEADS, groups: int = GROUPS) -> Inputs:
        torch.manual_seed(num_rows)
        # Row-major in memory, as a projection leaves them.
        q, k, v = (
            (2 * torch.randn(1, num_rows, count, SIZE, dtype=torch.float64)).to(dtype).transpose(1, 2)
            for count in (heads, groups, groups)
        )
        grad = torch.randn(1, num_rows, heads, SIZE, dtype=torch.float64).to(dtype)
        return cls(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), grad)

    def packed(self, segments: Table, kernel: Kernel) -> list[Tensor]:
        """Return output and gradients of tree attention."""
        bound = BoundAttention.bind(attention_plan(*segments), kernel, CPU)
        return self._with_grads(tree_attention(self.q, self.k, self.v, bound, 0.4))

    def naive(self, segments: Table) -> list[Tensor]:
        """Return output and gradients under the dense mask."""
        return self._with_grads(naive_tree_attention(self.q, self.k, self.v, dense_mask(*segments), 0.4))

    def _with_grads(self, out: Tensor) -> list[Tensor]:
        return [out.detach(), *torch.autograd.grad(out, (self.q, self.k, self.v), self.grad)]


def assert_close(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    """Assert that output, dq, dk and dv agree, relative to the largest entry of all (a lone row's dq is zero)."""
    scale = max(float(b.abs().max()) for b in expected)
    errors = {
        name: float((a.double() - b.double()).abs().max()) / scale
        for name, a, b in zip(("out", "dq", "dk", "dv"), found, expected, strict=True)
    }
    assert all(error <= tolerance for error in errors.values()), errors


EXAMPLES = {
    "one row": [(1, [])],
    "one run": [(9, [])],
    "unshared roots": leaves(1, 1, 7, 7, 70),
    "two one-row branches": [(3, leaves(1, 1))],
    "one-row prompt": [(1, leaves(1, 2, 5))],
    "all one row": [(1, [(1, leaves(1, 1)), (1, leaves(1, 1, 1))])],
    "chain": [(4, [(1, [(3, [(2, [])])])])],
    "chain, then branches": [(2, [(3, leaves(2, 4))])],
    "branch, then chain": [(2, [(3, [(1, [(4, [])])]), (5, [])])],
    "padded bucket": [(5, leaves(17, 19, 24, 23))],
    "gathered and sliced leaves": [(5, leaves(3, 70, 3, 64, 65))],
    "view of equal leaves": [(5, leaves(*[40] * 8))],
    "equal leaves apart": [(5, [(2, leaves(6, 6)), (3, leaves(6, 6))])],
    "depth 5": [(2, [(2, [(2, [(2, leaves(2, 3)), (1, [])]), (1, [])]), (1, [])])],
    "run beyond a kernel block": [(200, leaves(30, 80))],
    "forest": [(4, leaves(2, 3)), (3, []), (5, [(1, leaves(1, 1)), (6, [])])],
}


@pytest.mark.parametrize("kernel", [CpuFlashKernel(1), BottomRightKernel(1)], ids=["top left", "bottom right"])
@pytest.mark.parametrize("forest", EXAMPLES.values(), ids=EXAMPLES.keys())
def test_outputs_and_gradients_are_those_of_the_dense_mask(forest: list[Tree], kernel: Kernel) -> None:
    """In float64 tree attention equals masked softmax to rounding, for both alignments of a causal mask."""
    segments = table(*forest)
    inputs = Inputs.draw(int(segments.stop[-1]), torch.float64)
    assert_close(inputs.packed(segments, kernel), inputs.naive(segments), 1e-12)


@given(forest=forests())
@settings(max_examples=40, deadline=None)
def test_any_forest_equals_the_dense_mask(forest: list[Tree]) -> None:
    """The same for random forests."""
    segments = table(*forest)
    inputs = Inputs.draw(int(segments.stop[-1]), torch.float64)
    assert_close(inputs.packed(segments, CpuFlashKernel(1)), inputs.naive(segments), 1e-12)


@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (4, 4), (4, 1), (6, 2)])
def test_any_number_of_key_value_heads(heads: int, groups: int) -> None:
    """Multi-head, grouped-query and multi-query attention."""
    segments = table((7, leaves(3, 17, 20)))
    inputs = Inputs.draw(int(segments.stop[-1]), torch.float64, heads=heads, groups=groups)
    assert_close(inputs.packed(segments, CpuFlashKernel(1)), inputs.naive(segments), 1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("name", ["forest", "padded bucket", "depth 5"])
def test_narrower_dtypes_stay_within_their_rounding(name: str, dtype: torch.dtype, tolerance: float) -> None:
    """float32 and bfloat16 keep their dtype and agree with float64."""
    segments = table(*EXAMPLES[name])
    num_rows = int(segments.stop[-1])
    narrow = Inputs.draw(num_rows, dtype)
    wide = Inputs(*(x.detach().double().requires_grad_() for x in (narrow.q, narrow.k, narrow.v, narrow.grad)))
    found = narrow.packed(segments, CpuFlashKernel(1))
    assert {x.dtype for x in found} == {dtype}
    assert_close(found, wide.naive(segments), tolerance)


def test_logits_far_apart_merge_without_overflow() -> None:
    """A branch whose logits lie hundreds above or below its prompt's keeps finite, exact numbers."""
    segments = table((4, leaves(2, 3)))
    inputs = Inputs.draw(9, torch.float64)
    with torch.no_grad():
        inputs.k[:, :, :4] *= 200
        inputs.k[:, :, 6:] *= -300
    found = inputs.packed(segments, CpuFlashKernel(1))
    assert all(bool(x.isfinite().all()) for x in found)
    assert_close(found, inputs.naive(segments), 1e-10)


def test_a_branch_does_not_see_its_sibling() -> None:
    """Changing one branch's rows leaves the other branch and the prompt bitwise as they were."""
    segments = table((6, leaves(5, 18, 20)))
    inputs = Inputs.draw(49, torch.float64)
    before = inputs.packed(segments, CpuFlashKernel(1))[0]
    with torch.no_grad():
        for x in (inputs.q, inputs.k, inputs.v):
            x[:, :, 11:29] += 1
    after = inputs.packed(segments, CpuFlashKernel(1))[0]
    assert torch.equal(before[:, :11], after[:, :11])
    assert torch.equal(before[:, 29:], after[:, 29:])
    assert not torch.equal(before[:, 11:29], after[:, 11:29])


@pytest.mark.parametrize("forest", EXAMPLES.values(), ids=EXAMPLES.keys())
def test_meta_runs_the_same_operators_with_the_same_results_in_shape(forest: list[Tree]) -> None:
    """A dry run makes the device's calls: same operators, same shapes, dtypes and strides."""
    segments = table(*forest)
    real = Inputs.draw(int(segments.stop[-1]), torch.float32)
    on_cpu, cpu_calls = _recorded(real, segments, CPU)
    on_meta, meta_calls = _recorded(real, segments, torch.device("meta"))
    scratch = ["aten.empty.memory_format"] * len([call for call in cpu_calls if "flash_attention" in call])
    assert [(x.shape, x.dtype, x.stride()) for x in on_cpu] == [(x.shape, x.dtype, x.stride()) for x in on_meta]
    assert sorted(meta_calls) == sorted(cpu_calls + scratch)


def _recorded(inputs: Inputs, segments: Table, device: torch.device) -> tuple[list[Tensor], list[str]]:
    """Return output and gradients on ``device`` and the names of the operators that ran."""
    names: list[str] = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    moved = [x.detach().to(device).requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    grad = inputs.grad.to(device)
    bound = BoundAttention.bind(attention_plan(*segments), CpuFlashKernel(1), device)
    with Names():
        out = tree_attention(*moved, bound, 0.4)
        grads = torch.autograd.grad(out, moved, grad)
    return [out.detach(), *grads], names
