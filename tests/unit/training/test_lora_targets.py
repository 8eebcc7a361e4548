"""Which layers get an adapter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainer_rank.errors import ConfigError
from trainer_rank.planning.options import PROJECTIONS
from trainer_rank.runtime.support import FAMILIES
from trainer_rank.training.config import LoraSection
from trainer_rank.training.load_config import dump_config, parse_config
from trainer_rank.training.lora_targets import family_of, targets_of


@pytest.mark.parametrize("family", [*FAMILIES, None, "gpt2"])
def test_every_projection_by_default(family: str | None) -> None:
    """For each supported family; another is refused with the model, for its own reason."""
    assert targets_of(None, family) == targets_of("all-linear", family) == PROJECTIONS
    assert targets_of("attention", family) == PROJECTIONS[:4]


def test_names_stand_and_other_texts_are_refused() -> None:
    """The runtime knows which layers a model has."""
    assert targets_of(["lm_head"], "llama") == ("lm_head",)
    with pytest.raises(ConfigError, match="all-linear or attention, got 'mlp'"):
        targets_of("mlp", "llama")


@pytest.mark.parametrize(("text", "expected"), [("null", None), ("attention", "attention"), ("[a, b]", ("a", "b"))])
def test_a_configuration_takes_names_and_choices(text: str, expected: object) -> None:
    """And reads back what it writes."""
    config = parse_config(f"model: {{path: m, lora: {{targets: {text}}}}}\ndata: {{path: d}}\nsteps: 1\n")
    assert config.model.lora == LoraSection(targets=expected)  # type: ignore[arg-type]
    assert parse_config(dump_config(config)) == config


@pytest.mark.parametrize("text", ["mlp", "[]", "[1]", "[a, a]", "7"])
def test_a_configuration_refuses_others_once(text: str) -> None:
    """One fault is one line, with the key and the value."""
    with pytest.raises(ConfigError) as caught:
        parse_config(f"model: {{path: m, lora: {{targets: {text}}}}}\ndata: {{path: d}}\nsteps: 1\n")
    assert str(caught.value).startswith("config: model.lora.targets: must be a list of ")
    assert len(str(caught.value).splitlines()) == 1


def test_the_family_is_what_the_model_s_folder_says(tmp_path: Path) -> None:
    """None where it says nothing; loading the model explains why."""
    assert family_of(str(tmp_path)) is None
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    assert family_of(str(tmp_path)) == family_of(str(tmp_path / "config.json")) == "qwen3"
    (tmp_path / "config.json").write_text("[")
    assert family_of(str(tmp_path)) is None
