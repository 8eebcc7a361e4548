"""Which models are refused, and what the refusal says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from peft import IA3Config, LoraConfig, PromptTuningConfig, get_peft_model

from trainer_rank.errors import ConfigError, UnsupportedModelError
from trainer_rank.runtime.support import FAMILIES, check_adapter, check_supported
from trainer_rank.runtime.transformers import TransformersRuntime

TINY: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 16,
    "vocab_size": 20,
    "pad_token_id": 0,
}


def rope(kind: str, **more: Any) -> dict[str, Any]:
    """Return rope parameters of a type."""
    return {"rope_type": kind, "rope_theta": 10000.0, **more}


LONG = {"original_max_position_embeddings": 64, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
REFUSED = {
    "sliding window": (transformers.MistralConfig(**TINY, sliding_window=8), "mistral.sliding_window", "window"),
    "sliding window of some layers": (
        transformers.Qwen2Config(**TINY, use_sliding_window=True, sliding_window=8, max_window_layers=1),
        "qwen2.sliding_window",
        "window",
    ),
    "soft-capped logits": (
        transformers.Gemma2Config(**TINY, head_dim=8),
        "gemma2.attn_logit_softcapping",
        "soft-capped",
    ),
    "attention sinks": (
        transformers.GptOssConfig(**TINY, head_dim=8, layer_types=["full_attention"] * 2, num_local_experts=2),
        "gpt_oss.attention sinks",
        "learned term",
    ),
    "encoder": (transformers.T5Config(), "t5.encoder", "both directions"),
    "experts": (transformers.MixtralConfig(**TINY), "mixtral.experts", "experts"),
    "recurrent layers": (
        transformers.Qwen3NextConfig(**TINY, num_experts=0),
        "qwen3_next.linear_attention",
        "fork at each branch",
    ),
    "unknown family": (transformers.GPT2Config(), "gpt2", "not been proved equal"),
    "dynamic rope": (
        transformers.LlamaConfig(**TINY, rope_parameters=rope("dynamic", factor=2.0)),
        "llama.rope",
        "length of the whole batch",
    ),
    "long rope": (
        transformers.LlamaConfig(**TINY, rope_parameters=rope("longrope", factor=2.0, **LONG)),
        "llama.rope",
        "length of the whole batch",
    ),
    "attention dropout": (
        transformers.LlamaConfig(**TINY, attention_dropout=0.1),
        "llama.attention_dropout",
        "dropout 0.1 would differ",
    ),
}
NEXT_STEPS = ("Use a model of one of the families llama, qwen2, qwen3", "Use rope_type", "Set attention_dropout to 0")


@pytest.mark.parametrize(("config", "layer", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_a_refusal_names_the_layer_the_reason_and_the_next_step(config: Any, layer: str, reason: str) -> None:
    """Each architecture that would give other numbers is refused by name."""
    with pytest.raises(UnsupportedModelError) as caught:
        check_supported(config)
    assert caught.value.layer == layer
    assert reason in caught.value.reason
    assert str(caught.value).startswith(f"{layer}: {caught.value.reason}. ")
    assert any(step in str(caught.value) for step in NEXT_STEPS)


ACCEPTED = {
    "llama": transformers.LlamaConfig(**TINY),
    "qwen2": transformers.Qwen2Config(**TINY),
    "qwen2 with an unused window": transformers.Qwen2Config(**TINY, use_sliding_window=False, sliding_window=8),
    "qwen3": transformers.Qwen3Config(**TINY),
    "linear rope": transformers.LlamaConfig(**TINY, rope_parameters=rope("linear", factor=2.0)),
    "yarn": transformers.LlamaConfig(
        **TINY, rope_parameters=rope("yarn", factor=2.0, original_max_position_embeddings=64)
    ),
    "llama3 rope": transformers.LlamaConfig(
        **TINY,
        rope_parameters=rope(
            "llama3", factor=2.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
        ),
    ),
}


@pytest.mark.parametrize("config", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_the_families_are_accepted(config: Any) -> None:
    """Llama, Qwen2 and Qwen3, with every rotary type that depends on positions alone."""
    assert config.model_type in FAMILIES
    check_supported(config)


def test_a_folder_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    """The configuration is enough to refuse."""
    transformers.GPT2Config().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="gpt2"):
        TransformersRuntime.from_pretrained(tmp_path)


def test_a_refused_model_is_left_as_it_was() -> None:
    """Attention implementation, mode and recompute of a refused model do not change."""
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(**TINY, attention_dropout=0.1), attn_implementation="sdpa"
    ).eval()
    with pytest.raises(UnsupportedModelError):
        TransformersRuntime(model)
    assert model.config._attn_implementation == "sdpa"
    assert not model.training
    assert not model.is_activation_checkpointing


def test_adapter_dropout_is_refused() -> None:
    """Dropout on an adapter would differ between a prefix and its copies."""
    with pytest.raises(UnsupportedModelError, match=r"lora_dropout: dropout 0.05 would differ.*Set lora_dropout to 0"):
        check_adapter(LoraConfig(lora_dropout=0.05))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"), "adapter: an adapter of type PROMPT_TUNING"),
        (IA3Config(), "adapter: an adapter of type IA3"),
        (LoraConfig(alora_invocation_tokens=[1, 2], task_type="CAUSAL_LM"), "alora_invocation_tokens: "),
    ],
    ids=["virtual tokens", "ia3", "activated lora"],
)
def test_adapters_other_than_plain_lora_are_refused(config: Any, message: str) -> None:
    """Virtual tokens, for one, would silently be left out."""
    with pytest.raises(UnsupportedModelError, match=message):
        check_adapter(config)


def test_an_adapter_on_the_head_is_refused() -> None:
    """The head is projected in chunks by its weight, which an adapter would bypass."""
    model = transformers.AutoModelForCausalLM.from_config(ACCEPTED["llama"])
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["lm_head"]))
    with pytest.raises(UnsupportedModelError, match=r"lm_head: .*Leave lm_head out"):
        TransformersRuntime(adapted)


def test_an_unknown_recompute_mode_is_an_error() -> None:
    """The error names the value and the modes."""
    model = transformers.AutoModelForCausalLM.from_config(ACCEPTED["llama"])
    with pytest.raises(ConfigError, match="recompute must be 'full', 'none' or 'auto', got 'some'"):
        TransformersRuntime(model, recompute="some")  # type: ignore[arg-type]


def test_a_model_called_without_a_packed_batch_says_how_to_call_it() -> None:
    """Tree attention does not guess a tree from positions."""
    model = transformers.AutoModelForCausalLM.from_config(ACCEPTED["llama"])
    TransformersRuntime(model, recompute="none")
    with pytest.raises(UnsupportedModelError, match=r"without a packed batch.*Call it through TrainerRank"):
        model(input_ids=model.dummy_inputs["input_ids"] % 20)
