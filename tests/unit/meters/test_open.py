"""Which meter a device gets."""

from __future__ import annotations

import pytest
import torch

from tests.unit.meters.isolation import run_python
from trainer_rank.errors import MeterError
from trainer_rank.meters import open_meter


def test_the_cpu_gets_the_counting_allocator() -> None:
    """Where a compiler exists, and for a device given as torch's own type too."""
    with open_meter(torch.device("cpu"), "4GiB") as meter:
        assert (meter.name, meter.device) == ("cpu-counting", "cpu")
        assert meter.read().budget_bytes == 4 * 2**30


def test_tracking_can_be_asked_for() -> None:
    """No compiler, no warning."""
    with open_meter("cpu", "4GiB", cpu="tracking") as meter:
        assert meter.name == "cpu-tracking"


@pytest.mark.parametrize("missing", [{"CXX": "no-such-compiler"}, {"PATH": "", "CXX": ""}])
def test_without_a_compiler_tracking_steps_in_with_a_warning(missing: dict[str, str], tmp_path: object) -> None:
    """The warning says what is lost and why, and the meter works."""
    out = run_python(
        """
        import warnings, torch
        from trainer_rank.meters import open_meter
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            meter = open_meter("cpu", "4GiB")
        tensor = torch.ones(1000)
        print(meter.name, meter.read().allocated_bytes, len(caught))
        print(caught[0].message)
        meter.close()
        """,
        XDG_CACHE_HOME=str(tmp_path),
        **missing,
    )
    first, message = out.splitlines()
    assert first == "cpu-tracking 4000 1"
    assert "tracking operators" in message
    assert "no C++ compiler found" in message


def test_counting_asked_for_without_a_compiler_is_an_error(tmp_path: object) -> None:
    """Only the automatic choice falls back."""
    out = run_python(
        """
        from trainer_rank.meters import open_meter
        from trainer_rank.meters.counting_lib import AllocatorBuildError
        try:
            open_meter("cpu", "4GiB", cpu="counting")
        except AllocatorBuildError as error:
            print(error)
        """,
        XDG_CACHE_HOME=str(tmp_path),
        CXX="no-such-compiler",
    )
    assert out.startswith("no C++ compiler found")


def test_an_unknown_device_is_refused() -> None:
    """The message lists what there is."""
    with pytest.raises(MeterError, match="device must be 'cpu', 'cuda' or 'cuda:<index>', got 'tpu'"):
        open_meter("tpu")


def test_an_unknown_mechanism_is_refused() -> None:
    """The message names the field."""
    with pytest.raises(ValueError, match="cpu must be 'auto', 'counting' or 'tracking'"):
        open_meter("cpu", cpu="exact")  # type: ignore[arg-type]


def test_a_reserve_for_cuda_points_to_its_own_setting() -> None:
    """An option that cannot be honoured is refused, not dropped."""
    with pytest.raises(ValueError, match="reserve_fraction"):
        open_meter("cuda", reserve_bytes=1)
