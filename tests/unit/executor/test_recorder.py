"""What a dry run records on ``meta`` against what the counting allocator counts for the same code on the CPU."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from trainer_rank.executor.recorder import AllocationRecorder
from trainer_rank.memory import fold
from trainer_rank.meters import Meter, open_meter

Make = Callable[..., Tensor]
"""``make(rows, columns, dtype=...)``: a tensor on the device at hand."""


@pytest.fixture(scope="module")
def meter() -> Iterator[Meter]:
    with open_meter("cpu", cpu="counting") as opened:
        yield opened


def tied(make: Make) -> None:
    """Two large gradients of one tensor: the second is added to the first in place."""
    weight, hidden = make(500, 8).requires_grad_(), make(3, 8)
    ((hidden @ weight.t()) @ weight).sum().backward()


def shared(make: Make) -> None:
    """A gradient that two paths share cannot be added to in place while the other still needs it."""
    x, weight = make(400, 8).requires_grad_(), make(8, 8).requires_grad_()
    hidden = x * 2.0
    for _ in range(3):
        hidden = hidden + torch.tanh(hidden @ weight)
    hidden.square().sum().backward()


def narrow_in_place(make: Make) -> None:
    """A bfloat16 tensor divided in place by a float32 one: both the copy and the result are float32."""
    make(300, 8, dtype=torch.bfloat16).div_(make(300, 1))


def narrow_operand(make: Make) -> None:
    """A bfloat16 operand of a float32 sum is copied in full."""
    _ = make(300, 8) + make(300, 8, dtype=torch.bfloat16)


def narrow_into_wide(make: Make) -> None:
    """In place on the wider tensor only the operand is copied."""
    make(300, 8).mul_(make(300, 8, dtype=torch.bfloat16))


def views(make: Make) -> None:
    """Views and in-place results cost nothing; a tensor counts until its last view is gone."""
    x = make(300, 8)
    part = x.t()[2:5]
    del x
    part.add_(1.0)
    _ = part.clone()


@pytest.mark.parametrize("body", [tied, shared, narrow_in_place, narrow_operand, narrow_into_wide, views])
def test_the_recorded_peak_is_the_counted_one(meter: Meter, body: Callable[[Make], None]) -> None:
    """To within a few scalars, which ``meta`` does not need."""
    recorder = AllocationRecorder(torch.device("meta"), torch.device("cpu"))
    with recorder:
        body(lambda *shape, dtype=torch.float32: torch.ones(*shape, dtype=dtype, device="meta"))
    recorded = fold(recorder.trace(num_layers=1)).peak.peak_bytes
    gc.collect()
    before = meter.read().allocated_bytes
    meter.reset_peak()
    body(lambda *shape, dtype=torch.float32: torch.ones(*shape, dtype=dtype))
    counted = meter.read().peak_allocated_bytes - before
    assert recorded == pytest.approx(counted, abs=64)


def test_nothing_is_left_when_everything_is_dropped() -> None:
    """Every storage that appears vanishes: a dry run ends where it began."""
    recorder = AllocationRecorder(torch.device("meta"), torch.device("cpu"))
    with recorder:
        shared(lambda *shape, dtype=torch.float32: torch.ones(*shape, dtype=dtype, device="meta"))
    gc.collect()
    assert fold(recorder.trace(num_layers=1)).instants[-1].end_bytes == 0


def test_another_device_is_not_recorded() -> None:
    """Indices built on the host cost no device memory."""
    recorder = AllocationRecorder(torch.device("meta"), torch.device("cpu"))
    with recorder:
        _ = torch.ones(1000)
    assert fold(recorder.trace(num_layers=1)).peak.peak_bytes == 0


def test_cuda_converts_inside_its_kernels() -> None:
    """A dry run that stands for CUDA has no copies of narrower operands."""
    peaks = {}
    for device in ("cpu", "cuda"):
        recorder = AllocationRecorder(torch.device("meta"), torch.device(device))
        with recorder:
            narrow_operand(lambda *shape, dtype=torch.float32: torch.ones(*shape, dtype=dtype, device="meta"))
        peaks[device] = fold(recorder.trace(num_layers=1)).peak.peak_bytes
    assert peaks["cpu"] - peaks["cuda"] == 300 * 8 * 4
