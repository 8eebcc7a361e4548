"""How much of a CPU budget one admission may hand out. Arithmetic only; imports no torch.

The budget is a promise about the whole process, so what the process holds outside the allocator (Python, libraries,
tensors older than the meter) is taken off it, and so is a reserve for what grows outside the allocator during a pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from trainer_rank.meters.host_memory import HostMemory
from trainer_rank.units import MIB, parse_bytes

# A stated budget keeps this back for heap growth, kernels' scratch memory and page rounding (docs/meters.md).
STATED_RESERVE_BYTES: Final = 64 * MIB
STATED_RESERVE_FRACTION: Final = 1 / 50

# Without one, other processes are unknown too: the kernel kills rather than refuses, so more is kept back.
DEFAULT_RESERVE_BYTES: Final = 512 * MIB
DEFAULT_RESERVE_FRACTION: Final = 1 / 20

# Small tensors (a loss, an index) still work between passes on a process that is at its budget.
WORKING_BYTES: Final = 16 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuBudget:
    """A budget and its reserve, in bytes, both fixed when the meter opens."""

    budget_bytes: int
    reserve_bytes: int

    @classmethod
    def resolve(cls, memory_budget: int | str | None, reserve_bytes: int | None, host: HostMemory) -> CpuBudget:
        """Return the stated budget, or all that the kernel can give this process now, with its reserve.

        Raises:
            ValueError: ``memory_budget`` or ``reserve_bytes`` is not a non-negative number of bytes.
        """
        if memory_budget is None:
            budget = host.resident_bytes() + host.growth_bytes()
            reserve = max(DEFAULT_RESERVE_BYTES, int(budget * DEFAULT_RESERVE_FRACTION))
        else:
            budget = parse_bytes(memory_budget, field="memory_budget")
            reserve = max(STATED_RESERVE_BYTES, int(budget * STATED_RESERVE_FRACTION))
        if reserve_bytes is not None:
            reserve = parse_bytes(reserve_bytes, field="reserve_bytes")
        return cls(budget_bytes=budget, reserve_bytes=reserve)

    def available_bytes(self, *, outside_bytes: int, live_bytes: int, growth_bytes: int) -> int:
        """Return what an admission may hand out: within the budget, within what the kernel can give, at least 0.

        Args:
            outside_bytes: Resident bytes that the allocator does not own.
            live_bytes: Bytes live in the allocator. What it caches is not taken off: it is dropped on demand.
            growth_bytes: What the kernel can give beyond the resident set. Cached blocks are in the resident set, so
                they are in neither ``growth_bytes`` nor the result twice.
        """
        within_budget = self.budget_bytes - outside_bytes - live_bytes
        return max(0, min(within_budget, growth_bytes) - self.reserve_bytes)

    def cap_bytes(self, *, available_bytes: int, live_bytes: int) -> int:
        """Return the hard cap on live plus cached bytes that goes with ``available_bytes``."""
        return live_bytes + max(available_bytes, min(WORKING_BYTES, self.reserve_bytes))
