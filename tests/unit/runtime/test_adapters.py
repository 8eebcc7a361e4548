"""Several adapters on one model: which is at work, what each trains, and what cannot be honoured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig

from trainer_rank import BASE, Request, TrainerRank
from trainer_rank.errors import ConfigError, UnsupportedModelError
from trainer_rank.runtime.transformers import TransformersRuntime

CONFIG = LlamaConfig(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64,
    vocab_size=64, tie_word_embeddings=False,
)  # fmt: skip


def base() -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32)


def two() -> TransformersRuntime:
    model = get_peft_model(base(), LoraConfig(r=2, target_modules=["q_proj"]), adapter_name="one")
    model.add_adapter("two", LoraConfig(r=4, target_modules=["v_proj"]))
    return TransformersRuntime(model)


def test_every_adapter_is_trained_whichever_is_at_work() -> None:
    """PEFT's own switch would freeze the others."""
    runtime = two()
    assert runtime.facts.adapters == ("one", "two", BASE)
    assert runtime.facts.adapter == "one"
    assert len(runtime.trainable_parameters()) == 8
    for name in (None, "two", BASE, "one"):
        with runtime.using(name):
            assert all(parameter.requires_grad for parameter in runtime.trainable_parameters())
            assert runtime.model.active_adapter == "one"
    assert all(parameter.requires_grad for parameter in runtime.trainable_parameters())


def test_parameters_belong_to_their_adapter() -> None:
    """None is the first; the frozen model has none."""
    runtime = two()
    names = {id(parameter): name for name, parameter in runtime.model.named_parameters()}

    def held(adapter: str | None) -> set[str]:
        return {names[id(parameter)].split("lora_")[1].split(".")[1] for parameter in runtime.parameters_of(adapter)}

    assert held(None) == held("one") == {"one"}
    assert held("two") == {"two"}
    assert runtime.parameters_of(BASE) == ()


def test_the_adapter_of_before_is_back_after_an_error() -> None:
    """Also when what ran inside failed."""
    runtime = two()
    layer = runtime.model.base_model.model.model.layers[0].self_attn.v_proj
    with pytest.raises(RuntimeError, match=r"inside \['two'\]"), runtime.using("two"):
        raise RuntimeError(f"inside {layer.active_adapters}")
    assert layer.active_adapters == ["one"]
    with runtime.using(BASE):
        assert layer.disable_adapters
        with runtime.using("two"):
            assert not layer.disable_adapters
            assert layer.active_adapters == ["two"]
        assert layer.disable_adapters
    assert not layer.disable_adapters


def test_adapters_no_request_used_keep_their_weights() -> None:
    """Weight decay too is only for what was trained."""
    runtime = two()
    rank = TrainerRank(runtime, memory_budget="8GiB")
    before = {name: parameter.detach().clone() for name, parameter in runtime.model.named_parameters()}
    for micro_batch in rank.forward_micro_batches([Request.next_token([1, 2, 3], adapter="two")]):
        result = micro_batch.results[0]
        assert result.logprobs is not None
        (-result.logprobs.sum()).backward()
    rank.optim_step(lr=0.1, weight_decay=0.1)
    moved = {name for name, one in runtime.model.named_parameters() if not torch.equal(one, before[name])}
    assert moved
    assert all(".two." in name for name in moved)


def test_loading_with_several_adapters_by_name(tmp_path: Path) -> None:
    """The first is the runtime's own; all are saved."""
    base().save_pretrained(tmp_path / "model")
    configs = {"policy": LoraConfig(r=2, target_modules=["q_proj"]), "critic": LoraConfig(target_modules=["v_proj"])}
    runtime = TransformersRuntime.from_pretrained(tmp_path / "model", lora=configs)
    assert (runtime.facts.adapter, runtime.facts.adapters) == ("policy", ("policy", "critic", BASE))
    runtime.save(tmp_path / "saved")
    assert {path.parent.name for path in (tmp_path / "saved").rglob("adapter_config.json")} == {"policy", "critic"}


@pytest.mark.parametrize("name", ["", "a.b", BASE])
def test_names_that_cannot_be_told_apart_are_refused(tmp_path: Path, name: str) -> None:
    """Before any weight is read."""
    CONFIG.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="an adapter's name must not be empty"):
        TransformersRuntime.from_pretrained(tmp_path, lora={name: LoraConfig(target_modules=["q_proj"])})


def test_one_adapter_that_trains_more_is_no_frozen_model() -> None:
    """Whatever is in modules_to_save is trained itself, so there is no reference under it; several are refused."""
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens"])
    runtime = TransformersRuntime(get_peft_model(base(), config))
    assert runtime.facts.adapters == ("default",)
    model = get_peft_model(base(), config, adapter_name="one")
    model.add_adapter("two", LoraConfig(r=2, target_modules=["v_proj"]))
    with pytest.raises(UnsupportedModelError, match="several adapters train more than their own low-rank matrices"):
        TransformersRuntime(model)
