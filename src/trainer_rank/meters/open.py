"""Choosing the meter for a device. Concrete meters, and with them torch, are imported only here and only on a call."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Literal

from trainer_rank.errors import MeterError
from trainer_rank.meters.base import Meter

if TYPE_CHECKING:
    import torch

CpuMechanism = Literal["auto", "counting", "tracking"]


def open_meter(
    device: str | torch.device = "cpu",
    memory_budget: int | str | None = None,
    *,
    reserve_bytes: int | None = None,
    cpu: CpuMechanism = "auto",
) -> Meter:
    """Return a meter for ``device`` with its cap armed.

    Args:
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:<index>"``, as a string or a ``torch.device``.
        memory_budget: All bytes that may be in use on the device, weights included. None: what the device can give.
        reserve_bytes: Part of it kept for what no allocator sees. None: the meter's own default. CPU only.
        cpu: ``"counting"`` needs a C++ compiler once per machine; ``"tracking"`` needs none and is slower and less
            exact; ``"auto"`` takes the first that works and warns when it is the second.

    Raises:
        ValueError: An argument is malformed; the message names it.
        MeterError: There is no such device, or its memory cannot be measured here.
    """
    device = str(device)
    kind = device.partition(":")[0]
    if kind == "cuda":
        if reserve_bytes is not None:
            raise ValueError("reserve_bytes is for the CPU; open a CudaMeter with reserve_fraction instead")
        from trainer_rank.meters.cuda import CudaMeter

        return CudaMeter(device, memory_budget)
    if kind != "cpu":
        raise MeterError(f"device must be 'cpu', 'cuda' or 'cuda:<index>', got {device!r}")
    if cpu not in ("auto", "counting", "tracking"):
        raise ValueError(f"cpu must be 'auto', 'counting' or 'tracking', got {cpu!r}")
    if cpu != "tracking":
        from trainer_rank.meters.counting_lib import AllocatorBuildError
        from trainer_rank.meters.cpu import CpuMeter

        try:
            return CpuMeter(memory_budget, reserve_bytes)
        except AllocatorBuildError as error:
            if cpu == "counting":
                raise
            warnings.warn(
                f"CPU memory is measured by tracking operators, which is slower and caps only after the fact: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
    from trainer_rank.meters.tracking import TrackingCpuMeter

    return TrackingCpuMeter(memory_budget, reserve_bytes)
