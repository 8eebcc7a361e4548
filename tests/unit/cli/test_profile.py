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


def recorded(folder: Path, *, passes: int = 12) -> Path:
    """A run folder with the records that times are read from: 1 ms per row and 40 ms per pass."""
    folder.mkdir()
    (folder / "learned.json").write_text(json.dumps({"name": "envelope", "environment": FACTS}))
    lines = []
    for number in range(1, passes + 1):
        one = {"packed_rows": 100 * number, "segments": 1, "head_rows": 10, "recomputed": None, "no_grad": False}
        facts = {"num_layers": 2}
        lines += [
            {"kind": "admission", "decision": number, "passes": [one], "recompute": "none", "facts": facts},
            {"kind": "observation", "decision": number, "seconds": 0.04 + 0.1 * number},
        ]
    (folder / "decisions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_speed_is_fitted_to_a_recorded_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And kept for the runs that begin later, in the environment of that run."""
    run_folder = str(recorded(tmp_path / "001"))
    assert run(["profile", "fit-speed", run_folder, "--json"]) == SUCCESS
    found = json.loads(capsys.readouterr().out)
    assert (found["passes"], found["pass_rows"]) == (11, 40)
    assert found["seconds_per_row"] == pytest.approx(1e-3)
    assert LearnedStore().load(FACTS, "speed")[""]["pass_rows"] == 40
    assert run(["profile", "show", ""]) == SUCCESS
    assert "a pass counts for 40 rows more" in " ".join(capsys.readouterr().out.replace("│", "").split())


def test_speed_of_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No such path, a folder that is no run, a run of three passes: each is named, and nothing is kept."""
    (tmp_path / "empty").mkdir()
    few = recorded(tmp_path / "few", passes=3)
    for source, reason in [
        ("nowhere", "there is neither"),
        ("empty", "must be a run folder"),
        (few.name, "at least 6"),
    ]:
        assert run(["profile", "fit-speed", str(tmp_path / source)]) == WRONG_INPUT
        assert reason in capsys.readouterr().err
    assert LearnedStore().entries() == []
