"""The CUDA checks on a machine that has no CUDA device."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[3] / "scripts" / "gpu_check.sh"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_without_a_device_the_checks_are_skipped() -> None:
    """One line that says so, and success."""
    done = subprocess.run([SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    (line,) = done.stdout.splitlines()
    assert "there is no CUDA device" in line
