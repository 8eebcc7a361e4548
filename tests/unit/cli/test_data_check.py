"""``trainer-rank data check``: all faults, the figures, exit statuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.training.chat_models import PLAIN, save_tokenizer
from trainer_rank.cli.main import SUCCESS, WRONG_INPUT, run

GOOD = {"tokens": [1, 2, 3], "trained": [0, 1, 1]}
CHAT = {"messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]}


def write(folder: Path, *lines: dict[str, Any]) -> str:
    """Return the path of a file of JSON lines."""
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder with a tokenizer and a configuration, and no weights."""
    folder = save_tokenizer(tmp_path_factory.mktemp("model"), PLAIN)
    entries = {"model_type": "llama", "vocab_size": 200, "max_position_embeddings": 100}
    (folder / "config.json").write_text(json.dumps(entries), encoding="utf-8")
    return str(folder)


def test_good_data_exit_with_0_and_show_their_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a model and without torch, for token ids."""
    path = write(tmp_path, GOOD, GOOD, {"tokens": [1, 2, 4, 5], "trained": [0, 0, 0, 0]})
    assert run(["data", "check", path]) == SUCCESS
    captured = capsys.readouterr()
    assert captured.err == ""
    for text in (
        "3 in 3 groups",
        "min 3, median 3, p99 4, max 4",
        "5 rows, sharing ratio 2.00",
        "1: line 3",
        "1: line 2 (as 1)",
        "every line can be trained",
    ):
        assert text in captured.out


def test_all_faults_are_listed_up_to_the_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not just the first; the rest is counted, and the good lines are summarised."""
    path = write(tmp_path, {"tokens": []}, GOOD, {"tokens": [1], "trained": [3]}, {"x": 1})
    assert run(["data", "check", path, "--limit-errors", "2"]) == WRONG_INPUT
    out = capsys.readouterr().out
    assert ":1: tokens: must hold at least one token" in out
    assert ":3: trained[0]: must be 0 or 1" in out
    assert "... and 1 more lines with faults; --limit-errors 3 lists them all" in out
    assert "1 in 1 groups" in out
    assert "every line can be trained" not in out


def test_json_is_one_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the same figures."""
    path = write(tmp_path, GOOD, {"tokens": [1]})
    assert run(["data", "check", path, "--json"]) == WRONG_INPUT
    found = json.loads(capsys.readouterr().out)
    assert (found["file"], found["num_faults"]) == (path, 1)
    assert found["faults"][0]["line"] == 2
    assert (found["summary"]["requests"], found["summary"]["trained_tokens"]) == (1, 2)
    assert found["summary"]["sharing_ratio"] == 1.0


def test_messages_need_a_model(tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its tokenizer and configuration are enough."""
    path = write(tmp_path, CHAT)
    assert run(["data", "check", path]) == WRONG_INPUT
    assert "give --model with the model's folder" in capsys.readouterr().err
    assert run(["data", "check", path, "--model", model]) == SUCCESS
    assert "every line can be trained" in capsys.readouterr().out


def test_near_prefixes_are_shown_as_text(tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What differs is easier to see in words than in ids."""
    lines = []
    for date in ("Monday", "Friday"):
        text = f"You are helpful. Today is {date}, and here is a long text that follows"
        lines.append({"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "ok"}]})
    path = write(tmp_path, *lines)
    assert run(["data", "check", path, "--model", model, "--json"]) == SUCCESS
    (near,) = json.loads(capsys.readouterr().out)["summary"]["near_prefixes"]
    texts = {near["after_a_text"].replace(" ", "")[:6], near["after_b_text"].replace(" ", "")[:6]}
    assert texts == {"Monday", "Friday"}
    assert run(["data", "check", path, "--model", model]) == SUCCESS
    assert "lines 2 and 1 part at token" in capsys.readouterr().out


def test_the_model_s_limits_and_the_loss_s_fields_are_checked(
    tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Vocabulary, context and what cispo needs."""
    path = write(tmp_path, {"tokens": [1, 200], "trained": [0, 1]}, {"tokens": [1] * 101, "trained": [1] * 101})
    assert run(["data", "check", path, "--model", model]) == WRONG_INPUT
    out = capsys.readouterr().out
    assert "the model's vocabulary of 200" in out
    assert "the model's context is 100" in out
    assert run(["data", "check", write(tmp_path, GOOD), "--loss", "cispo"]) == WRONG_INPUT
    assert "advantage: is required by the loss 'cispo'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--loss", "ppo"], "--loss must be sft or "),
        (["--train-on", "some"], "--train-on must be all or last, got 'some'"),
        (["--limit-errors", "0"], "--limit-errors must be at least 1, got 0"),
        (["--model", "none"], "--model: must be a folder with config.json"),
    ],
)
def test_wrong_options_are_refused(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By option, rule and value."""
    assert run(["data", "check", write(tmp_path, GOOD), *options]) == WRONG_INPUT
    assert message in capsys.readouterr().err


def test_files_without_requests_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Empty or missing."""
    assert run(["data", "check", write(tmp_path)]) == WRONG_INPUT
    assert "holds no request" in capsys.readouterr().out
    assert run(["data", "check", str(tmp_path / "none.jsonl")]) == WRONG_INPUT
    assert "cannot be read" in capsys.readouterr().err


def test_token_ids_are_checked_without_torch(tmp_path: Path) -> None:
    """A check takes a second, not the time torch takes to import."""
    path = write(tmp_path, GOOD)
    script = f"import sys; from trainer_rank.cli.main import run; run(['data', 'check', {path!r}]); "
    script += "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, check=False).returncode == 0
