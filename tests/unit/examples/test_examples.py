"""The examples, shortened: three layers of the real model, a short conversation, two or three steps."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from trainer_rank.cli.main import SUCCESS, run

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / ".cache" / "smollm2-135m"

pytestmark = pytest.mark.skipif(
    not (MODEL / "config.json").is_file() or importlib.util.find_spec("bfcl_eval") is None,
    reason="the examples' model and data are prepared by: make prepare",
)


def module(path: str) -> ModuleType:
    """Import a file of the examples by its path."""
    file = ROOT / "examples" / path
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = found
    spec.loader.exec_module(found)
    return found


@pytest.fixture(scope="module", autouse=True)
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first layers of the real model with its tokenizer, as a model of its own."""
    folder = tmp_path_factory.mktemp("model")
    config = AutoConfig.from_pretrained(MODEL)
    config.num_hidden_layers = 3
    AutoModelForCausalLM.from_pretrained(MODEL, config=config, dtype="float32").save_pretrained(folder)
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The conversations, of which the shortest come first."""
    folder = tmp_path_factory.mktemp("examples")
    assert module("prepare_conversations.py").main(["--out", str(folder), "--conversations", "4"]) == 0
    return folder


def train(name: str, model: Path, file: Path, folder: Path, **changes: Any) -> list[dict[str, Any]]:
    """Run an example's configuration on another file, with changed keys, and return its steps."""
    config = yaml.safe_load((ROOT / "examples" / name / "config.yaml").read_text(encoding="utf-8"))
    config["model"]["path"] = str(model)
    config["data"] = {"path": str(file)}
    config |= {"run_dir": str(folder / "runs"), "threads": None, "groups_per_step": 1, **changes}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    assert run(["train", str(path)]) == SUCCESS
    (ran,) = (folder / "runs").glob("[0-9]*")
    assert (ran / "adapter" / "adapter_model.safetensors").is_file()
    return [json.loads(line) for line in (ran / "steps.jsonl").read_text(encoding="utf-8").splitlines()]


def test_conversations_are_trained(model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One conversation, three times: the loss on the assistant's turns falls."""
    monkeypatch.chdir(ROOT)
    first, *_, last = train(
        "sft_chat", model, data / "held_out.jsonl", tmp_path, epochs=None, steps=3, verify_every=None
    )  # fmt: skip
    assert last["loss"] < 0.9 * first["loss"]


def test_preferences_grow(model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step compares the model with itself; afterwards the right calls are preferred."""
    monkeypatch.chdir(ROOT)
    short = data / "two_pairs.jsonl"
    short.write_text("".join((data / "pairs.jsonl").read_text("utf-8").splitlines(keepends=True)[:2]), "utf-8")
    first, last = train("dpo", model, short, tmp_path, steps=2)
    assert first["metrics"]["margin"] == pytest.approx(0.0, abs=1e-3)
    assert last["metrics"]["margin"] > 0.01


def test_a_loss_of_ones_own_is_trained(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The function of the example is found and its value falls."""
    monkeypatch.chdir(ROOT)
    first, last = train("custom_loss", model, data / "held_out.jsonl", tmp_path, steps=2)
    assert last["loss"] < first["loss"]


def test_sampling_and_training_take_turns(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One iteration, with the model's own sampler in between; attention is the tree's again afterwards."""
    monkeypatch.chdir(ROOT)
    grpo = module("grpo/grpo.py")
    arguments = ["--iterations", "2", "--prompts", "1", "--samples", "4", "--longest", "6"]
    monkeypatch.setattr(grpo, "MODEL", model)
    monkeypatch.setattr(sys, "argv", ["grpo.py", *arguments])
    grpo.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[:2]] == ["iteration  1", "iteration  2"]
    assert re.search(r"reward 0\.\d\d, perfect 0/4, \d+ tokens in \d+ rows", lines[0])


@pytest.mark.parametrize(
    ("answer", "ended", "points"),
    [
        ("cat, dog, cow, hen, pig", True, 1.0),
        ("cat, dog, cow, hen, pig.", True, 1.0),
        ("cat, dog, cow, hen, pig", False, 0.0),
        ("cat, dog, cow, hen, cat", True, 0.6),
        ("cat, dog, cow, hen", True, 0.52),
        ("cat\ndog", True, 0.08),
    ],
)
def test_the_reward_is_what_the_readme_says(answer: str, ended: bool, points: float) -> None:
    """Whole for five different words on one line, in part for what is close, none for an answer cut off."""
    assert module("grpo/grpo.py").reward(answer, ended=ended) == pytest.approx(points)
