"""Lines of every format, from JSON Lines and Parquet: the same requests, and what each refusal says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.training.chat_models import TOOLS, save_tokenizer
from trainer_rank.errors import ConfigError, DataError
from trainer_rank.training.data_files import read_data, scan_data
from trainer_rank.training.formats import Words
from trainer_rank.training.rollouts import Limits, Rollout

MESSAGES = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Words:
    """Return the words of a small tokenizer that knows tools."""
    return Words(model=str(save_tokenizer(tmp_path_factory.mktemp("tokenizer"), TOOLS)))


def write(folder: Path, *lines: dict[str, Any]) -> Path:
    """Return a file of JSON lines."""
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def refusal(folder: Path, line: dict[str, Any], words: Words, limits: Limits | None = None) -> str:
    """Return what a refused line says."""
    with pytest.raises(DataError) as caught:
        read_data(write(folder, line), limits, words)
    return str(caught.value)


def test_a_file_may_mix_formats(tmp_path: Path, words: Words) -> None:
    """Each line has one; what stands beside it means the same in all."""
    path = write(
        tmp_path,
        {"tokens": [5, 6], "trained": [0, 1]},
        {"messages": MESSAGES, "group": "g", "weight": 0.5, "advantage": -1},
        {"prompt": "ab", "completion": "cd"},
        {"prompt": MESSAGES[:1], "completion": MESSAGES[1:]},
    )
    ids, chat, text, turn = read_data(path, words=words)
    assert (ids.line, chat.line, text.line, turn.line) == (1, 2, 3, 4)
    assert (chat.group, chat.weight, chat.advantage) == ("g", 0.5, -1.0)
    assert chat.tokens.tolist() == turn.tokens.tolist()
    assert chat.trained.tolist() == turn.trained.tolist()
    assert int(text.trained.sum()) == len("cd") + 1


def test_sampled_values_of_words_have_one_entry_per_trained_token(tmp_path: Path, words: Words) -> None:
    """In order; elsewhere nothing was sampled."""
    line = {"messages": MESSAGES, "old_logprobs": [-1.0, -2.0, -3.0]}
    (found,) = read_data(write(tmp_path, line), words=words)
    assert found.old_logprobs is not None
    assert found.old_logprobs[found.trained].tolist() == [-1.0, -2.0, -3.0]
    assert not found.old_logprobs[~found.trained].any()
    message = refusal(tmp_path, {**line, "old_logprobs": [-1.0]}, words)
    assert "old_logprobs: must have one entry per trained token, got 1 entries for 3 trained tokens" in message
    assert "got 'x' of type str" in refusal(tmp_path, {**line, "old_logprobs": "x"}, words)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ({"mesages": MESSAGES}, "unknown field 'mesages'; did you mean 'messages'?"),
        ({"messages": MESSAGES, "tokens": [1], "trained": [1]}, "tokens and messages are different formats"),
        ({"messages": MESSAGES, "trained": [1]}, "trained: does not belong beside messages"),
        ({"messages": MESSAGES, "completion": "a"}, "completion: does not belong beside messages"),
        ({"tokens": [1], "trained": [1], "tools": []}, "tools: does not belong beside tokens"),
        ({"prompt": "a"}, "completion: is required beside prompt"),
        ({"completion": "a"}, "prompt: is required beside completion"),
        ({"group": "a"}, "tokens: is required"),
        ({"messages": MESSAGES, "weight": -1}, "weight: must not be negative"),
    ],
)
def test_a_line_has_one_whole_format(line: dict[str, Any], expected: str, tmp_path: Path, words: Words) -> None:
    """Unknown, missing and contradicting fields are named."""
    assert expected in refusal(tmp_path, line, words)


def test_a_conversation_longer_than_the_context_is_refused(tmp_path: Path, words: Words) -> None:
    """Never truncated, whatever the format."""
    assert "the model's context is 4" in refusal(tmp_path, {"messages": MESSAGES}, words, Limits(context_length=4))


def test_words_without_a_model_end_the_command(tmp_path: Path) -> None:
    """The same for every line, so it is a matter of the options."""
    with pytest.raises(ConfigError, match="give --model"):
        read_data(write(tmp_path, {"messages": MESSAGES}))


def test_train_on_last_without_conversations_is_refused(tmp_path: Path, words: Words) -> None:
    """An option that would change nothing is no option; after a file with conversations, one without them may come."""
    ids = {"tokens": [5, 6], "trained": [0, 1]}
    last = Words(model=words.model, train_on="last")
    with pytest.raises(ConfigError, match=r"train_on is 'last', and .* holds no line with messages"):
        read_data(write(tmp_path, ids, {"prompt": "a", "completion": "b"}), words=last)
    (found,) = read_data(write(tmp_path, {"messages": [*MESSAGES, *MESSAGES]}), words=last)
    assert int(found.trained.sum()) == len("cd") + 1
    assert len(read_data(write(tmp_path, ids), words=last)) == 1


def test_a_scan_goes_on_after_a_fault(tmp_path: Path, words: Words) -> None:
    """Every line gives its rollout or its fault, broken JSON included."""
    path = write(tmp_path, {"tokens": [1], "trained": [2]}, {"messages": MESSAGES})
    path.write_text("{oops\n" + path.read_text() + '{"tokens": [1', encoding="utf-8")
    found = list(scan_data(path, words=words))
    assert [type(one) for one in found] == [DataError, DataError, Rollout, DataError]
    assert [one.line for one in found] == [1, 2, 3, 4]


def test_parquet_holds_the_same_formats(tmp_path: Path, words: Words) -> None:
    """Structs have the keys of all messages; a null key is one that is not there."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    lines: list[dict[str, Any]] = [
        {"messages": [MESSAGES[0], CALL], "tools": [{"name": "f"}], "group": "g"},
        {"messages": [*MESSAGES, MESSAGES[0], {**MESSAGES[1], "train": False}], "old_logprobs": [-1.0, -1.0, -2.0]},
        {"prompt": "ab", "completion": "cd"},
    ]
    path = tmp_path / "data.parquet"
    parquet.write_table(arrow.Table.from_pylist(lines, schema=_schema(arrow)), path)
    wanted = read_data(write(tmp_path, *lines), words=words)
    found = read_data(path, words=words)
    assert len(found) == len(wanted) == 3
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.trained, other.trained)
        assert one.group == other.group


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (["ids"], r"must have a column 'tokens', or 'messages', .*; unknown column 'ids'.*; got the columns ids"),
        (["prompt"], "must have a column 'completion' beside the other"),
        (["tokens", "grup"], r"unknown column 'grup', did you mean 'group'\?; got the columns tokens, grup"),
    ],
)
def test_wrong_columns_are_named(columns: list[str], expected: str, tmp_path: Path) -> None:
    """Missing and unknown ones, the nearest names, and what was found."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "data.parquet"
    parquet.write_table(arrow.table({name: [[1]] for name in columns}), path)
    with pytest.raises(DataError, match=expected):
        read_data(path)


def _schema(arrow: Any) -> Any:
    text = arrow.string()
    name = arrow.struct([("name", text)])
    message = arrow.struct(
        [
            ("role", text),
            ("content", text),
            ("tool_calls", arrow.list_(arrow.struct([("function", name)]))),
            ("train", arrow.bool_()),
        ]
    )
    return arrow.schema(
        [
            ("messages", arrow.list_(message)),
            ("tools", arrow.list_(name)),
            ("group", text),
            ("old_logprobs", arrow.list_(arrow.float64())),
            ("prompt", text),
            ("completion", text),
        ]
    )
