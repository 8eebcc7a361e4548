"""Checkpoints of a run: what they hold, how they are written, and whether one on the disk is whole.

    checkpoints/step-000010/
        adapter_model.safetensors   the adapter, as PEFT reads it; or model.safetensors, every trained weight
        adapter_config.json         with an adapter
        optimizer.safetensors       AdamW's two moments and step count of each trained parameter
        state.json                  schema, step, configuration, model, versions, what was learned of memory, size and
                                    SHA-256 of the other files

``state.json`` carries a digest of itself, so every byte of a checkpoint is covered. Nothing draws random numbers after
the adapter was made, so no state of a generator is part of it. The step is the place in the data as well: the schedule
gives the same groups to the same step for the same configuration and data.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from trainer_rank.errors import ConfigError, TrainingError
from trainer_rank.session import TrainerRank
from trainer_rank.training import tensor_file
from trainer_rank.training.durable import Disk, DurableFolder, facts_of
from trainer_rank.training.environment import versions
from trainer_rank.units import format_bytes

SCHEMA: Final = 1
FOLDER: Final = "checkpoints"
STATE: Final = "state.json"
OPTIMIZER: Final = "optimizer.safetensors"
ADAPTER: Final = "adapter_model.safetensors"
ADAPTER_CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "model.safetensors"
DAMAGED: Final = ".damaged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A whole checkpoint on the disk.

    Attributes:
        path: Its folder.
        step: Optimizer steps it has behind it.
        state: The content of ``state.json``.
    """

    path: Path
    step: int
    state: Mapping[str, Any]


class Checkpoints:
    """The checkpoints of one run folder."""

    def __init__(self, run_folder: Path, *, keep: int, disk: Disk | None = None) -> None:
        self.folder: Final = run_folder / FOLDER
        self._keep = keep
        self._disk = Disk() if disk is None else disk

    def path(self, step: int) -> Path:
        """Return the folder of the checkpoint after ``step`` steps."""
        return self.folder / f"step-{step:06d}"

    def write(self, rank: TrainerRank, *, step: int, entries: Mapping[str, Any]) -> Path:
        """Write what ``rank`` is after ``step`` steps, then remove all but the newest; return the folder.

        Args:
            rank: Between two steps, without gradients that matter.
            step: Steps behind it.
            entries: More JSON-able entries of ``state.json``: configuration, data, lengths of the run's files.

        Raises:
            TrainingError: The folder cannot be written, because the disk is full for example. Older checkpoints are as
                they were, and nothing of this one is left.
        """
        target = self.path(step)
        weights, optimizer = rank.runtime.trained(), rank.optimizer_state()
        adapter_config = rank.runtime.adapter_config()
        try:
            with DurableFolder(target, disk=self._disk) as folder:
                folder.write(WEIGHTS if adapter_config is None else ADAPTER, tensor_file.pieces(weights))
                if adapter_config is not None:
                    folder.write(ADAPTER_CONFIG, [adapter_config])
                folder.write(OPTIMIZER, tensor_file.pieces(optimizer))
                state = {
                    "schema": SCHEMA,
                    "step": step,
                    **entries,
                    "model": rank.runtime.identity(),
                    "learned": rank.learned(),
                    "versions": versions(),
                    "files": {name: asdict(facts) for name, facts in folder.files.items()},
                }
                folder.write(STATE, [_signed(state)])
                folder.commit()
        except OSError as error:
            needed = sum(one.numel() * one.element_size() for one in (*weights.values(), *optimizer.values()))
            raise TrainingError(
                f"checkpoint {target}: cannot be written ({error.strerror}); it takes about {format_bytes(needed)} and "
                f"{format_bytes(shutil.disk_usage(_existing(target)).free)} are free. Older checkpoints are as they "
                "were. Make room there, then continue with --resume"
            ) from error
        for old in self._numbered()[: -self._keep]:
            shutil.rmtree(self.path(old), ignore_errors=True)
        return target

    def newest(self) -> Checkpoint | None:
        """Return the newest whole checkpoint, None when there is none; warn of each damaged one that is newer.

        Raises:
            ConfigError: It was written by a version whose checkpoints this one does not read.
        """
        for step in reversed(self._numbered()):
            found = open_checkpoint(self.path(step))
            if isinstance(found, Checkpoint):
                return found
            warnings.warn(f"checkpoint {self.path(step)} is damaged and skipped: {found}", RuntimeWarning, stacklevel=2)
        return None

    def set_aside(self, after: int) -> None:
        """Rename the checkpoints after step ``after``, which ``newest`` skipped, so that they are never counted.

        What an earlier process left half written is removed.
        """
        for half in self.folder.glob(".step-*"):
            shutil.rmtree(half, ignore_errors=True)
        for step in self._numbered():
            if step > after:
                aside = self.path(step).with_suffix(DAMAGED)
                shutil.rmtree(aside, ignore_errors=True)
                self.path(step).rename(aside)

    def _numbered(self) -> list[int]:
        if not self.folder.is_dir():
            return []
        numbers = (entry.name.removeprefix("step-") for entry in self.folder.glob("step-*") if entry.is_dir())
        return sorted(int(number) for number in numbers if number.isdecimal())


