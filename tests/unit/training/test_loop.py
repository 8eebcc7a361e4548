"""A whole run on a tiny model: what it computes, what it leaves behind, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainer_rank.cli.main import FAILED, SUCCESS, WRONG_INPUT, run
from trainer_rank.errors import ConfigError, DataError, TrainerRankMemoryError
from trainer_rank.training.config import TrainConfig
from trainer_rank.training.load_config import dump_config
from trainer_rank.training.loop import train
from trainer_rank.training.progress import Silent
from trainer_rank.training.run_folder import CONTENTS


def config(folder: Path, rollouts: Path, **entries: Any) -> TrainConfig:
    """Return a configuration of two steps over all three conversations."""
    defaults: dict[str, Any] = {
        "model": {"path": str(folder), "lora": {"rank": 2, "alpha": 4.0}},
        "data": {"path": str(rollouts), "eval_path": str(rollouts)},
        "optimizer": {"lr": 0.02},
        "groups_per_step": 3,
        "steps": 2,
        "run_dir": str(rollouts.parent / "runs"),
    }
    return TrainConfig.model_validate({**defaults, **entries})


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    """Return the JSON lines of a file of the run folder."""
    return [json.loads(line) for line in (folder / name).read_text(encoding="utf-8").splitlines()]


def test_a_run_leaves_everything_it_promises(tiny_model: Path, rollouts_file: Path) -> None:
    """Every documented file is there, with one line per step and evaluation and at least one decision per step."""
    folder = train(config(tiny_model, rollouts_file, compare_one_by_one=True), progress=Silent())
    assert sorted(path.name for path in folder.iterdir()) == sorted(CONTENTS)
    assert [line["step"] for line in lines(folder, "steps.jsonl")] == [1, 2]
    assert [line["step"] for line in lines(folder, "evaluations.jsonl")] == [0, 2]
    assert len(lines(folder, "decisions.jsonl")) >= 4
    assert (folder / "adapter" / "adapter_model.safetensors").is_file()


def test_a_step_counts_what_really_ran(tiny_model: Path, rollouts_file: Path) -> None:
    """Three conversations of 12, 24 and 36 tokens: 216 logical tokens in half as many rows, 36 trained tokens."""
    folder = train(config(tiny_model, rollouts_file), progress=Silent())
    first = lines(folder, "steps.jsonl")[0]
    assert (first["requests"], first["logical_tokens"], first["packed_rows"]) == (9, 216, 108)
    assert (first["sharing_ratio"], first["trained_tokens"], first["passes"]) == (2.0, 36, 1)
    assert 0 < first["predicted_peak_bytes"] <= first["budget_bytes"]
    assert first["observed_peak_bytes"] is not None


def test_the_loss_falls(tiny_model: Path, rollouts_file: Path) -> None:
    """Training on the evaluation data lowers its loss."""
    folder = train(config(tiny_model, rollouts_file, steps=8), progress=Silent())
    before, after = (line["loss"] for line in lines(folder, "evaluations.jsonl"))
    assert after < before


def test_a_run_repeats_exactly(tiny_model: Path, rollouts_file: Path) -> None:
    """The same configuration gives the same losses and gradient norms, bit for bit."""
    runs = [train(config(tiny_model, rollouts_file), progress=Silent()) for _ in range(2)]
    first, again = ([(line["loss"], line["grad_norm"]) for line in lines(one, "steps.jsonl")] for one in runs)
    assert first == again


def test_one_by_one_gives_the_same_numbers(tiny_model: Path, rollouts_file: Path) -> None:
    """The comparison measures a difference of rounding only, in log-probabilities and gradients."""
    folder = train(config(tiny_model, rollouts_file, compare_one_by_one=True), progress=Silent())
    comparison = json.loads((folder / "summary.json").read_text(encoding="utf-8"))["comparison"]
    assert comparison["logprob_difference"] <= 1e-4
    assert comparison["gradient_difference"] <= 1e-4
    assert (comparison["logical_tokens"], comparison["packed_rows"]) == (72, 36)


def test_comparing_does_not_change_what_is_saved(tiny_model: Path, rollouts_file: Path) -> None:
    """The adapter after a comparison is the adapter without it."""
    saved = [
        train(config(tiny_model, rollouts_file, compare_one_by_one=compared), progress=Silent())
        / "adapter"
        / "adapter_model.safetensors"
        for compared in (False, True)
    ]
    assert saved[0].read_bytes() == saved[1].read_bytes()


def test_cispo_trains(tiny_model: Path, rollouts_file: Path) -> None:
    """Advantages and old log-probabilities reach the loss through the payload."""
    folder = train(config(tiny_model, rollouts_file, loss={"name": "cispo"}), progress=Silent())
    assert all(line["grad_norm"] > 0 for line in lines(folder, "steps.jsonl"))


def test_full_fine_tuning_trains(tiny_model: Path, rollouts_file: Path) -> None:
    """``lora: null`` trains and saves every weight."""
    full = config(tiny_model, rollouts_file, model={"path": str(tiny_model), "lora": None})
    folder = train(full, progress=Silent())
    assert (folder / "adapter" / "model.safetensors").is_file()


@pytest.mark.filterwarnings("ignore:no_trained_tokens")
def test_an_all_masked_step_is_legal(tiny_model: Path, tmp_path: Path) -> None:
    """Nothing to learn: loss and gradient are exactly 0 and the run goes on."""
    path = tmp_path / "masked.jsonl"
    path.write_text('{"tokens": [1, 2, 3], "trained": [0, 0, 0]}\n', encoding="utf-8")
    folder = train(config(tiny_model, path), progress=Silent())
    assert [(line["loss"], line["grad_norm"]) for line in lines(folder, "steps.jsonl")] == [(0.0, 0.0)] * 2


def test_eval_every_evaluates_in_between(tiny_model: Path, rollouts_file: Path) -> None:
    """Before the first step, after every second one, and after the last."""
    folder = train(config(tiny_model, rollouts_file, steps=5, eval_every=2), progress=Silent())
    assert [line["step"] for line in lines(folder, "evaluations.jsonl")] == [0, 2, 4, 5]


def test_data_are_refused_before_the_model_is_loaded(tiny_model: Path, tmp_path: Path) -> None:
    """A token outside the vocabulary is an error of the data file, and no run folder is made."""
    path = tmp_path / "wrong.jsonl"
    path.write_text('{"tokens": [1, 64], "trained": [0, 1]}\n', encoding="utf-8")
    with pytest.raises(DataError, match="between 0 and 63, the model's vocabulary of 64"):
        train(config(tiny_model, path), progress=Silent())
    assert not (tmp_path / "runs").exists()


def test_a_path_without_a_model_is_refused(rollouts_file: Path, tmp_path: Path) -> None:
    """The key, the rule and the value are named."""
    with pytest.raises(ConfigError, match=r"model\.path: must be a folder with config\.json"):
        train(config(tmp_path / "none", rollouts_file), progress=Silent())


def test_a_budget_below_what_is_resident_is_refused(tiny_model: Path, rollouts_file: Path) -> None:
    """A budget smaller than the process itself is refused before anything runs."""
    with pytest.raises(TrainerRankMemoryError):
        train(config(tiny_model, rollouts_file, memory_budget="1MiB"), progress=Silent())


@pytest.mark.parametrize(
    ("change", "status"),
    [({}, SUCCESS), ({"memory_budget": "1MiB"}, FAILED), ({"data": {"path": "none.jsonl"}}, WRONG_INPUT)],
)
def test_the_command_exits_with_the_documented_status(
    tiny_model: Path, rollouts_file: Path, change: dict[str, Any], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """0 for success, 1 for refused, 2 for wrong input; errors are prose on stderr."""
    path = rollouts_file.parent / "run.yaml"
    path.write_text(dump_config(config(tiny_model, rollouts_file, **change)), encoding="utf-8")
    assert run(["train", str(path), "--json"]) == status
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    if status == SUCCESS:
        assert json.loads(captured.out.splitlines()[-1])["event"] == "finished"
    else:
        assert captured.err.startswith("trainer-rank: ")


def test_warming_up_on_the_worst_request_changes_no_number(tiny_model: Path, rollouts_file: Path) -> None:
    """It runs first, without an update; order, losses and gradients of the run stay the same."""
    plain = train(config(tiny_model, rollouts_file), progress=Silent())
    warm = train(config(tiny_model, rollouts_file, warm_up="worst"), progress=Silent())
    assert len(lines(warm, "decisions.jsonl")) > len(lines(plain, "decisions.jsonl"))
    for one, other in zip(lines(plain, "steps.jsonl"), lines(warm, "steps.jsonl"), strict=True):
        assert (one["loss"], one["grad_norm"]) == (other["loss"], other["grad_norm"])
