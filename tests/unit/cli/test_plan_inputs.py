"""What the options of ``trainer-rank plan`` come to, before anything slow is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainer_rank.cli.main import WRONG_INPUT, run
from trainer_rank.cli.plan_inputs import Inputs, read_inputs
from trainer_rank.errors import ConfigError
from trainer_rank.planning.options import PROJECTIONS

NOTHING: dict[str, Any] = dict.fromkeys(
    ("model", "shape", "data", "groups-per-step", "config", "device", "memory", "recompute", "lora-rank", "targets",
     "dtype", "max-packed-tokens")
)  # fmt: skip


def inputs(**given: Any) -> Inputs:
    """Return the inputs of a plan of Qwen3-8B for an H200, options by name with underscores."""
    known = {**NOTHING, "full": False, "head-chunk-rows": "512", "caller-bytes-per-token": 256}
    known |= {"model": "Qwen3-8B", "device": "H200"}
    return read_inputs(known | {name.replace("_", "-"): value for name, value in given.items()})


def test_adapters_go_on_every_projection_unless_targets_are_named() -> None:
    """In the order given."""
    assert inputs(shape="completion=5").options.lora_targets == PROJECTIONS
    assert inputs(shape="completion=5", targets="all-linear").options.lora_targets == PROJECTIONS
    assert inputs(shape="completion=5", targets="attention").options.lora_targets == PROJECTIONS[:4]
    assert inputs(shape="completion=5", targets="v_proj, q_proj").options.lora_targets == ("v_proj", "q_proj")


def test_a_head_in_one_piece_has_a_row_for_each_trained_token(tmp_path: Path) -> None:
    """Of a shape, and of a data set."""
    shape = inputs(shape="groups=2 g=3 prompt=40 completion=5", head_chunk_rows="none")
    assert shape.options.head_chunk_rows == 2 * 3 * 5
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"tokens": [1, 2, 3], "trained": [0, 1, 1]}) + "\n" * 2, encoding="utf-8")
    assert inputs(data=path, head_chunk_rows="none").options.head_chunk_rows == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"targets": "q_proj,"}, r"--targets must be different names with commas between them, got 'q_proj,'"),
        ({"targets": "q_proj,q_proj"}, "different names"),
        ({"targets": "q_proj", "full": True}, "--full trains all weights and --targets q_proj adapters"),
        ({"head_chunk_rows": "0"}, "--head-chunk-rows must be a whole number of at least 1, or none, got '0'"),
        ({"head_chunk_rows": "nan"}, "or none, got 'nan'"),
        ({"shape": "completion=33554433"}, "at most 33,554,432 tokens in all its requests, got 33,554,433"),
        ({"shape": "completion=" + "9" * 5000}, r"shape\.completion must be a whole number"),
    ],
)
def test_options_that_break_a_rule_are_refused(given: dict[str, Any], message: str) -> None:
    """By name, rule and value."""
    with pytest.raises(ConfigError, match=message):
        inputs(**{"shape": "completion=5", **given})


def test_targets_beside_a_run_s_configuration_contradict_it(tmp_path: Path) -> None:
    """It says its own."""
    with pytest.raises(ConfigError, match="leave out --targets, or --config"):
        inputs(model=None, config=tmp_path / "run.yaml", targets="q_proj")


def test_a_target_that_is_no_layer_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    """Also beside one that is."""
    step = ["plan", "--model", "SmolLM2-135M", "--device", "L4", "--shape", "completion=5"]
    assert run([*step, "--targets", "q_proj,kproj"]) == WRONG_INPUT
    assert "must name layers of the model, got 'kproj'; nearest: k_proj" in capsys.readouterr().err


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama", "hidden_size": 0, "num_attention_heads": 0},
        {"model_type": "llama", "hidden_size": 100, "num_attention_heads": 7},
        {"model_type": "llama", "hidden_size": "wide"},
        {"hidden_size": 64},
    ],
)
def test_a_configuration_that_makes_no_model_is_wrong_input(
    config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line, without a traceback."""
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert run(["plan", "--model", str(tmp_path), "--device", "L4", "--shape", "completion=5"]) == WRONG_INPUT
    said = capsys.readouterr().err
    assert "holds no configuration that Transformers can read" in said
    assert len(said.splitlines()) == 1


def test_wrong_input_is_found_without_importing_torch() -> None:
    """It takes seconds."""
    code = (
        "import sys; from trainer_rank.cli.main import run; "
        "status = run(['plan', '--model', 'Qwen3-8B', '--device', 'H2000', '--shape', 'completion=5']); "
        "print(status, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == [str(WRONG_INPUT), "False"], done.stderr


def test_a_configuration_that_prices_by_what_ran_is_refused(tmp_path: Path) -> None:
    """Nothing has run yet; the message says what to write instead."""
    path = tmp_path / "config.yaml"
    path.write_text("model: {path: m}\ndata: {path: d.jsonl}\nsteps: 1\npricing: profile\n")
    with pytest.raises(ConfigError, match=r"pricing must be 'envelope' to plan with, got 'profile'"):
        inputs(model=None, config=path, device="H200")
