"""Where an interrupted run goes on: its folder, its newest whole checkpoint, and what changed since.

Nothing on the disk changes before the checkpoint is known to belong to the model that was loaded.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import yaml

from trainer_rank.errors import ConfigError, TrainingError
from trainer_rank.session import TrainerRank
from trainer_rank.training.checkpoint import Checkpoint, Checkpoints, load_checkpoint
from trainer_rank.training.config import TrainConfig
from trainer_rank.training.config_changes import Change, changes
from trainer_rank.training.durable import Disk, replace_file
from trainer_rank.training.environment import versions
from trainer_rank.training.load_config import dump_config
from trainer_rank.training.plan_log import NAME as PLANS
from trainer_rank.training.progress import Progress
from trainer_rank.training.run_folder import LINE_FILES, next_number

LATEST: Final = "latest"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """An interrupted run, found and compared with the configuration it is to go on with.

    Attributes:
        path: The run folder.
        checkpoint: Where it goes on; None when it was interrupted before the first one, and begins again.
        changed: Keys whose values are not the recorded ones.
        repeats: Whether steps that were begun are split as they were.
    """

    path: Path
    checkpoint: Checkpoint | None
    changed: tuple[Change, ...]
    repeats: bool = True

    @property
    def step(self) -> int:
        """Optimizer steps behind it."""
        return 0 if self.checkpoint is None else self.checkpoint.step

    @property
    def seconds(self) -> float:
        """Seconds the run took up to here."""
        return 0.0 if self.checkpoint is None else float(self.checkpoint.state["seconds"])

    def is_finished(self, num_steps: int) -> bool:
        """Return whether a run of ``num_steps`` steps is complete."""
        return self.step >= num_steps and (self.path / "summary.json").is_file()

    def check_length(self, num_steps: int) -> None:
        """Raise ``ConfigError`` when the run is longer already than ``num_steps`` steps."""
        if self.step > num_steps:
            raise ConfigError(
                f"--resume: the run must be at least as long as what is done of it, got {num_steps} steps and a "
                f"checkpoint after step {self.step}; raise steps or epochs"
            )

    def load(self, rank: TrainerRank) -> None:
        """Load the checkpoint into ``rank``, or without one what the run knew of memory when it began.

        Raises:
            ConfigError: The checkpoint is of another model. Nothing was loaded.
        """
        if self.checkpoint is not None:
            load_checkpoint(self.checkpoint, rank)
        elif (begun := self.path / "learned.json").is_file():
            rank.load_learned(json.loads(begun.read_text(encoding="utf-8")))

    def cut_back(self, config: TrainConfig, *, disk: Disk | None = None) -> None:
        """Cut the files of the run back to the checkpoint; what is cut off goes into ``interrupted/<number>/``.

        Raises:
            TrainingError: The files cannot be written. What they held is there still, in them or in ``interrupted``.
        """
        lengths: Mapping[str, int] = {} if self.checkpoint is None else self.checkpoint.state["lengths"]
        try:
            Checkpoints(self.path, keep=config.keep_checkpoints).set_aside(self.step)
            self._cut(lengths, dump_config(config).encode(), Disk() if disk is None else disk)
        except OSError as error:
            raise TrainingError(
                f"{self.path}: its files cannot be cut back to the checkpoint ({error.strerror}); nothing of them is "
                "lost. Make room there, then resume again"
            ) from error

    def _cut(self, lengths: Mapping[str, int], config: bytes, disk: Disk) -> None:
        kept: dict[str, bytes] = {}
        cut: dict[str, bytes] = {}
        for name in (*LINE_FILES, PLANS):
            path = self.path / name
            content = path.read_bytes() if path.is_file() else b""
            # A line that was being written when the process died has no end.
            length = content.rfind(b"\n") + 1 if name == PLANS else lengths.get(name, 0)
            if len(content) > length:
                kept[name], cut[name] = content[:length], content[length:]
        before = (self.path / "config.yaml").read_bytes()
        if before != config:
            kept["config.yaml"], cut["config.yaml"] = config, before
        summary = self.path / "summary.json"
        if summary.is_file():
            cut["summary.json"] = summary.read_bytes()
        if not cut:
            return
        (self.path / "interrupted").mkdir(exist_ok=True)
        folder = next_number(self.path / "interrupted")
        for name, content in cut.items():
            replace_file(folder / name, content, disk=disk)
        for name, content in kept.items():
            replace_file(self.path / name, content, disk=disk)
        summary.unlink(missing_ok=True)


def find_resumption(
    config: TrainConfig, resume: str, *, data_digest: str, allow_changed: bool, progress: Progress
) -> Resumption:
    """Return the run that ``resume`` names, ready to go on with ``config``; says what changed.

    Args:
        config: What it is to go on with.
        resume: A run folder, or ``latest`` for the one with the highest number in ``run_dir``.
        data_digest: Of the training data as they are now.
        allow_changed: Go on even if the steps to come are those of another run, and split all of them anew.
        progress: Told where the run goes on and what changed.

    Raises:
        ConfigError: There is no such run, or its configuration or data changed so that it is another run.
    """
    path = _latest(Path(config.run_dir)) if resume == LATEST else Path(resume)
    if not (path / "config.yaml").is_file():
        raise ConfigError(f"--resume: must be a run folder with a config.yaml or 'latest', got {str(path)!r}")
    checkpoint = Checkpoints(path, keep=config.keep_checkpoints).newest()
    found = list(changes(_recorded(path, checkpoint), config))
    if checkpoint is not None:
        found += _surroundings(checkpoint, config, data_digest)
    _judge(found, allow_changed=allow_changed)
    resumption = Resumption(path=path, checkpoint=checkpoint, changed=tuple(found), repeats=not allow_changed)
    where = "it has no checkpoint, so it begins again" if checkpoint is None else f"from {checkpoint.path}"
    progress.note(f"resuming {path} after step {resumption.step}: {where}")
    if found:
        progress.note(f"changed since: {'; '.join(map(str, found))}")
    return resumption


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file, or of all files of a folder in order of their names, in hexadecimal."""
    digest = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(one for one in path.rglob("*") if one.is_file()):
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def _recorded(path: Path, checkpoint: Checkpoint | None) -> Mapping[str, Any]:
    if checkpoint is not None:
        entries: Mapping[str, Any] = checkpoint.state["config"]
        return entries
    try:
        read = yaml.safe_load((path / "config.yaml").read_text(encoding="utf-8"))
    except yaml.YAMLError:
        read = None
    if not isinstance(read, dict):
        raise ConfigError(f"--resume: {path / 'config.yaml'} is not a configuration, and there is no checkpoint; "
                          "start a new run")  # fmt: skip
    return read


