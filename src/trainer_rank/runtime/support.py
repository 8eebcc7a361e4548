"""Which Transformers models can be run as prefix trees with unchanged numbers, and why others cannot."""

from __future__ import annotations

import difflib
from typing import Any, Final

from trainer_rank.errors import ConfigError, UnsupportedModelError

FAMILIES: Final = ("llama", "qwen2", "qwen3")
_NEXT: Final = f"Use a model of one of the families {', '.join(FAMILIES)}"

# Rotary types whose frequencies depend on the sequence at hand: a packed batch is longer than any of its requests, so
# the rotation of every row would change.
_LENGTH_DEPENDENT_ROPE: Final = ("dynamic", "longrope")


def check_supported(config: Any) -> None:
    """Raise ``UnsupportedModelError``, naming the layer and the reason, unless the model can be honoured."""
    family = getattr(config, "model_type", type(config).__name__)
    for layer, present, reason in (
        ("encoder", getattr(config, "is_encoder_decoder", False), "its encoder attends in both directions"),
        ("attn_logit_softcapping", getattr(config, "attn_logit_softcapping", None), "soft-capped attention logits"),
        ("sliding_window", _slides(config), "sliding-window attention sees positions, not the tree"),
        ("attention sinks", family in ("gpt_oss",), "attention sinks add a learned term to every softmax"),
        ("experts", getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None), "experts"),
        (
            "linear_attention",
            "linear_attention" in (getattr(config, "layer_types", None) or ()),
            "recurrent layers carry a state that must fork at each branch",
        ),
    ):
        if present:
            raise UnsupportedModelError(
                layer=f"{family}.{layer}", reason=f"{reason}, which prefix trees do not support yet", next_step=_NEXT
            )
    if family not in FAMILIES:
        raise UnsupportedModelError(
            layer=family, reason="this family has not been proved equal to one-by-one training", next_step=_NEXT
        )
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    rope_type = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else "default"
    if rope_type in _LENGTH_DEPENDENT_ROPE:
        raise UnsupportedModelError(
            layer=f"{family}.rope",
            reason=f"rope_type {rope_type!r} depends on the length of the whole batch, which packing changes",
            next_step="Use rope_type 'default', 'linear', 'llama3' or 'yarn'",
        )
    dropout = getattr(config, "attention_dropout", 0.0)
    if dropout:
        raise UnsupportedModelError(
            layer=f"{family}.attention_dropout",
            reason=f"dropout {dropout} would differ between a shared prefix and its copies",
            next_step="Set attention_dropout to 0",
        )


def check_adapter(config: Any) -> None:
    """Raise ``UnsupportedModelError`` for a PEFT configuration that cannot be honoured."""
    kind = getattr(config, "peft_type", None)
    if kind != "LORA":
        raise UnsupportedModelError(
            layer="adapter",
            reason=f"an adapter of type {getattr(kind, 'value', kind)} has not been proved equal to training alone",
            next_step="Use a LoraConfig",
        )
    if getattr(config, "alora_invocation_tokens", None):
        raise UnsupportedModelError(
            layer="alora_invocation_tokens",
            reason="an adapter that starts at a token of the prompt acts on a shared prefix by what follows it",
            next_step="Leave alora_invocation_tokens unset",
        )
    if getattr(config, "lora_dropout", 0.0):
        raise UnsupportedModelError(
            layer="lora_dropout",
            reason=f"dropout {config.lora_dropout} would differ between a shared prefix and its copies",
            next_step="Set lora_dropout to 0",
        )


def check_targets(config: Any, model: Any) -> None:
    """Raise ``ConfigError`` for a target that names no layer; PEFT ignores one beside another that does."""
    targets = getattr(config, "target_modules", None)
    if not isinstance(targets, list | tuple | set):
        return
    layers = [name for name, _ in model.named_modules() if name]
    for target in sorted(targets):
        if not any(name == target or name.endswith(f".{target}") for name in layers):
            known = sorted({name.rpartition(".")[2] for name in layers if name.endswith("_proj")})
            near = difflib.get_close_matches(target, known, n=2, cutoff=0.3) or known
            raise ConfigError(
                f"the adapter's targets must name layers of the model, got {target!r}; nearest: {', '.join(near)}"
            )


def _slides(config: Any) -> bool:
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return any(kind in ("sliding_attention", "chunked_attention") for kind in kinds)
    used = getattr(config, "use_sliding_window", True)
    return bool(used and getattr(config, "sliding_window", None))
