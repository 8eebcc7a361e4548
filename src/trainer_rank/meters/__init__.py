"""Device memory, measured: what is live, what is resident, what one admission may hand out.

Concrete meters import torch, so they are reached through ``open_meter`` or their own modules.
"""

from trainer_rank.meters.base import Meter, Reading
from trainer_rank.meters.open import open_meter
from trainer_rank.meters.simulated import SimulatedMeter, SimulatedOutOfMemoryError

__all__ = ["Meter", "Reading", "SimulatedMeter", "SimulatedOutOfMemoryError", "open_meter"]