def open_checkpoint(path: Path) -> Checkpoint | str:
    """Return the checkpoint in the folder ``path``, every byte checked, or what is wrong with it.

    Raises:
        ConfigError: It is whole, but of another schema.
    """
    try:
        content = (path / STATE).read_bytes()
    except OSError as error:
        return f"{STATE} cannot be read ({error.strerror})"
    try:
        state = json.loads(content)
    except ValueError:
        return f"{STATE} is not JSON"
    if not isinstance(state, dict) or _signed({key: state[key] for key in state if key != "digest"}) != content:
        return f"{STATE} does not have the digest it names"
    if state["schema"] != SCHEMA:
        raise ConfigError(
            f"checkpoint {path}: schema must be {SCHEMA}, got {state['schema']}; resume it with trainer-rank "
            f"{state['versions'].get('trainer-rank', 'of the version that wrote it')}"
        )
    for name, expected in state["files"].items():
        try:
            found = asdict(facts_of(path / name))
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        if found != expected:
            return f"{name} must be {expected}, got {found}"
    return Checkpoint(path=path, step=state["step"], state=state)


def load_checkpoint(checkpoint: Checkpoint, rank: TrainerRank) -> None:
    """Make ``rank`` what it was when ``checkpoint`` was written, bit for bit.

    Raises:
        ConfigError: The checkpoint is of another model or adapter; nothing was loaded.
    """
    saved, own = checkpoint.state["model"], rank.runtime.identity()
    different = [name for name in {**saved, **own} if saved.get(name) != own.get(name)]
    if different:
        sides = ", ".join(f"{name} {saved.get(name)!r} there and {own.get(name)!r} here" for name in different)
        raise ConfigError(
            f"checkpoint {checkpoint.path}: it is of another model: {sides}; give it the model.path and model.lora it "
            "was written with (they are in its state.json), or start a new run"
        )
    file = ADAPTER if rank.runtime.adapter_config() is not None else WEIGHTS
    tensor_file.copy_into(checkpoint.path / file, rank.runtime.trained())
    rank.load_optimizer_state(tensor_file.read(checkpoint.path / OPTIMIZER))
    if "learned" in checkpoint.state:
        rank.load_learned(checkpoint.state["learned"])


def _signed(state: Mapping[str, Any]) -> bytes:
    """Return the text of ``state.json``: the state with a digest of itself as the last entry."""
    text = json.dumps(state, sort_keys=True, allow_nan=False)
    signed = {**state, "digest": hashlib.sha256(text.encode()).hexdigest()}
    return (json.dumps(signed, indent=2, allow_nan=False) + "\n").encode()


def _existing(path: Path) -> Path:
    return next(parent for parent in path.parents if parent.exists())
