"""The LoRA adapters of one PEFT model, and which of them the model runs with."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn

from trainer_rank.errors import ConfigError, UnsupportedModelError
from trainer_rank.requests import BASE
from trainer_rank.runtime.support import check_adapter, check_targets

Lora: TypeAlias = LoraConfig | Mapping[str, LoraConfig]
"""One adapter, or several by name."""


class Adapters:
    """Switches between the adapters of a model, and off.

    PEFT's own switch also decides what is trained: it freezes every adapter but the one at work. Here all of them stay
    trainable whichever is at work, because a batch may train several.

    Args:
        model: The model; one that is no PEFT model has no adapters.

    Attributes:
        own: Name of the adapter that was active, the one a request without a name runs with; None without adapters.
        names: Names a request may give; ``BASE`` is among them when the model underneath is frozen.
        configs: PEFT's configuration of each adapter.

    Raises:
        UnsupportedModelError: An adapter cannot be run as prefix trees with unchanged numbers, or several of them
            share more than their own low-rank matrices.
    """

    def __init__(self, model: nn.Module) -> None:
        self.own: str | None = None
        self.names: tuple[str, ...] = ()
        self.configs: dict[str, Any] = {}
        self._layers: list[Any] = []
        self._parameters: dict[str, tuple[Tensor, ...]] = {}
        self._trained: list[tuple[Tensor, bool]] = []
        self._current: str | None = None
        if not isinstance(model, PeftModel):
            return
        self.own = str(model.active_adapter)
        self.configs = dict(model.peft_config)
        for config in self.configs.values():
            check_adapter(config)
        self._layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
        self._parameters = {name: tuple(_parameters(self._layers, name)) for name in self.configs}
        if len(self.configs) > 1:
            for name, config in self.configs.items():
                for parameter in self._parameters[name]:
                    parameter.requires_grad_(not config.inference_mode)
        self._trained = [(parameter, parameter.requires_grad) for one in self._parameters.values() for parameter in one]
        known = {id(parameter) for parameter, _ in self._trained}
        frozen = all(id(parameter) in known for parameter in model.parameters() if parameter.requires_grad)
        plain = frozen and not any(isinstance(module, AuxiliaryTrainingWrapper) for module in model.modules())
        if len(self.configs) > 1 and not plain:
            raise UnsupportedModelError(
                layer="adapter",
                reason="several adapters train more than their own low-rank matrices (modules_to_save or bias)",
                next_step="Leave modules_to_save and bias unset, or use one adapter",
            )
        self.names = (*self.configs, *((BASE,) if plain else ()))
        self._current = self.own

    def parameters(self, name: str | None) -> tuple[Tensor, ...]:
        """Return the trained parameters of one adapter; none for ``BASE``."""
        chosen = self.own if name is None else name
        return tuple(parameter for parameter in self._parameters.get(str(chosen), ()) if parameter.requires_grad)

    @contextmanager
    def using(self, name: str | None) -> Iterator[None]:
        """Have the model run with one adapter inside; a layer that is recomputed inside, too."""
        before = self._current
        self._switch(self.own if name is None else name)
        try:
            yield
        finally:
            self._switch(before)

    def _switch(self, name: str | None) -> None:
        if name == self._current:
            return
        for layer in self._layers:
            if name == BASE:
                layer.enable_adapters(False)
            else:
                layer.set_adapter([name])
                if layer.disable_adapters:
                    layer.enable_adapters(True)
        for parameter, trained in self._trained:
            parameter.requires_grad_(trained)
        self._current = name


def _parameters(layers: list[Any], name: str) -> Iterator[Tensor]:
    for layer in layers:
        for kind in layer.adapter_layer_names:
            held = getattr(layer, kind)
            if name in held:
                found = held[name]
                yield from found.parameters() if isinstance(found, nn.Module) else (found,)


def adapters_by_name(lora: Lora | None) -> dict[str, LoraConfig]:
    """Return the configurations by the adapter's name; a single one gets PEFT's usual name."""
    configs: dict[str, LoraConfig] = (
        {} if lora is None else dict(lora) if isinstance(lora, Mapping) else {"default": lora}
    )
    for name, config in configs.items():
        if not name or "." in name or name == BASE:
            raise ConfigError(f"an adapter's name must not be empty, {BASE!r} or contain a dot, got {name!r}")
        check_adapter(config)
    return configs


def adapted(model: Any, configs: Mapping[str, LoraConfig], *, own: str | None = None, check: bool = True) -> Any:
    """Return the model with fresh adapters on it; ``own``, or the first, is active."""
    base = model
    for number, (name, config) in enumerate(configs.items()):
        if check:
            check_targets(config, base)
        if number == 0:
            model = get_peft_model(model, copy.deepcopy(config), adapter_name=name)
        else:
            model.add_adapter(name, copy.deepcopy(config))
    if own is not None:
        model.set_adapter(own)
    return model


def plain_entries(config: LoraConfig) -> dict[str, str]:
    entries = {}
    for name, value in sorted(config.to_dict().items()):
        entries[name] = str(sorted(map(str, value))) if isinstance(value, set | list | tuple) else str(value)
    return entries
