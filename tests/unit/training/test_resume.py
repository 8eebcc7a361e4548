"""A run that is interrupted and resumed is the run that was never interrupted, bit for bit."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.training.plans import split_in_two
from tests.unit.training.test_checkpoint import FullDisk
from tests.unit.training.test_loop import config, lines
from trainer_rank.cli.main import INTERRUPTED, SUCCESS, WRONG_INPUT, run
from trainer_rank.errors import ConfigError, TrainingError, TrainingInterruptedError
from trainer_rank.training.callbacks import Scalars
from trainer_rank.training.checkpoint import FOLDER, Checkpoint
from trainer_rank.training.load_config import dump_config
from trainer_rank.training.loop import train
from trainer_rank.training.progress import Silent
from trainer_rank.training.resume import Resumption

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # PEFT asks Transformers for a property under its former name; pytest.warns tells of it again, as if from here.
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
]


@pytest.fixture
def one_thread() -> Any:
    """One thread, as the statement about bits is made for."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Notes(Silent):
    """Keeps what is said to a person."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def note(self, message: str) -> None:
        self.said.append(message)


def at(step: int, action: Callable[[], object]) -> Callable[[int, Scalars], None]:
    """Return a callback that acts once a training step is complete."""

    def callback(number: int, scalars: Scalars) -> None:
        if number == step and "loss" in scalars:
            action()

    return callback


def press_ctrl_c() -> None:
    """Send this process the signal of a terminal's Ctrl-C."""
    os.kill(os.getpid(), signal.SIGINT)


def numbers(folder: Path) -> list[tuple[int, float, float, float]]:
    """Return what must be equal of each step, in bits."""
    return [(one["step"], one["loss"], one["grad_norm"], one["lr"]) for one in lines(folder, "steps.jsonl")]


def weights(folder: Path) -> bytes:
    """Return the bytes of what was trained."""
    return (folder / "adapter" / "adapter_model.safetensors").read_bytes()


SIX: dict[str, Any] = {"steps": 6, "groups_per_step": 2, "checkpoint_every": 2, "eval_every": 2}


@pytest.mark.parametrize("stop", [1, 4])
def test_ctrl_c_and_resume_give_the_uninterrupted_run(tiny_model: Path, rollouts_file: Path, stop: int) -> None:
    """Every loss, norm, evaluation and weight is equal in bits, and each step and decision is there once."""
    settings = config(tiny_model, rollouts_file, **SIX, optimizer={"lr": 0.02, "schedule": "cosine", "warmup_steps": 1})
    whole = train(settings, progress=Silent())
    with pytest.raises(TrainingInterruptedError, match=rf"stopped after step {stop} of 6.*--resume") as caught:
        train(settings, progress=Silent(), callbacks=[at(stop, press_ctrl_c)])
    folder = rollouts_file.parent / "runs" / "002"
    assert str(folder) in str(caught.value)
    assert train(settings, progress=Silent(), resume="latest") == folder
    assert numbers(folder) == numbers(whole)
    assert weights(folder) == weights(whole)
    measured, wanted = (
        [(one["step"], one["loss"]) for one in lines(one_run, "evaluations.jsonl")] for one_run in (folder, whole)
    )
    assert measured == wanted
    admitted = [one["decision"] for one in lines(folder, "decisions.jsonl") if one["kind"] == "admission"]
    assert admitted == list(range(1, len(admitted) + 1))
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert summary["steps"] == 6
    kept = sorted(path.name for path in (folder / FOLDER).iterdir())
    assert kept == ["step-000004", "step-000006"]


def test_full_weights_resume_too(tiny_model: Path, rollouts_file: Path) -> None:
    """Without an adapter, every weight and moment is in the checkpoint."""
    settings = config(tiny_model, rollouts_file, **SIX, model={"path": str(tiny_model), "lora": None})
    whole = train(settings, progress=Silent())
    with pytest.raises(TrainingInterruptedError):
        train(settings, progress=Silent(), callbacks=[at(3, press_ctrl_c)])
    folder = train(settings, progress=Silent(), resume="latest")
    assert numbers(folder) == numbers(whole)
    name = "adapter/model.safetensors"
    assert (folder / name).read_bytes() == (whole / name).read_bytes()


