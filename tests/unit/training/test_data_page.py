"""The examples of docs/data.md are read as they stand there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.unit.training.chat_models import TOOLS, save_tokenizer
from trainer_rank.training.data_files import read_data
from trainer_rank.training.formats import ALL_FIELDS, Words
from trainer_rank.training.rollouts import Limits

PAGE = Path(__file__).parents[3] / "docs" / "data.md"


def documents(text: str) -> list[str]:
    """Return the JSON documents of a text, each on one line."""
    decoder, found, at = json.JSONDecoder(), [], 0
    while at < len(text):
        value, at = decoder.raw_decode(text, at)
        found.append(json.dumps(value))
        at += len(text[at:]) - len(text[at:].lstrip())
    return found


def test_every_example_is_a_request(tmp_path: Path) -> None:
    """Each block is a file; together they use every format."""
    words = Words(model=str(save_tokenizer(tmp_path / "model", TOOLS)))
    blocks = re.findall(r"```json\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    fields: set[str] = set()
    for number, block in enumerate(blocks):
        path = tmp_path / f"{number}.jsonl"
        lines = documents(block)
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        loss = "cispo" if "old_logprobs" in block else "sft"
        assert len(read_data(path, Limits(loss=loss, vocabulary_size=200), words)) == len(lines)
        fields.update(*(json.loads(line) for line in lines))
    assert fields >= {"messages", "tools", "prompt", "completion", "tokens", "trained", "group", "old_logprobs"}


@pytest.mark.parametrize("field", ALL_FIELDS)
def test_every_field_is_described(field: str) -> None:
    """Also those of the losses."""
    assert f"`{field}`" in PAGE.read_text(encoding="utf-8") or f'"{field}"' in PAGE.read_text(encoding="utf-8")
