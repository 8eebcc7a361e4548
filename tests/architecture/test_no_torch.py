"""The pure layers import no torch: that is why planning, pricing and replay run anywhere, in milliseconds."""

from __future__ import annotations

import subprocess
import sys

import pytest

PURE = [
    "trainer_rank",
    "trainer_rank.requests",
    "trainer_rank.prefix",
    "trainer_rank.memory",
    "trainer_rank.admission",
    "trainer_rank.planner",
    "trainer_rank.report",
    "trainer_rank.errors",
    "trainer_rank.units",
]
HEAVY = ("torch", "transformers", "peft", "accelerate")


def heavy_modules(*imported: str) -> list[str]:
    """Return the heavy modules that a fresh process has loaded after importing the given ones."""
    code = f"import sys, {', '.join(imported)}\nprint(*(name for name in {HEAVY!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_the_pure_layers_import_nothing_heavy() -> None:
    """All of them together leave torch and the model libraries out."""
    assert heavy_modules(*PURE) == []


def test_the_check_can_fail() -> None:
    """A module that does import torch is caught by the very same check."""
    assert "torch" in heavy_modules(*PURE, "trainer_rank.session")


@pytest.mark.parametrize("name", ["TrainerRank", "TransformersRuntime"])
def test_lazy_names_import_it_when_they_are_used(name: str) -> None:
    """``from trainer_rank import TrainerRank`` works without a second import."""
    code = f"import sys\nfrom trainer_rank import {name}\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "True", done.stderr
