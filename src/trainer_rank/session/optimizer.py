"""AdamW over the runtime's trainable parameters, created at the first step and charged before it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

SLOTS: Final = ("step", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What an optimizer step did.

    Attributes:
        grad_norm: Norm of the whole gradient before clipping; 0 on ``meta``, where there are no data.
        lr: Learning rate used.
        skipped: True when the gradient was not finite and the step was left out.
    """

    grad_norm: float
    lr: float
    skipped: bool


class Optimizer:
    """torch's fused AdamW; its two moments do not exist before the first step."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = list(parameters)
        self._adam: torch.optim.AdamW | None = None

    @property
    def exists(self) -> bool:
        """Whether the moments are allocated."""
        return self._adam is not None

    def step(
        self, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, max_grad_norm: float | None
    ) -> StepOutcome:
        """Clip, step, clear the gradients."""
        norm = self._clip(max_grad_norm)
        if not math.isfinite(norm):
            warnings.warn(f"the gradient norm is {norm}; this step is skipped", RuntimeWarning, stacklevel=3)
            self.zero_grad()
            return StepOutcome(grad_norm=norm, lr=lr, skipped=True)
        adam = self._new(lr) if self._adam is None else self._adam
        for group in adam.param_groups:
            group.update(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        adam.step()
        # Kept only now: a first step that runs out of memory leaves moments half made, and one without any gradient
        # makes none.
        if adam.state:
            self._adam = adam
        self.zero_grad()
        return StepOutcome(grad_norm=norm, lr=lr, skipped=False)

    def state(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return moments and step counts as ``<slot>.<name>``, themselves and no copies; empty before the first step.

        ``names`` are those of the parameters, in their order.
        """
        if self._adam is None:
            return {}
        found = zip(names, self._parameters, strict=True)
        return {
            f"{slot}.{name}": one
            for name, parameter in found
            for slot, one in self._adam.state.get(parameter, {}).items()
        }

    def load(self, tensors: Mapping[str, Tensor], names: Iterable[str]) -> None:
        """Go on from what ``state`` returned, copied into new tensors.

        Raises:
            ValueError: A tensor is of no parameter, of a slot that is not AdamW's, or not of its shape.
        """
        adam, parameters = self._new(1.0), dict(zip(names, self._parameters, strict=True))
        for key, saved in tensors.items():
            slot, _, name = key.partition(".")
            if slot not in SLOTS:
                raise ValueError(f"{key}: slot must be one of {', '.join(SLOTS)}, got {slot!r}")
            if name not in parameters:
                raise ValueError(f"{key}: must be of a trained parameter, and the model trains none of that name")
            parameter = parameters[name]
            own = torch.zeros_like(parameter, requires_grad=False) if slot != "step" else saved.new_zeros(())
            if own.shape != saved.shape:
                raise ValueError(f"{key}: {slot} must have the shape {tuple(own.shape)}, got {tuple(saved.shape)}")
            adam.state[parameter][slot] = own.to(parameter.device).copy_(saved)
        self._adam = adam if adam.state else None

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    def _new(self, lr: float) -> torch.optim.AdamW:
        # The fused kernel does not exist on ``meta``; one tensor at a time comes closest to its memory.
        if self._is_meta:
            return torch.optim.AdamW(self._parameters, lr=lr, foreach=False)
        return torch.optim.AdamW(self._parameters, lr=lr, fused=True)

    @property
    def _is_meta(self) -> bool:
        return any(parameter.is_meta for parameter in self._parameters)

    def _clip(self, max_grad_norm: float | None) -> float:
        limit = math.inf if max_grad_norm is None else max_grad_norm
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, limit)
        # Without data there is no norm; 0 stands for it.
        return 0.0 if norm.is_meta else float(norm)
