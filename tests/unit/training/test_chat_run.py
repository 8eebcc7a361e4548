"""Conversations through a whole run and a whole plan: the same numbers as the token ids they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.training.chat_models import PLAIN, save_tokenizer
from trainer_rank.cli.main import SUCCESS, WRONG_INPUT, run
from trainer_rank.training.config import TrainConfig
from trainer_rank.training.data_files import read_data
from trainer_rank.training.formats import Words
from trainer_rank.training.loop import train
from trainer_rank.training.progress import Silent


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a random Llama of one layer, with a tokenizer and a chat template."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = save_tokenizer(tmp_path_factory.mktemp("chat") / "model", PLAIN)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=128, num_hidden_layers=1, max_position_embeddings=128, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """Return a file of two conversations, each as lines that end with one of its answers."""
    path = tmp_path / "chats.jsonl"
    lines = []
    for name in "xy":
        contents = [f"{name} asks {turn}" if turn % 2 == 0 else f"answer {turn}" for turn in range(6)]
        roles = ("user", "assistant")
        messages = [{"role": roles[turn % 2], "content": content} for turn, content in enumerate(contents)]
        lines += [{"messages": messages[:stop], "group": name} for stop in (2, 4, 6)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.mark.parametrize("train_on", ["all", "last"])
def test_a_run_on_words_is_a_run_on_their_ids(model: Path, chats: Path, train_on: str) -> None:
    """Step by step the same loss, and the turns of a conversation share their rows."""
    ids = chats.with_name("ids.jsonl")
    rollouts = read_data(chats, words=Words(model=str(model), train_on=train_on))  # type: ignore[arg-type]
    rows = [
        {"tokens": one.tokens.tolist(), "trained": one.trained.astype(int).tolist(), "group": one.group}
        for one in rollouts
    ]
    ids.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    steps: list[list[dict[str, Any]]] = []
    for data in ({"path": str(chats), "train_on": train_on}, {"path": str(ids)}):
        config = {"model": {"path": str(model)}, "data": data, "epochs": 1, "run_dir": str(chats.parent / "runs")}
        folder = train(TrainConfig.model_validate(config), progress=Silent())
        text = (folder / "steps.jsonl").read_text(encoding="utf-8")
        steps.append([json.loads(line) for line in text.splitlines()])
    first, second = ([(step["loss"], step["grad_norm"]) for step in one] for one in steps)
    assert first == second
    assert len(first) == 2
    assert steps[0][0]["packed_rows"] == len(rollouts[2].tokens)
    assert steps[0][0]["trained_tokens"] == sum(int(one.trained.sum()) for one in rollouts[:3])


def test_a_plan_reads_words_too(model: Path, chats: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the tokenizer of the model's folder; a built-in geometry has none."""
    step = ["plan", "--data", str(chats), "--memory", "1GiB", "--json"]
    assert run([*step, "--model", str(model)]) == SUCCESS
    rows = json.loads(capsys.readouterr().out)["worst"]["packed_rows"]
    rollouts = read_data(chats, words=Words(model=str(model)))
    # The last line of a conversation holds the others; the few tokens common to both are not worth a branch.
    assert rows == len(rollouts[2].tokens) + len(rollouts[5].tokens)
    assert run([*step, "--model", "Qwen3-0.6B"]) == WRONG_INPUT
    assert "the model 'Qwen3-0.6B' is not a folder, so it has no tokenizer" in capsys.readouterr().err
