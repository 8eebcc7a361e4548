"""``trainer-rank init``: a configuration that is valid, complete and not written over."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer_rank.cli.main import SUCCESS, WRONG_INPUT, run
from trainer_rank.training.config import TrainConfig
from trainer_rank.training.config_template import MEANING, config_template
from trainer_rank.training.load_config import key_list, load_config, parse_config


def test_the_file_is_a_valid_configuration_of_defaults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only what has no default is chosen: the paths and the length."""
    path = tmp_path / "run.yaml"
    assert run(["init", str(path)]) == SUCCESS
    assert "set model.path and data.path" in capsys.readouterr().out
    wanted = {"model": {"path": "models/my-model"}, "data": {"path": "data/train.jsonl"}, "epochs": 1}
    assert load_config(path) == TrainConfig.model_validate(wanted)


def test_every_key_is_written_under_its_meaning() -> None:
    """The table of meanings has the keys and sections there are, and each line stands above its key."""
    keys = key_list()
    sections = {key.rpartition(".")[0] for key in keys if "." in key}
    assert sorted(MEANING) == sorted({*keys, *sections})
    lines = config_template().splitlines()
    for key, meaning in MEANING.items():
        name = key.rpartition(".")[2]
        at = next(number for number, line in enumerate(lines) if line.lstrip().startswith(f"# {meaning}"))
        assert lines[at + 1].lstrip().startswith(f"{name}:"), key
    assert max(map(len, lines)) <= 120


def test_required_keys_and_choices_are_said() -> None:
    """They come from the classes themselves."""
    text = config_template()
    assert text.count("Required.") == 2
    assert "Choices: float32, bfloat16." in text
    assert parse_config(text.replace("targets: null", "targets: attention")).model.lora is not None


def test_a_file_is_not_written_over_without_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What somebody wrote stays."""
    path = tmp_path / "run.yaml"
    path.write_text("mine", encoding="utf-8")
    assert run(["init", str(path)]) == WRONG_INPUT
    assert path.read_text(encoding="utf-8") == "mine"
    assert "add --force" in capsys.readouterr().err
    assert run(["init", str(path), "--force"]) == SUCCESS
    assert load_config(path).epochs == 1


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is created on the way."""
    assert run(["init", str(tmp_path / "none" / "run.yaml")]) == WRONG_INPUT
    assert "name a file in a folder that exists" in capsys.readouterr().err
