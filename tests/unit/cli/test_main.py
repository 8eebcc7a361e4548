"""The command line: options, exit statuses, and errors as prose."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main

from trainer_rank.cli.app import app
from trainer_rank.cli.examples import EXAMPLES
from trainer_rank.cli.main import FAILED, SUCCESS, WRONG_INPUT, run
from trainer_rank.errors import ConfigError


def leaves(command: Any, prefix: str = "") -> dict[str, Any]:
    """Return the commands below a group by name, those of a group in it as ``group command``."""
    found = {}
    for name, one in getattr(command, "commands", {}).items():
        nested = leaves(one, f"{prefix}{name} ")
        found.update(nested if nested else {f"{prefix}{name}": one})
    return found


def test_commands_and_options_are_pinned() -> None:
    """The command line is this list; a change to it is a change to the public face."""
    command = typer.main.get_command(app)
    options = {
        name: sorted(option for parameter in one.params for option in parameter.opts)
        for name, one in leaves(command).items()
    }
    assert sorted(option for parameter in command.params for option in parameter.opts) == ["--version"]
    assert options == {
        "data check": ["--debug", "--json", "--limit-errors", "--loss", "--model", "--train-on", "file"],
        "init": ["--debug", "--force", "file"],
        "profile export": ["--debug", "--environment", "--force", "file"],
        "profile fit-speed": ["--debug", "--json", "source"],
        "profile forget": ["--debug", "environment"],
        "profile import": ["--debug", "file"],
        "profile ls": ["--debug", "--json"],
        "profile show": ["--debug", "--json", "environment"],
        "train": ["--allow-changed", "--debug", "--json", "--resume", "--warm-up", "config"],
        "plan": sorted(
            [
                "--all-passes", "--caller-bytes-per-token", "--config", "--data", "--debug", "--device", "--dtype",
                "--full", "--groups-per-step", "--head-chunk-rows", "--html", "--json", "--lora-rank",
                "--max-packed-tokens", "--memory", "--model", "--recompute", "--shape", "--targets",
            ]
        ),
    }  # fmt: skip


def test_every_command_has_examples_that_parse() -> None:
    """Each is a command line the program itself accepts, down to the options."""
    command = typer.main.get_command(app)
    assert sorted(EXAMPLES) == sorted(["", *leaves(command)])
    for name, one in leaves(command).items():
        shown = [line.strip() for line in one.epilog.splitlines() if line.startswith("  ")]
        assert shown == list(EXAMPLES[name])
    for line in (line for lines in EXAMPLES.values() for line in lines):
        program, *arguments = shlex.split(line)
        assert program == "trainer-rank"
        name = next(name for name in leaves(command) if arguments[: len(name.split())] == name.split())
        leaves(command)[name].make_context(name, arguments[len(name.split()) :])


def test_options_of_one_meaning_have_one_name() -> None:
    """What several commands take is spelt alike: every command that shows something has --json, all have --debug."""
    silent = ["init", "profile export", "profile import", "profile forget"]
    options = {
        name: {option for parameter in one.params for option in parameter.opts}
        for name, one in leaves(typer.main.get_command(app)).items()
    }
    assert all("--debug" in found for found in options.values())
    assert [name for name, found in options.items() if "--json" not in found] == silent


def test_help_succeeds(capsys: pytest.CaptureFixture[str]) -> None:
    """--help exits with 0 and names the subcommands."""
    assert run(["--help"]) == SUCCESS
    assert "train" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["trian"], ["train"], ["train", "a", "b"], ["train", "a", "--jsno"]])
def test_a_wrong_command_line_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Unknown commands, missing or superfluous arguments and unknown options are wrong input."""
    assert run(arguments) == WRONG_INPUT
    assert "Error" in capsys.readouterr().err


def test_a_wrong_config_is_prose_and_exits_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message is the error's own, on stderr, without a traceback."""
    path = tmp_path / "run.yaml"
    path.write_text("model: {path: m}\ndata: {path: d}\nsteps: 1\nlr: 1\n", encoding="utf-8")
    assert run(["train", str(path)]) == WRONG_INPUT
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"trainer-rank: {path}: unknown key 'lr'; did you mean 'optimizer.lr'?\n"


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    """With --debug the error leaves the command as it was raised."""
    with pytest.raises(ConfigError):
        run(["train", str(tmp_path / "none.yaml"), "--debug"])


MISSING = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {module!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Refuse())
from trainer_rank.cli.main import run
sys.exit(run(["train", {config!r}]))
"""


@pytest.mark.parametrize("module", ["typer", "rich", "yaml", "pydantic", "torch", "transformers", "peft"])
def test_a_missing_extra_names_the_command_that_installs_it(module: str, tmp_path: Path) -> None:
    """Without the extra the command says how to get it, and exits with 1."""
    path = tmp_path / "run.yaml"
    path.write_text("model: {path: m}\ndata: {path: d}\nsteps: 1\n", encoding="utf-8")
    script = MISSING.format(module=module, config=str(path))
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert process.returncode == FAILED, process.stderr
    assert f"needs the package '{module}'" in process.stderr
    assert 'pip install "trainer-rank[cli]"' in process.stderr
    assert "Traceback" not in process.stderr


def test_a_config_error_is_reported_without_importing_torch(tmp_path: Path) -> None:
    """A misspelt key is reported at once, not after the seconds that torch takes to import."""
    script = f"import sys; from trainer_rank.cli.main import run; run(['train', {str(tmp_path)!r}]); "
    script += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, check=False).returncode == 0
