"""Checkpoints on the disk: whole or not there, whatever fills the disk, and equal in bits when loaded."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from safetensors.torch import load_file

from tests.builders import completions, run, tiny_runtime
from trainer_rank.errors import ConfigError, TrainingError
from trainer_rank.session import TrainerRank
from trainer_rank.training import tensor_file
from trainer_rank.training.checkpoint import Checkpoint, Checkpoints, _signed, load_checkpoint, open_checkpoint
from trainer_rank.training.durable import Data, Disk

ENTRIES: dict[str, Any] = {"config": {}, "data": "0", "seconds": 1.5, "lengths": {}}


class FullDisk(Disk):
    """A disk with room for ``room`` more operations that write or force; the next one finds it full."""

    def __init__(self, room: int) -> None:
        self.room = room

    def write(self, file: BinaryIO, data: Data) -> None:
        if self.room == 0:
            # Half of it is on the disk already, as it would be.
            super().write(file, bytes(data)[: len(data) // 2])
        self._use()
        super().write(file, data)

    def sync(self, descriptor: int) -> None:
        self._use()
        super().sync(descriptor)

    def _use(self) -> None:
        if self.room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.room -= 1


def trained(steps: int = 2, *, lora: bool = True, seed: int = 0) -> TrainerRank:
    """Return a rank with some steps behind it."""
    rank = TrainerRank(tiny_runtime(lora=lora, dtype=torch.float32), verify_backend=False)
    for step in range(steps):
        run(rank, completions([4, 6], seed=seed + step))
        rank.optim_step(lr=1e-2)
    return rank


def values(rank: TrainerRank) -> dict[str, torch.Tensor]:
    """Return copies of weights and optimizer state."""
    found = {**rank.runtime.trained(), **rank.optimizer_state()}
    return {name: tensor.detach().clone() for name, tensor in found.items()}


@pytest.mark.parametrize("lora", [True, False])
def test_what_is_loaded_is_what_was_written(tmp_path: Path, lora: bool) -> None:
    """Weights, moments and counters, bit for bit; and the next step from there too."""
    rank, other = trained(lora=lora), trained(steps=1, lora=lora, seed=7)
    Checkpoints(tmp_path, keep=2).write(rank, step=2, entries=ENTRIES)
    found = Checkpoints(tmp_path, keep=2).newest()
    assert found is not None
    assert (found.step, found.state["seconds"]) == (2, 1.5)
    load_checkpoint(found, other)
    for one in (rank, other):
        run(one, completions([5, 3], seed=3))
        one.optim_step(lr=1e-2)
    wanted = values(rank)
    assert len(wanted) == 4 * len(rank.runtime.trainable_parameters())
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in values(other).items())


def test_the_adapter_of_a_checkpoint_is_peft_s_own(tmp_path: Path) -> None:
    """The same names and bits as saving through PEFT, and a configuration that PEFT reads."""
    rank = trained()
    path = Checkpoints(tmp_path, keep=2).write(rank, step=2, entries=ENTRIES)
    rank.save_adapter(tmp_path / "adapter")
    ours, theirs = (
        load_file(path / "adapter_model.safetensors"),
        load_file(tmp_path / "adapter/adapter_model.safetensors"),
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    one, other = (
        json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        for folder in (path, tmp_path / "adapter")
    )
    # These two say where the base model came from; this one never was on a disk.
    for name in ("auto_mapping", "base_model_name_or_path"):
        del one[name], other[name]
    # PEFT keeps them as a set, whose order is another in every process.
    one["target_modules"], other["target_modules"] = sorted(one["target_modules"]), sorted(other["target_modules"])
    assert one == other
    assert one["r"] == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_tensor_file_is_what_the_library_reads(tmp_path: Path, dtype: torch.dtype) -> None:
    """Scalars, empty tensors, views that are not contiguous and every dtype keep their bits."""
    tensors = {
        "scalar": torch.tensor(3.5, dtype=dtype),
        "empty": torch.empty(0, 4, dtype=dtype),
        "turned": torch.randn(3, 5).to(dtype).T,
    }
    path = tmp_path / "tensors.safetensors"
    path.write_bytes(b"".join(bytes(piece) for piece in tensor_file.pieces(tensors)))
    found = load_file(path)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    with pytest.raises(ValueError, match="2 tensors are in the file or in the model only, first 'empty'"):
        tensor_file.copy_into(path, {"scalar": tensors["scalar"]})


def test_a_full_disk_leaves_the_checkpoint_before_and_nothing_of_the_new_one(tmp_path: Path) -> None:
    """Full at each write and each force in turn: the older one stays whole and newest, the partial one is gone."""
    rank = trained()
    Checkpoints(tmp_path, keep=1).write(rank, step=2, entries=ENTRIES)
    for room in range(1000):
        checkpoints = Checkpoints(tmp_path, keep=1, disk=FullDisk(room))
        failure = None
        try:
            checkpoints.write(rank, step=3, entries=ENTRIES)
        except TrainingError as error:
            failure = str(error)
        if failure is None:
            break
        assert str(checkpoints.path(3)) in failure
        for part in ("No space left", "it takes about", "Older checkpoints are as they were", "Make room"):
            assert part in failure
        found = checkpoints.newest()
        assert found is not None
        # The last force is that of the folder around it, when it has its name already.
        assert found.step == 2 or isinstance(open_checkpoint(checkpoints.path(3)), Checkpoint)
        assert isinstance(open_checkpoint(checkpoints.path(2)), Checkpoint)
        assert not list(checkpoints.folder.glob(".*"))
    assert room > 10
    assert [path.name for path in checkpoints.folder.iterdir()] == ["step-000003"]


def test_every_file_that_is_changed_is_found_out(tmp_path: Path) -> None:
    """Cut in half, one bit turned, or gone: the reason names the file."""
    path = Checkpoints(tmp_path, keep=2).write(trained(), step=2, entries=ENTRIES)
    assert isinstance(open_checkpoint(path), Checkpoint)
    files = sorted(path.iterdir())
    assert len(files) == 4
    for file in files:
        content = file.read_bytes()
        middle = len(content) // 2
        for wrong in (content[:middle], content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :], b""):
            file.write_bytes(wrong)
            reason = open_checkpoint(path)
            assert isinstance(reason, str)
            assert file.name in reason
        file.unlink()
        assert f"{file.name} cannot be read" in str(open_checkpoint(path))
        file.write_bytes(content)
    assert isinstance(open_checkpoint(path), Checkpoint)


def test_only_the_newest_are_kept_and_the_old_go_last(tmp_path: Path) -> None:
    """Three written, two kept; a folder that is no checkpoint stays."""
    rank = trained(steps=0)
    checkpoints = Checkpoints(tmp_path, keep=2)
    (checkpoints.folder / "step-mine").mkdir(parents=True)
    for step in (8, 9, 10):
        checkpoints.write(rank, step=step, entries=ENTRIES)
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["step-000009", "step-000010", "step-mine"]


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    """A damaged one that was reached again, for example."""
    checkpoints = Checkpoints(tmp_path, keep=2)
    path = checkpoints.write(trained(), step=2, entries=ENTRIES)
    (path / "state.json").write_text("{", encoding="utf-8")
    with pytest.warns(RuntimeWarning, match="step-000002 is damaged and skipped"):
        assert checkpoints.newest() is None
    checkpoints.write(trained(), step=2, entries=ENTRIES)
    assert checkpoints.newest() is not None


def test_another_schema_is_an_error_and_not_a_damage(tmp_path: Path) -> None:
    """Both versions are named, and the package that wrote it."""
    path = Checkpoints(tmp_path, keep=2).write(trained(steps=0), step=0, entries=ENTRIES)
    state = json.loads((path / "state.json").read_text(encoding="utf-8"))
    del state["digest"]
    (path / "state.json").write_bytes(_signed({**state, "schema": 99}))
    with pytest.raises(ConfigError, match=r"schema must be 1, got 99; resume it with trainer-rank"):
        Checkpoints(tmp_path, keep=2).newest()
