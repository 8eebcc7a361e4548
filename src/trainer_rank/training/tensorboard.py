"""Figures of a run for TensorBoard."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from trainer_rank.errors import ConfigError
from trainer_rank.training.callbacks import Scalars


class TensorBoard:
    """Writes every figure into event files in the folder ``path``; a callback.

    Raises:
        ConfigError: The package tensorboard is not installed.
    """

    def __init__(self, path: Path) -> None:
        check_installed()
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(path)

    def __call__(self, step: int, scalars: Scalars) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name if "/" in name else f"step/{name}", value, step)
        self._writer.flush()

    def close(self) -> None:
        """Finish the event file."""
        self._writer.close()


def check_installed() -> None:
    """Raise ``ConfigError`` when the package tensorboard is missing."""
    if importlib.util.find_spec("tensorboard") is None:
        raise ConfigError(
            "tensorboard: needs the package 'tensorboard', which is not installed; run: pip install tensorboard, or "
            "set tensorboard: false"
        )