def test_begun_steps_are_split_as_they_were(tiny_model: Path, rollouts_file: Path) -> None:
    """A plan that this machine would not make now is repeated: two passes where all would fit in one."""
    settings = config(tiny_model, rollouts_file, **SIX)
    with pytest.raises(TrainingInterruptedError):
        train(settings, progress=Silent(), callbacks=[at(3, press_ctrl_c)])
    folder = rollouts_file.parent / "runs" / "001"
    plans = lines(folder, "plans.jsonl")
    # The first pass of step 4 ran before the signal was looked at.
    assert [one["step"] for one in plans] == [1, 2, 3, 4]
    assert all(len(one["split"]) == 1 for one in plans)
    split_in_two(settings, folder, step=4)
    train(settings, progress=Silent(), resume=str(folder))
    assert [one["passes"] for one in lines(folder, "steps.jsonl")] == [1, 1, 1, 2, 1, 1]


def test_a_run_without_a_checkpoint_begins_again(tiny_model: Path, rollouts_file: Path) -> None:
    """Killed before the first one, it is the whole run once more, in the same folder."""
    settings = config(tiny_model, rollouts_file)
    whole = train(settings, progress=Silent())
    reference = weights(whole)
    shutil.rmtree(whole / FOLDER)
    notes = Notes()
    train(settings, progress=notes, resume=str(whole))
    assert "no checkpoint, so it begins again" in notes.said[0]
    assert weights(whole) == reference
    assert [one["step"] for one in lines(whole, "steps.jsonl")] == [1, 2]
    assert len(lines(whole, "interrupted/001/steps.jsonl")) == 2


def test_a_finished_run_says_so(tiny_model: Path, rollouts_file: Path) -> None:
    """Nothing is computed or changed."""
    settings = config(tiny_model, rollouts_file)
    folder = train(settings, progress=Silent())
    before = (folder / "summary.json").read_bytes()
    notes = Notes()
    assert train(settings, progress=notes, resume="latest") == folder
    assert notes.said[-1].startswith("nothing to do: all 2 steps")
    assert (folder / "summary.json").read_bytes() == before


def test_a_longer_run_goes_on_where_the_shorter_ended(tiny_model: Path, rollouts_file: Path) -> None:
    """Extending steps gives the run that was that long from the start."""
    short = config(tiny_model, rollouts_file, steps=3)
    long = config(tiny_model, rollouts_file, steps=5)
    whole = train(long, progress=Silent())
    train(short, progress=Silent())
    notes = Notes()
    folder = train(long, progress=notes, resume="latest")
    assert any("steps 3 -> 5" in said for said in notes.said)
    assert numbers(folder) == numbers(whole)
    assert weights(folder) == weights(whole)
    with pytest.raises(ConfigError, match="got 2 steps and a checkpoint after step 5"):
        train(config(tiny_model, rollouts_file, steps=2), progress=Silent(), resume="latest")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seed": 1}, r"seed 0 -> 1 \(the steps to come are those of another run\)"),
        ({"optimizer": {"lr": 0.03}}, r"optimizer\.lr 0\.02 -> 0\.03"),
        ({"loss": {"name": "cispo"}}, r"loss\.name 'sft' -> 'cispo'"),
        ({"groups_per_step": 1}, "groups_per_step 3 -> 1"),
        ({"steps": None, "epochs": 4}, "steps and epochs cut the data differently"),
    ],
)
def test_a_change_that_makes_another_run_is_refused(
    tiny_model: Path, rollouts_file: Path, change: dict[str, Any], said: str
) -> None:
    """Key and both values are named; with allow_changed it goes on and says what changed."""
    folder = train(config(tiny_model, rollouts_file), progress=Silent())
    (folder / "summary.json").unlink()
    changed = config(tiny_model, rollouts_file, **{"steps": 3, **change})
    with pytest.raises(ConfigError, match=said):
        train(changed, progress=Silent(), resume="latest")
    notes = Notes()
    train(changed, progress=notes, resume="latest", allow_changed=True)
    assert any("changed since" in one for one in notes.said)


