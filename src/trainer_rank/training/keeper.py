"""Keeps the checkpoints of a running run: knows what is done and writes what is due."""

from __future__ import annotations

import time
import warnings
from pathlib import Path

import torch

from trainer_rank.errors import TrainingError
from trainer_rank.session import TrainerRank
from trainer_rank.training.checkpoint import Checkpoints
from trainer_rank.training.config import TrainConfig
from trainer_rank.training.resume import Resumption
from trainer_rank.training.run_folder import RunFolder


class Keeper:
    """The steps behind a run, and their checkpoints.

    Attributes:
        done: Complete optimizer steps, those before the resumption included.
    """

    def __init__(
        self, config: TrainConfig, rank: TrainerRank, folder: RunFolder, resumption: Resumption | None, data_digest: str
    ) -> None:
        self._config = config
        self._rank = rank
        self._folder = folder
        self._data_digest = data_digest
        self._checkpoints = Checkpoints(folder.path, keep=config.keep_checkpoints)
        self._begin = time.perf_counter()
        self._seconds_before = 0.0 if resumption is None else resumption.seconds
        self.done = 0 if resumption is None else resumption.step
        self._saved = None if resumption is None or resumption.checkpoint is None else resumption.step

    @property
    def seconds(self) -> float:
        """Seconds the run took so far, in all processes, up to the checkpoint each of them went on from."""
        return self._seconds_before + time.perf_counter() - self._begin

    def stepped(self, number: int) -> None:
        """Step ``number`` is complete: write the checkpoint that is due.

        One that cannot be written is warned of, and the run goes on with the one before it: what was computed since
        would be lost otherwise.
        """
        self.done = number
        every = self._config.checkpoint_every
        if every is None or number % every:
            return
        try:
            self.save()
        except TrainingError as error:
            warnings.warn(f"{error}. The run goes on", RuntimeWarning, stacklevel=2)

    def save(self) -> Path:
        """Write the checkpoint of the last complete step, unless it is there, and return its folder.

        Raises:
            TrainingError: It cannot be written.
        """
        if self._saved != self.done:
            entries = {
                "seconds": self.seconds,
                "config": self._config.model_dump(mode="json"),
                "data": self._data_digest,
                "threads": torch.get_num_threads(),
                "lengths": self._folder.lengths(),
            }
            self._checkpoints.write(self._rank, step=self.done, entries=entries)
            self._saved = self.done
        return self._checkpoints.path(self.done)
