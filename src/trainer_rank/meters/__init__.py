"""Device memory, measured: what is live, what is resident, what one admission may hand out.

Concrete meters import torch, so they are reached through ``open_meter`` or their own modules, and ``Simulated`` when it
is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainer_rank.meters.base import Meter, Reading
from trainer_rank.meters.devices import DEVICES, Device, find_device
from trainer_rank.meters.open import open_meter
from trainer_rank.meters.simulated import SimulatedMeter, SimulatedOutOfMemoryError

if TYPE_CHECKING:
    from trainer_rank.meters.simulated_device import Simulated

__all__ = [
    "DEVICES",
    "Device",
    "Meter",
    "Reading",
    "Simulated",
    "SimulatedMeter",
    "SimulatedOutOfMemoryError",
    "find_device",
    "open_meter",
]


def __getattr__(name: str) -> Any:
    if name == "Simulated":
        from trainer_rank.meters.simulated_device import Simulated

        return Simulated
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