def test_other_data_at_the_same_path_are_refused(tiny_model: Path, rollouts_file: Path) -> None:
    """The file is known by its content, so a moved one is the same and an edited one is not."""
    folder = train(config(tiny_model, rollouts_file, steps=1), progress=Silent())
    moved = rollouts_file.with_name("moved.jsonl")
    moved.write_bytes(rollouts_file.read_bytes())
    train(config(tiny_model, moved, steps=2), progress=Silent(), resume=str(folder))
    text = moved.read_text(encoding="utf-8").splitlines(keepends=True)
    moved.write_text("".join(text[:-1]), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"the content of .*moved\.jsonl"):
        train(config(tiny_model, moved, steps=3), progress=Silent(), resume=str(folder))


def test_a_change_that_moves_the_last_bits_is_warned_of(tiny_model: Path, rollouts_file: Path) -> None:
    """A budget may split the steps to come elsewhere."""
    train(config(tiny_model, rollouts_file, steps=1), progress=Silent())
    with pytest.warns(RuntimeWarning, match=r"not bit-exact: memory_budget None -> '64GiB'"):
        train(config(tiny_model, rollouts_file, steps=2, memory_budget="64GiB"), progress=Silent(), resume="latest")


def test_threads_that_torch_takes_by_itself_count_too(tiny_model: Path, rollouts_file: Path) -> None:
    """Without the key, the number in use is compared; and so are the versions of the libraries."""
    train(config(tiny_model, rollouts_file, steps=1), progress=Silent())
    torch.set_num_threads(2)
    with pytest.warns(RuntimeWarning, match=r"not bit-exact: threads in use '1' -> '2'"):
        train(config(tiny_model, rollouts_file, steps=2), progress=Silent(), resume="latest")


def test_another_adapter_is_refused_with_both_sides(tiny_model: Path, rollouts_file: Path) -> None:
    """Even when changes are allowed, and before anything of the run is touched."""
    folder = train(config(tiny_model, rollouts_file, steps=1), progress=Silent())
    before = (folder / "steps.jsonl").read_bytes()
    other = config(tiny_model, rollouts_file, model={"path": str(tiny_model), "lora": {"rank": 4}})
    with pytest.raises(ConfigError, match=r"of another model: trained_bytes \d+ there and \d+ here"):
        train(other, progress=Silent(), resume="latest", allow_changed=True)
    assert (folder / "steps.jsonl").read_bytes() == before


