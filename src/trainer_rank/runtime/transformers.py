"""Hugging Face Transformers models: Llama, Qwen2 and Qwen3 through the library's own attention interface.

No model code is copied. The library's decoder calls the attention function registered here and passes the packed
batch's attention plan through as a keyword argument. Only the attention interface is registered, not the mask
interface: the library then builds no mask and runs none of its packed-sequence detection, which would otherwise read
restarting positions as boundaries and silently cut branches off their prefix.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM

from trainer_rank.errors import ConfigError, UnsupportedModelError
from trainer_rank.memory import Call, ModelFacts, Recompute, RecomputeReading, RecomputeSetting
from trainer_rank.memory.signature import ONE_LAYER
from trainer_rank.prefix import PackedBatch
from trainer_rank.runtime.adapters import Adapters, Lora, adapted, adapters_by_name, plain_entries
from trainer_rank.runtime.attention import (
    AttentionPlan,
    BoundAttention,
    Kernel,
    attention_calls,
    attention_plan,
    index_rows,
    kernel_for,
    tree_attention,
)
from trainer_rank.runtime.base import Observer, Runtime
from trainer_rank.runtime.identity import identity_of
from trainer_rank.runtime.recompute import read_recompute
from trainer_rank.runtime.support import check_supported
from trainer_rank.runtime.transfer import to_device

ATTENTION = "trainer_rank_tree"
__all__ = ["LoraConfig", "TransformersRuntime"]


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    tree: BoundAttention | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The library's attention hook: (1, H, P, D) queries to ((1, P, H, D), no weights)."""
    if tree is None:
        raise UnsupportedModelError(
            layer=type(module).__name__,
            reason="the model was called without a packed batch",
            next_step="Call it through TrainerRank, or set its attention implementation back to 'sdpa'",
        )
    assert attention_mask is None, "no mask is built for an attention function registered without a mask function"
    return tree_attention(query, key, value, tree, scaling), None


AttentionInterface.register(ATTENTION, _attend)


