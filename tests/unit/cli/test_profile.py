"""``trainer-rank profile``: what is known is listed, shown, carried to another store and forgotten."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainer_rank.cli.main import SUCCESS, WRONG_INPUT, run
from trainer_rank.store import LearnedStore, digest_of

MODEL = {"family": "llama", "layers": 2, "hidden_size": 64, "dtype": "float32"}
FACTS = {"model": MODEL, "device": "cpu", "versions": {"torch": "2.13.0"}}
SEEN = [[100, 400, 10_000, 1_010_000], [200, 300, 20_000, 20_000]]
PROFILE = {"peak_rate": [459_782, 1], "retained_rate": None, "packed_rows": 700, "ratio": [7, 2]}


@pytest.fixture
def known() -> str:
    """Something is known; return the digest it goes by."""
    store = LearnedStore()
    store.merge(FACTS, "envelope", {'{"mix": ["target:single"]}': SEEN, '{"mix": []}': SEEN[1:]})
    store.merge(FACTS, "profile", {"{}": PROFILE})
    return digest_of(FACTS)


def test_an_empty_store_says_where_it_will_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["profile", "ls"]) == SUCCESS
    assert f"nothing is known yet; training runs write to {LearnedStore().path}" in capsys.readouterr().out
    assert not LearnedStore().path.exists()


def test_ls_and_show_say_what_is_known(known: str, capsys: pytest.CaptureFixture[str]) -> None:
    """By model and device, and by signature; as a table and as JSON."""
    assert run(["profile", "ls", "--json"]) == SUCCESS
    (row,) = json.loads(capsys.readouterr().out)["environments"]
    assert (row["environment"], row["signatures"], row["observations"]) == (known, 3, 4)
    assert run(["profile", "ls"]) == SUCCESS
    assert known in capsys.readouterr().out
    assert run(["profile", "show", known[:6]]) == SUCCESS
    shown = " ".join(capsys.readouterr().out.split())
    assert "459,782 B per row" in shown
    assert "every price was" in shown
    assert run(["profile", "show", known, "--json"]) == SUCCESS
    assert [one["value"] for one in json.loads(capsys.readouterr().out)] == [SEEN, SEEN[1:], PROFILE]


def test_what_is_known_goes_to_another_store(known: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a file that is not overwritten unasked; nothing is lost on either side."""
    file = str(tmp_path / "known.json")
    assert run(["profile", "export", file, "--environment", known]) == SUCCESS
    assert run(["profile", "export", file]) == WRONG_INPUT
    assert run(["profile", "export", file, "--force"]) == SUCCESS
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "other"))
    LearnedStore().merge(FACTS, "envelope", {'{"mix": []}': SEEN[:1]})
    assert run(["profile", "import", file]) == SUCCESS
    assert LearnedStore().load(FACTS, "envelope") == {'{"mix": []}': SEEN, '{"mix": ["target:single"]}': SEEN}
    assert LearnedStore().load(FACTS, "profile") == {"{}": PROFILE}


@pytest.mark.parametrize("content", ["", "[]", '{"schema": 2, "entries": []}', '{"schema": 1, "entries": [{}]}'])
def test_a_file_that_is_no_export_adds_nothing(
    known: str, tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "wrong.json"
    file.write_text(content)
    before = LearnedStore().entries()
    assert run(["profile", "import", str(file)]) == WRONG_INPUT
    assert "export" in capsys.readouterr().err
    assert LearnedStore().entries() == before


def test_forget_deletes_one_environment(known: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Named by the beginning of its digest; one that is not there is an error that lists what is."""
    assert run(["profile", "forget", "zz"]) == WRONG_INPUT
    assert f"got 'zz' and none does (known: {known})" in capsys.readouterr().err
    assert run(["profile", "forget", known[:4]]) == SUCCESS
    assert f"3 entries of {known} deleted" in capsys.readouterr().out
    assert LearnedStore().entries() == []