def test_another_base_model_is_refused(tiny_model: Path, rollouts_file: Path, tmp_path: Path) -> None:
    """One of the same shape with other weights is known by a sample of them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    train(config(tiny_model, rollouts_file, steps=1), progress=Silent())
    torch.manual_seed(1)
    other = tmp_path / "other"
    LlamaForCausalLM(LlamaConfig.from_pretrained(tiny_model)).save_pretrained(other)
    with pytest.raises(ConfigError, match="of another model: frozen "):
        train(config(other, rollouts_file), progress=Silent(), resume="latest")


@pytest.mark.parametrize(
    "name", ["adapter_model.safetensors", "adapter_config.json", "optimizer.safetensors", "state.json"]
)
def test_a_damaged_checkpoint_is_named_and_skipped(tiny_model: Path, rollouts_file: Path, name: str) -> None:
    """Each file in turn cut in half: the one before is taken, and the numbers are still those of the whole run."""
    settings = config(tiny_model, rollouts_file, **SIX)
    whole = train(settings, progress=Silent())
    with pytest.raises(TrainingInterruptedError):
        train(settings, progress=Silent(), callbacks=[at(5, press_ctrl_c)])
    folder = rollouts_file.parent / "runs" / "002"
    damaged = folder / FOLDER / "step-000005"
    content = (damaged / name).read_bytes()
    (damaged / name).write_bytes(content[: len(content) // 2])
    with pytest.warns(RuntimeWarning, match=rf"step-000005 is damaged and skipped: {name}"):
        train(settings, progress=Silent(), resume="latest")
    assert numbers(folder) == numbers(whole)
    assert weights(folder) == weights(whole)
    assert damaged.with_suffix(".damaged").is_dir()


def test_a_callback_that_raises_is_named_and_nothing_is_lost(tiny_model: Path, rollouts_file: Path) -> None:
    """The step it was told of is complete and in a checkpoint; the run goes on from there without it."""

    def fails() -> None:
        raise KeyError("colour")

    settings = config(tiny_model, rollouts_file, **SIX)
    whole = train(settings, progress=Silent())
    with pytest.raises(TrainingError, match=r"step 3: the callback at\..*callback raised KeyError: 'colour'.*step-0"):
        train(settings, progress=Silent(), callbacks=[at(3, fails)])
    folder = train(settings, progress=Silent(), resume="latest")
    assert numbers(folder) == numbers(whole)
    assert weights(folder) == weights(whole)


def test_a_checkpoint_that_cannot_be_written_does_not_stop_the_run(tiny_model: Path, rollouts_file: Path) -> None:
    """A periodic one is warned of and the next one is written; the one at the end is an error."""
    runs = rollouts_file.parent / "runs"

    def obstruct(number: str) -> None:
        (runs / number / FOLDER).touch()

    def clear() -> None:
        (runs / "001" / FOLDER).unlink()

    settings = config(tiny_model, rollouts_file, **SIX)
    with pytest.warns(RuntimeWarning, match=r"checkpoint .*step-000002: cannot be written .* The run goes on"):
        folder = train(settings, progress=Silent(), callbacks=[at(1, lambda: obstruct("001")), at(3, clear)])
    assert sorted(path.name for path in (folder / FOLDER).iterdir()) == ["step-000004", "step-000006"]
    with pytest.raises(TrainingError, match=r"step-000002: cannot be written"):
        train(config(tiny_model, rollouts_file), progress=Silent(), callbacks=[at(1, lambda: obstruct("002"))])


@pytest.mark.parametrize("room", [0, 1, 2, 3, 5])
def test_a_disk_that_is_full_while_files_are_cut_back_loses_no_line(tmp_path: Path, room: int) -> None:
    """What is cut is copied first; every line is in its file or in ``interrupted``, and a second try succeeds."""
    for name in ("steps.jsonl", "decisions.jsonl"):
        (tmp_path / name).write_text('{"a":1}\n{"a":2}\n{"a"', encoding="utf-8")
    settings = config(tmp_path, tmp_path / "d")
    (tmp_path / "config.yaml").write_text(dump_config(settings), encoding="utf-8")
    lengths = {"steps.jsonl": 8, "decisions.jsonl": 8}
    checkpoint = Checkpoint(path=tmp_path, step=1, state={"lengths": lengths})
    resumption = Resumption(path=tmp_path, checkpoint=checkpoint, changed=())
    with pytest.raises(TrainingError, match="cannot be cut back to the checkpoint"):
        resumption.cut_back(settings, disk=FullDisk(room))
    for name in lengths:
        everything = [path.read_text(encoding="utf-8") for path in tmp_path.rglob(name)]
        assert any('{"a":2}\n{"a"' in text for text in everything)
        assert not list(tmp_path.rglob(".*"))
    resumption.cut_back(settings)
    for name in lengths:
        assert (tmp_path / name).read_text(encoding="utf-8") == '{"a":1}\n'
    assert dump_config(settings) == (tmp_path / "config.yaml").read_text(encoding="utf-8")


def test_what_is_no_run_is_refused(tiny_model: Path, rollouts_file: Path) -> None:
    """Neither a folder without a configuration nor a run_dir without runs."""
    with pytest.raises(ConfigError, match="run_dir must hold a run"):
        train(config(tiny_model, rollouts_file), progress=Silent(), resume="latest")
    with pytest.raises(ConfigError, match="must be a run folder with a"):
        train(config(tiny_model, rollouts_file), progress=Silent(), resume=str(rollouts_file.parent))


def test_the_command_resumes_and_exits_with_130_when_interrupted(
    tiny_model: Path, rollouts_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 130 and how to go on; --resume latest then ends with 0; --allow-changed alone is wrong input."""
    from trainer_rank.training.interrupt import Interrupts

    path = rollouts_file.parent / "run.yaml"
    path.write_text(dump_config(config(tiny_model, rollouts_file)), encoding="utf-8")
    with monkeypatch.context() as patched:
        patched.setattr(Interrupts, "__enter__", lambda self: (setattr(self, "requested", True), self)[1])
        assert run(["train", str(path), "--json"]) == INTERRUPTED
    assert "stopped after step 0 of 2" in capsys.readouterr().err
    assert run(["train", str(path), "--json", "--resume", "latest"]) == SUCCESS
    assert run(["train", str(path), "--allow-changed"]) == WRONG_INPUT