class TransformersRuntime(Runtime):
    """A causal language model of the Transformers library.

    Args:
        model: The model, or a PEFT model around it with one or several LoRA adapters. Its attention implementation is
            switched to tree attention and its training mode turned on (there is no dropout to switch). The active
            adapter becomes the runtime's own; all of them are trained.
        recompute: ``full`` runs each layer again in backward and keeps only its input; ``none`` keeps activations;
            ``auto`` leaves it to each pass how many of its layers run again.
        stands_for: For a model on ``meta``, the device it stands for; None is the model's own.

    Raises:
        UnsupportedModelError: The model cannot be run as prefix trees with unchanged numbers.
    """

    def __init__(
        self, model: nn.Module, *, recompute: Recompute = "full", stands_for: torch.device | None = None
    ) -> None:
        # The library builds its models from a configuration; their attributes have no static types.
        self._model: Any = model
        causal: Any = model.get_base_model() if isinstance(model, PeftModel) else model
        self._causal: Any = causal
        check_supported(self._causal.config)
        self._adapters = Adapters(model)
        if recompute not in ("full", "none", "auto"):
            raise ConfigError(f"recompute must be 'full', 'none' or 'auto', got {recompute!r}")
        self._check_head()
        causal.set_attn_implementation(ATTENTION)
        self._elastic = recompute == "auto"
        self._set_recompute(recompute)
        self._built_with = RecomputeSetting() if recompute == "none" else ONE_LAYER
        self._model.train()
        self._parameters: tuple[Tensor, ...] = tuple(p for p in model.parameters() if p.requires_grad)
        self._stands_for = self.device if stands_for is None else stands_for
        self._facts = self._read_facts()
        self._observer: Observer | None = None

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        lora: Lora | None = None,
        recompute: Recompute = "full",
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "cpu",
    ) -> TransformersRuntime:
        """Load a model from a local folder and, with ``lora``, put a fresh adapter on it.

        Args:
            path: Folder with the model's configuration and weights.
            lora: PEFT's LoRA configuration, or several by name, the first of which becomes the runtime's own; None
                trains every parameter.
            recompute: As in the constructor.
            dtype: Parameter dtype, ``auto`` for the checkpoint's own.
            device: Where to put the model.
        """
        config = transformers.AutoConfig.from_pretrained(path)
        check_supported(config)
        configs = adapters_by_name(lora)
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device)
        return cls(adapted(model, configs), recompute=recompute)

    @classmethod
    def from_config(
        cls,
        config: Any,
        *,
        lora: Lora | None = None,
        recompute: Recompute = "full",
        dtype: str | torch.dtype = torch.bfloat16,
        stands_for: str | torch.device = "cuda",
    ) -> TransformersRuntime:
        """Build a model without weights, on ``meta``, to price its passes or to run it on a simulated device.

        Args:
            config: The library's configuration object, or a local folder that holds one.
            lora: As in ``from_pretrained``.
            recompute: As in the constructor.
            dtype: Parameter dtype.
            stands_for: Device whose kernels a real model would run.
        """
        if isinstance(config, str | Path):
            config = transformers.AutoConfig.from_pretrained(config)
        check_supported(config)
        configs = adapters_by_name(lora)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(
                config, dtype=getattr(torch, dtype) if isinstance(dtype, str) else dtype
            )
            model = adapted(model, configs)
        return cls(model, recompute=recompute, stands_for=torch.device(stands_for))

    @property
    def facts(self) -> ModelFacts:
        return self._facts

    @property
    def model(self) -> Any:
        """The wrapped model."""
        return self._model

    @property
    def device(self) -> torch.device:
        device: torch.device = self._causal.lm_head.weight.device
        return device

    @property
    def stands_for(self) -> torch.device:
        return self._stands_for

    @property
    def logprob_dtype(self) -> torch.dtype:
        return torch.float64 if self._causal.lm_head.weight.dtype == torch.float64 else torch.float32

    @property
    def recompute(self) -> Recompute:
        layers = self._layers()
        if not all(layer.training for layer in layers):
            return "none"
        if self._elastic:
            return "auto"
        return "full" if self._causal.is_activation_checkpointing else "none"

    @property
    def recompute_reading(self) -> RecomputeReading:
        return read_recompute(self._causal, self._layers(), self._built_with, elastic=self._elastic)

    @property
    def signature(self) -> Mapping[str, object]:
        config = self._causal.config.to_dict()
        for name in ("_name_or_path", "transformers_version"):
            config.pop(name, None)
        return {
            "config": config,
            "adapters": {name: plain_entries(one) for name, one in self._adapters.configs.items()},
            "kernel": str(self._kernel()),
            "device": self._stands_for.type,
            "parameters": [
                (name, str(parameter.dtype), parameter.requires_grad)
                for name, parameter in self._model.named_parameters()
                # One layer of each kind stands for all.
                if ".layers." not in name or ".layers.0." in name
            ],
            "facts": str(self._facts),
        }

    def forward(self, batch: PackedBatch, *, recomputed: int | None = None) -> Tensor:
        device, observer = self.device, self._observer
        if self._elastic:
            for number, layer in enumerate(self._layers()):
                # The library reads this attribute whenever a layer runs forward; a recomputed layer is past reading it.
                layer.gradient_checkpointing = recomputed is None or number < recomputed  # type: ignore[assignment]
        kernel, plan = self._kernel(), _plan(batch)
        if observer is None:
            tree = BoundAttention.bind(plan, kernel, device)
        else:
            tree = BoundAttention.bind(plan, kernel, device, observer.call)
            observer.mark("embedding")
        hidden: Tensor = self._causal.model(
            input_ids=to_device(batch.token_ids, device).unsqueeze(0),
            position_ids=to_device(batch.positions, device).unsqueeze(0),
            use_cache=False,
            tree=tree,
        ).last_hidden_state
        return hidden[0]

    def attention_calls(self, batch: PackedBatch) -> tuple[Call, ...]:
        facts = self._facts
        return attention_calls(
            _plan(batch),
            self._kernel(),
            heads=facts.num_heads,
            groups=facts.num_key_value_heads,
            head_size=facts.head_size,
            dtype=self._causal.lm_head.weight.dtype,
        )

    def index_rows(self, batch: PackedBatch) -> int:
        return index_rows(_plan(batch))

    def _kernel(self) -> Kernel:
        return kernel_for(self._stands_for, self._causal.lm_head.weight.dtype)

    def head(self) -> tuple[Tensor, Tensor | None]:
        head = self._causal.lm_head
        return head.weight, head.bias

    def trainable_parameters(self) -> tuple[Tensor, ...]:
        return self._parameters

    def parameters_of(self, adapter: str | None) -> tuple[Tensor, ...]:
        if self._adapters.own is None or (adapter in (None, self._adapters.own) and len(self._adapters.configs) == 1):
            return self._parameters
        return self._adapters.parameters(adapter)

    def using(self, adapter: str | None) -> AbstractContextManager[None]:
        return self._adapters.using(adapter)

    @contextmanager
    def generating(self) -> Iterator[Any]:
        """Yield the model as the library knows it, to generate with the weights that are trained.

        Inside, its attention is the library's own, layers are not recomputed, and it is in evaluation mode; nothing
        may be trained until the context is left, which puts everything back. What generation allocates is not priced.
        """
        recompute, training = self.recompute, self._model.training
        self._causal.set_attn_implementation("sdpa")
        self._causal.activation_checkpointing_disable()
        self._model.eval()
        try:
            yield self._model
        finally:
            self._causal.set_attn_implementation(ATTENTION)
            self._set_recompute(recompute)
            self._model.train(training)

    def twin(self, num_layers: int) -> TransformersRuntime:
        config = copy.deepcopy(self._causal.config)
        config.num_hidden_layers = num_layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:num_layers]
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=self._causal.lm_head.weight.dtype)
            model = adapted(model, self._adapters.configs, own=self._adapters.own, check=False)
        own = dict(self._model.named_parameters())
        for name, parameter in model.named_parameters():
            # PEFT casts an adapter's weights only where there are data to cast.
            parameter.data = parameter.data.to(own[name].dtype)
            parameter.requires_grad_(own[name].requires_grad)
        return type(self)(model, recompute=self.recompute, stands_for=self._stands_for)

    def observe(self, observer: Observer) -> None:
        self._observer = observer
        for number, layer in enumerate(self._layers()):
            layer.register_forward_pre_hook(_forward_hook(observer, number))
            layer.register_forward_hook(_backward_hook(observer, number))

    def save(self, path: Path) -> None:
        self._model.save_pretrained(path)

    def trained(self) -> dict[str, Tensor]:
        # PEFT writes the tensors of an adapter without its name.
        inner = f".{self._adapters.own}." if len(self._adapters.configs) == 1 else None
        return {
            name if inner is None else ".".join(name.rsplit(inner, 1)): parameter
            for name, parameter in self._model.named_parameters()
            if parameter.requires_grad
        }

    def adapter_config(self) -> bytes | None:
        if self._adapters.own is None:
            return None
        config = copy.deepcopy(self._adapters.configs[self._adapters.own])
        config.inference_mode = True
        if config.base_model_name_or_path is None:
            config.base_model_name_or_path = self._causal.config.name_or_path
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            return (Path(folder) / "adapter_config.json").read_bytes()

    def identity(self) -> dict[str, Any]:
        return identity_of(self._facts, self._model.named_parameters())

    def _layers(self) -> list[nn.Module]:
        return list(self._causal.model.layers)

    def _set_recompute(self, recompute: Recompute) -> None:
        if recompute != "none":
            self._causal.activation_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
        else:
            self._causal.activation_checkpointing_disable()

    def _check_head(self) -> None:
        head = getattr(self._causal, "lm_head", None)
        if type(head) is not nn.Linear:
            raise UnsupportedModelError(
                layer="lm_head",
                reason=f"the head is projected in chunks by its weight, but it is a {type(head).__name__}",
                next_step="Leave lm_head out of the adapter's target_modules and modules_to_save",
            )

    def _read_facts(self) -> ModelFacts:
        config = self._causal.config
        tensors = [*self._model.parameters(), *self._model.buffers()]
        trainable = [p.numel() * p.element_size() for p in self._parameters]
        return ModelFacts(
            family=config.model_type,
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            num_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_size=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            vocabulary_size=self._causal.lm_head.weight.shape[0],
            max_positions=config.max_position_embeddings,
            dtype=str(self._causal.lm_head.weight.dtype).removeprefix("torch."),
            weight_bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
            trainable_bytes=sum(trainable),
            num_trainable=len(trainable),
            largest_trainable_bytes=max(trainable, default=0),
            adapter=self._adapters.own,
            adapters=self._adapters.names,
        )


def _plan(batch: PackedBatch) -> AttentionPlan:
    return attention_plan(batch.segment_start, batch.segment_stop, batch.subtree_stop)


def _forward_hook(observer: Observer, number: int) -> Any:
    def hook(module: nn.Module, args: Any) -> None:
        observer.mark("forward", number)

    return hook


def _backward_hook(observer: Observer, number: int) -> Any:
    """A layer's backward begins when the gradient of its output is complete."""

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda grad: observer.mark("backward", number))

    return hook
