"""What a run leaves behind."""

from __future__ import annotations

import getpass
import json
import platform
from pathlib import Path

import pytest

from trainer_rank.errors import ConfigError, TrainingError
from trainer_rank.training.config import TrainConfig
from trainer_rank.training.environment import environment
from trainer_rank.training.line_file import append_line, whole_lines, write_record
from trainer_rank.training.load_config import load_config
from trainer_rank.training.records import EvaluationRecord
from trainer_rank.training.run_folder import RunFolder


def config(run_dir: Path) -> TrainConfig:
    """Return a valid configuration that writes to ``run_dir``."""
    return TrainConfig.model_validate(
        {"model": {"path": "m"}, "data": {"path": "d"}, "steps": 1, "run_dir": str(run_dir)}
    )


def test_folders_are_numbered_and_never_reused(tmp_path: Path) -> None:
    """A new run takes the number after the highest, gaps and other files notwithstanding."""
    (tmp_path / "007").mkdir()
    (tmp_path / "notes.txt").touch()
    names = [RunFolder.create(config(tmp_path), threads=1).path.name for _ in range(2)]
    assert names == ["008", "009"]


def test_the_recorded_config_gives_the_same_run(tmp_path: Path) -> None:
    """config.yaml in the folder is a valid configuration equal to the run's."""
    folder = RunFolder.create(config(tmp_path), threads=1)
    assert load_config(folder.path / "config.yaml") == config(tmp_path)


def test_a_run_dir_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    """The key and the reason are named."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"run_dir: cannot write to .*file"):
        RunFolder.create(config(tmp_path / "file"), threads=1)


def test_lines_are_on_disk_as_soon_as_they_are_written(tmp_path: Path) -> None:
    """A run that dies leaves every line before its death."""
    folder = RunFolder.create(config(tmp_path), threads=1)
    record = EvaluationRecord(step=0, requests=1, trained_tokens=2, loss=0.5, seconds=0.1)
    folder.evaluation(record)
    folder.evaluation(record)
    lines = (folder.path / "evaluations.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["loss"] for line in lines] == [0.5, 0.5]
    assert list(folder.contents()) == ["config.yaml", "environment.json", "evaluations.jsonl"]


def test_the_environment_identifies_no_machine_or_person() -> None:
    """Versions and hardware, but no host name, user, home or path."""
    record = environment(threads=2)
    text = json.dumps(record)
    assert record["threads"] == 2
    assert "torch" in record["versions"]
    assert str(Path.cwd()) not in text
    assert str(Path.home()) not in text or str(Path.home()) == "/"
    if len(platform.node()) > 3:
        assert platform.node() not in text
    if len(getpass.getuser()) > 4:
        assert getpass.getuser() not in text


def test_a_full_disk_ends_the_run_in_words() -> None:
    """File, reason and next step, for a line and for a whole record."""
    for write in (append_line, write_record):
        with pytest.raises(TrainingError, match=r"/dev/full: cannot be written \(No space left.*--resume"):
            write(Path("/dev/full"), {"step": 1})


def test_a_line_that_was_cut_off_is_no_line(tmp_path: Path) -> None:
    """A process that dies while it writes leaves half a line, and decisions are numbered on from the whole ones."""
    folder = RunFolder.create(config(tmp_path), threads=1)
    for _ in range(2):
        folder.decision({"decision": 1})
        folder.reopen()
    with (folder.path / "decisions.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"deci')
    assert [json.loads(line) for line in whole_lines(folder.path / "decisions.jsonl")] == [
        {"decision": 1},
        {"decision": 2},
    ]
    assert whole_lines(folder.path / "none.jsonl") == []
    lengths = folder.lengths()
    assert lengths == {"decisions.jsonl": (folder.path / "decisions.jsonl").stat().st_size}