def _surroundings(checkpoint: Checkpoint, config: TrainConfig, data_digest: str) -> list[Change]:
    """Return what changed outside the configuration: data, versions, and the threads that torch takes by itself."""
    state = checkpoint.state
    found = []
    if state["data"] != data_digest:
        key, fault = f"the content of {config.data.path}", "the steps to come are those of another run"
        found.append(Change(key=key, before=state["data"][:16], after=data_digest[:16], fault=fault))
    before, after = dict(state["versions"]), versions()
    if config.threads is None and state["config"]["threads"] is None:
        before["threads in use"], after["threads in use"] = str(state["threads"]), str(torch.get_num_threads())
    found += [
        Change(
            key=name, before=before.get(name), after=after.get(name), caution="numbers may differ in their last bits"
        )
        for name in {**before, **after}
        if before.get(name) != after.get(name)
    ]
    return found


def _judge(found: list[Change], *, allow_changed: bool) -> None:
    refused = [str(change) for change in found if change.fault]
    if refused and not allow_changed:
        raise ConfigError(
            f"--resume: the run would not be the one that was interrupted: {'; '.join(refused)}. Give it the values "
            "it had, or --allow-changed to go on with the new ones"
        )
    inexact = [str(change) for change in found if change.caution]
    if inexact:
        warnings.warn(f"the resumed run is not bit-exact: {'; '.join(inexact)}", RuntimeWarning, stacklevel=3)


def _latest(run_dir: Path) -> Path:
    # A folder without a configuration is a run that died as it began.
    numbered = [one.parent for one in run_dir.glob("*/config.yaml") if one.parent.name.isdecimal()]
    if not numbered:
        raise ConfigError(f"--resume latest: run_dir must hold a run, and {str(run_dir)!r} holds none; leave it out")
    return max(numbered, key=lambda one: int(one.name))
