"""The arithmetic of a CPU budget."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_rank.meters.cpu_budget import CpuBudget
from trainer_rank.meters.host_memory import HostMemory
from trainer_rank.units import GIB, MIB

SIZES = st.integers(0, 2**40)


@given(SIZES, SIZES, SIZES, SIZES, SIZES)
def test_a_process_that_uses_all_it_is_offered_keeps_its_budget(
    budget: int, reserve: int, outside: int, live: int, growth: int
) -> None:
    """Outside, live and available bytes and the reserve fit the budget, and the growth the kernel allows."""
    limits = CpuBudget(budget_bytes=budget, reserve_bytes=reserve)
    available = limits.available_bytes(outside_bytes=outside, live_bytes=live, growth_bytes=growth)
    assert available >= 0
    if available > 0:
        assert outside + live + available + reserve <= budget
        assert available + reserve <= growth


@given(SIZES, SIZES, SIZES)
def test_the_cap_holds_the_offer_and_never_eats_more_than_the_reserve(available: int, live: int, reserve: int) -> None:
    """An admission of all that is available passes the cap; beyond it only part of the reserve can be used."""
    cap = CpuBudget(budget_bytes=0, reserve_bytes=reserve).cap_bytes(available_bytes=available, live_bytes=live)
    assert live + available <= cap <= live + available + reserve


def test_the_default_reserve_of_a_stated_budget(tmp_path: Path) -> None:
    """64 MiB or 2 %, whichever is more."""
    host = HostMemory(root=tmp_path)
    assert CpuBudget.resolve("1GiB", None, host).reserve_bytes == 64 * MIB
    assert CpuBudget.resolve("100GiB", None, host).reserve_bytes == 2 * GIB
    assert CpuBudget.resolve("1GiB", 5, host).reserve_bytes == 5


@pytest.mark.parametrize(("budget", "rule"), [("2 gigs", "number of bytes"), (-1, "not be negative"), (1.5, "an int")])
def test_a_malformed_budget_names_its_field(tmp_path: Path, budget: object, rule: str) -> None:
    """The caller learns which argument is wrong and how."""
    with pytest.raises(ValueError, match=f"memory_budget must .*{rule}"):
        CpuBudget.resolve(budget, None, HostMemory(root=tmp_path))  # type: ignore[arg-type]


def test_a_malformed_reserve_names_its_field(tmp_path: Path) -> None:
    """Each field is named by itself."""
    with pytest.raises(ValueError, match="reserve_bytes must not be negative"):
        CpuBudget.resolve("1GiB", -1, HostMemory(root=tmp_path))
