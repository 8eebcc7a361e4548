"""The models of the GPU fixtures on ``meta``, patched to allocate what their training step allocates on a GPU.

The step runs Hugging Face models with PEFT adapters, Liger kernels and CUDA autocast. The last two do not run on
``meta``; what they allocate is written out here, from their public code:

* Liger: RMS norm keeps its input and one float32 per row, and writes its gradient over the incoming one; rotary
  embedding works in place; SwiGLU keeps gate and up and writes their gradients over them.
* Autocast to bfloat16: float32 adapters are cast per region, once for those that require gradients.
* Adapter routing: the base layer's result, the input in the adapter's float32, both casts, and a sum beside the result.
* Attention: aten's flash kernel with fewer key/value heads natively, and what it allocates inside.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    LlamaConfig,
    LlamaForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.models.llama import modeling_llama
from transformers.models.qwen2 import modeling_qwen2

from trainer_rank.runtime.attention.cuda_scratch import FLASH_ROWS, CallSizes, flash_forward_bytes, round_up

META: Final = torch.device("meta")
TRACED_LAYERS: Final = 4
_ATTENTION: Final = "fixture-fused"
_DTYPE: Final = torch.bfloat16
_aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """What a public config says about a decoder, and what Liger and the adapters do with its family."""

    name: str
    family: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    groups: int
    vocabulary: int
    tied: bool
    experts: int = 0
    experts_per_token: int = 0
    has_liger: bool = True
    adapted: str | tuple[str, ...] = "all-linear"


GEOMETRIES: Final = {
    geometry.name: geometry
    for geometry in (
        Geometry(
            name="Qwen/Qwen2.5-0.5B-Instruct", family="qwen2", layers=24, hidden=896, intermediate=4864, heads=14,
            groups=2, vocabulary=151936, tied=True,
        ),
        Geometry(
            name="Qwen/Qwen2.5-1.5B-Instruct", family="qwen2", layers=28, hidden=1536, intermediate=8960, heads=12,
            groups=2, vocabulary=151936, tied=True,
        ),
        Geometry(
            name="Qwen/Qwen2.5-3B-Instruct", family="qwen2", layers=36, hidden=2048, intermediate=11008, heads=16,
            groups=2, vocabulary=151936, tied=True,
        ),
        Geometry(
            name="Qwen/Qwen2.5-7B-Instruct", family="qwen2", layers=28, hidden=3584, intermediate=18944, heads=28,
            groups=4, vocabulary=152064, tied=False,
        ),
        Geometry(
            name="HuggingFaceTB/SmolLM2-1.7B-Instruct", family="llama", layers=24, hidden=2048, intermediate=8192,
            heads=32, groups=32, vocabulary=49152, tied=True,
        ),
        Geometry(
            name="allenai/OLMoE-1B-7B-0924-Instruct", family="olmoe", layers=16, hidden=2048, intermediate=1024,
            heads=16, groups=16, vocabulary=50304, tied=False, experts=64, experts_per_token=8, has_liger=False,
            adapted=("q_proj", "k_proj", "v_proj", "o_proj"),
        ),
    )
}  # fmt: skip


def build(geometry: Geometry, rank: int, multiprocessors: int, layers: int = TRACED_LAYERS) -> Any:
    """Return the adapted model on ``meta``, cut to ``layers`` layers: a trained adapter and a reference."""
    config_type, model_type = {
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
        "olmoe": (OlmoeConfig, OlmoeForCausalLM),
    }[geometry.family]
    moe = {"num_experts": geometry.experts, "num_experts_per_tok": geometry.experts_per_token}
    config = config_type(
        vocab_size=geometry.vocabulary,
        hidden_size=geometry.hidden,
        intermediate_size=geometry.intermediate,
        num_hidden_layers=layers,
        num_attention_heads=geometry.heads,
        num_key_value_heads=geometry.groups,
        tie_word_embeddings=geometry.tied,
        max_position_embeddings=32768,
        use_cache=False,
        **(moe if geometry.experts else {}),
    )
    config._attn_implementation = _ATTENTION
    AttentionInterface.register(_ATTENTION, partial(_attention, multiprocessors=multiprocessors))
    for source in (modeling_llama, modeling_qwen2):
        source.apply_rotary_pos_emb = _rotary
    with META:
        base = model_type(config).to(_DTYPE)
    lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=_targets(geometry), task_type="CAUSAL_LM")
    with META:
        model = get_peft_model(base, lora, adapter_name="actor")
        model.add_adapter("reference", lora)
    for module in base.modules():
        kind = type(module).__name__
        if geometry.has_liger and kind.endswith("RMSNorm"):
            module.forward = partial(_norm, module, multiprocessors)
        elif geometry.has_liger and kind.endswith("MLP"):
            module.forward = partial(_feed_forward, module)
        elif isinstance(module, LoraLayer):
            module.forward = partial(_routed, module)
    base.gradient_checkpointing_enable(
        {"use_reentrant": False, "preserve_rng_state": False, "context_fn": _recompute_contexts}
    )
    return model


def _targets(geometry: Geometry) -> str | list[str]:
    return geometry.adapted if isinstance(geometry.adapted, str) else list(geometry.adapted)


class Autocast:
    """The cache of bfloat16 copies that one autocast region keeps of float32 leaves with gradients."""

    _copies: dict[int, Tensor] | None = None
    adapter = "actor"

    @classmethod
    @contextlib.contextmanager
    def region(cls) -> Iterator[None]:
        """Cast inside; drop the copies at the end of the outermost region."""
        outer, cls._copies = cls._copies, {} if cls._copies is None else cls._copies
        try:
            yield
        finally:
            cls._copies = outer

    @classmethod
    def cast(cls, tensor: Tensor) -> Tensor:
        """Return the bfloat16 copy a matrix product would compute with."""
        if tensor.dtype == _DTYPE or cls._copies is None:
            return tensor
        if not (tensor.requires_grad and tensor.is_leaf):
            return tensor.to(_DTYPE)
        if id(tensor) not in cls._copies:
            cls._copies[id(tensor)] = tensor.to(_DTYPE)
        return cls._copies[id(tensor)]


def _recompute_contexts() -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
    return contextlib.nullcontext(), Autocast.region()


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    result: Tensor = nn.functional.linear(Autocast.cast(x), Autocast.cast(weight))
    return result


def _delta(layer: Any, x: Tensor) -> Tensor:
    down, up = layer.lora_A[Autocast.adapter].weight, layer.lora_B[Autocast.adapter].weight
    wide = x.to(down.dtype)
    scaling: float = layer.scaling[Autocast.adapter]
    return _linear(_linear(wide, down), up) * scaling


def _routed(layer: Any, x: Tensor) -> Tensor:
    base: Tensor = layer.base_layer(x)
    rows = base.narrow(0, 0, x.shape[0])
    return rows + _delta(layer, x.narrow(0, 0, x.shape[0])).to(rows.dtype)


def _norm(module: Any, multiprocessors: int, x: Tensor) -> Tensor:
    result: Tensor = _Norm.apply(x, module.weight, multiprocessors)  # type: ignore[no-untyped-call]
    return result


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, multiprocessors: int) -> Tensor:
        y = torch.empty_like(x)
        per_row = torch.empty(x.numel() // x.shape[-1], dtype=torch.float32, device=x.device)
        ctx.save_for_backward(x, weight, per_row)
        ctx.multiprocessors = multiprocessors
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        _, weight, _ = ctx.saved_tensors
        grad = grad.contiguous()
        partial_sums = torch.empty(ctx.multiprocessors, weight.numel(), dtype=torch.float32, device=grad.device)
        partial_sums.sum(dim=0).to(weight.dtype)
        return grad, None, None


def _feed_forward(module: Any, x: Tensor) -> Tensor:
    gated = _SwiGlu.apply(module.gate_proj(x), module.up_proj(x))  # type: ignore[no-untyped-call]
    result: Tensor = module.down_proj(gated)
    return result


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return torch.empty_like(gate)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return gate, up


def _rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    q, k = _Rotary.apply(q, k, cos, sin)  # type: ignore[no-untyped-call]
    return q, k


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _row_major(q), _row_major(k)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor, Tensor, None, None]:
        return _row_major(dq), _row_major(dk), None, None


def _row_major(x: Tensor) -> Tensor:
    """Return (B, H, T, D) whose memory is (B, T, H, D): itself, or a copy."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _attention(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, multiprocessors: int, **_: Any
) -> tuple[Tensor, None]:
    if mask is not None:
        raise ValueError("full rows of one length need no mask")
    out = _Flash.apply(q, k, v, multiprocessors)  # type: ignore[no-untyped-call]
    return out.transpose(1, 2).contiguous(), None


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, multiprocessors: int) -> Tensor:
        rows = [x.transpose(1, 2) for x in (q, k, v)]
        length = q.shape[2]
        out, lse, *_ = _aten._flash_attention_forward(*rows, None, None, length, length, 0.0, True, False)
        _scratch(flash_forward_bytes(_sizes(q, k), multiprocessors), q)
        ctx.save_for_backward(q, k, v, out, lse)
        result: Tensor = out.transpose(1, 2)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, lse = ctx.saved_tensors
        state = torch.empty(2, dtype=torch.uint64, device=q.device)
        unused = torch.empty((), dtype=torch.uint64, device=q.device)
        rows = [x.transpose(1, 2) for x in (q, k, v)]
        length = q.shape[2]
        grads = _aten._flash_attention_backward(
            grad.transpose(1, 2).contiguous(), *rows, out, lse, None, None, length, length, 0.0, True, state, unused
        )
        held = [torch.empty(nbytes, dtype=torch.uint8, device=q.device) for nbytes in _backward_scratch(_sizes(q, k))]
        del held
        dq, dk, dv = (x.transpose(1, 2) for x in grads)
        return dq, dk, dv, None


def _sizes(q: Tensor, k: Tensor) -> CallSizes:
    batch, heads, queries, head_size = q.shape
    return CallSizes(batch=batch, heads=heads, groups=k.shape[1], queries=queries, keys=k.shape[2], head_size=head_size)


def _backward_scratch(sizes: CallSizes) -> list[int]:
    """Return what a flash backward holds beside its results, block by block: an allocator sees each of them."""
    rows = sizes.batch * sizes.heads * round_up(sizes.queries, FLASH_ROWS)
    blocks = [rows * 4, rows * round_up(sizes.head_size, 32 if sizes.head_size <= 128 else 64) * 4]
    if sizes.groups < sizes.heads:
        blocks += 2 * [sizes.batch * sizes.keys * sizes.heads * sizes.head_size * _DTYPE.itemsize]
    return blocks


def _scratch(nbytes: int, like: Tensor) -> None:
    """Allocate and drop what a kernel allocates inside."""
    torch.empty(nbytes, dtype=torch.uint8, device=like.device)
