"""The price of a pass that has not run yet: run it without data and watch what it allocates.

The executor's own forward, head, boundary and backward run on a ``meta`` twin of the model. Two and three layers are
enough: the rest of the stack is more of the same (``memory.extrapolate``). Prices are kept by the shape of the pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from trainer_rank.executor.recorder import AllocationRecorder
from trainer_rank.executor.run import run_forward
from trainer_rank.memory import (
    Price,
    Recompute,
    Timeline,
    Trace,
    category_names,
    extrapolate_layers,
    fold,
    itemised,
    stretches_at_depth,
    stretches_of_two_kinds,
)
from trainer_rank.memory.envelope import CALLER_PHASES
from trainer_rank.memory.stretches import CALLER, NUM_CATEGORIES, Stretch
from trainer_rank.meters.simulated_device import paused
from trainer_rank.planner import PassWork
from trainer_rank.runtime import Runtime

SHALLOW: Final = 2
DEEPER: Final = 3
TWO_KINDS: Final = ((4, 2), (5, 3), (5, 2))
"""Layers, and how many of them are recomputed, of traces that tell both kinds apart: a base, and one more of each."""

_META: Final = torch.device("meta")


class DryRunPricer:
    """Prices passes of one runtime by dry runs.

    Args:
        runtime: The live model; only its twins run.
        head_chunk_rows: As the executor will use it.
        caller_bytes_per_token: Declared peak of the caller's own loss, in bytes per logical token of a pass, beyond
            the built-in losses that the dry run includes.
    """

    def __init__(self, runtime: Runtime, *, head_chunk_rows: int, caller_bytes_per_token: int) -> None:
        self._runtime = runtime
        self._head_chunk_rows = head_chunk_rows
        self._caller_bytes_per_token = caller_bytes_per_token
        self._twins: dict[tuple[int, Recompute], tuple[Runtime, _Relay]] = {}
        self._prices: dict[tuple[str, Recompute], Price] = {}
        # Of the shape run last: whoever asks for its price often asks for its timeline next.
        self._traced: tuple[tuple[str, Recompute], dict[tuple[int, int | None], Trace]] | None = None

    def price(self, work: PassWork) -> Price:
        """Return the price of a pass; the same shape is run dry once."""
        key = (work.shape_key, self._runtime.recompute)
        if key not in self._prices:
            self._prices[key] = self._price(work)
        return self._prices[key]

    def timeline(self, work: PassWork) -> Timeline:
        """Return the allocation timeline of a pass at the model's full depth."""
        depth = self._runtime.facts.num_layers
        if two_kinds(self._runtime, work):
            return fold(self.trace(work, depth, work.recomputed))
        if depth <= DEEPER:
            return fold(self.alike(work, depth))
        return extrapolate_layers(fold(self.alike(work, SHALLOW)), fold(self.alike(work, DEEPER)), depth)

    def _price(self, work: PassWork) -> Price:
        depth = self._runtime.facts.num_layers
        recomputed = work.recomputed if two_kinds(self._runtime, work) else None
        return price_of(
            self._stretches(work, depth, recomputed),
            mode_of(self._runtime, work),
            num_layers=depth,
            recomputed=recomputed,
            caller_bytes=self._caller_bytes_per_token * work.batch.logical_tokens,
        )

    def _stretches(self, work: PassWork, depth: int, recomputed: int | None) -> list[Stretch]:
        """Return the stretches of a pass at the model's full depth, from traces of a few layers."""
        if recomputed is not None:
            if depth <= max(layers for layers, _ in TWO_KINDS):
                whole = self.trace(work, depth, recomputed)
                return stretches_at_depth(whole, whole, depth)
            base, more_recomputed, more_kept = (self.trace(work, *counts) for counts in TWO_KINDS)
            return stretches_of_two_kinds(base, more_recomputed, more_kept, depth, recomputed)
        deeper = self.alike(work, min(depth, DEEPER))
        shallow = self.alike(work, SHALLOW) if depth > DEEPER else deeper
        return stretches_at_depth(shallow, deeper, depth)

    def alike(self, work: PassWork, num_layers: int) -> Trace:
        """Return the events of a pass whose layers are all treated alike, through fewer of them."""
        recomputed = None if work.recomputed is None else num_layers if work.recomputed else 0
        return self.trace(work, num_layers, recomputed)

    def _twin(self, num_layers: int) -> tuple[Runtime, _Relay]:
        key = (num_layers, self._runtime.recompute)
        if key not in self._twins:
            with paused():
                twin, relay = self._runtime.twin(num_layers), _Relay()
            twin.observe(relay)
            self._twins[key] = twin, relay
        return self._twins[key]

    def trace(self, work: PassWork, num_layers: int, recomputed: int | None = None) -> Trace:
        """Return the events of a pass through a twin of ``num_layers`` layers, ``recomputed`` of which run again."""
        # However many layers of the pass are recomputed, the traces of a few layers are the same.
        key = (replace(work, recomputed=None).shape_key, self._runtime.recompute)
        if self._traced is None or self._traced[0] != key:
            self._traced = key, {}
        known = self._traced[1]
        counts = num_layers, recomputed
        if counts not in known:
            known[counts] = self._trace(replace(work, recomputed=recomputed), num_layers)
        return known[counts]

    def _trace(self, work: PassWork, num_layers: int) -> Trace:
        twin, relay = self._twin(num_layers)
        recorder = AllocationRecorder(_META, twin.stands_for)
        relay.recorder = recorder
        try:
            # On a simulated device, too, a dry run allocates nothing; its mode would only be asked about every call.
            with paused(), _disable_current_modes(), recorder:
                self._step(twin, work, recorder)
        finally:
            relay.recorder = None
            for parameter in twin.trainable_parameters():
                parameter.grad = None
        some = work.recomputed is not None and 0 < work.recomputed < num_layers
        return replace(recorder.trace(num_layers), recomputed=work.recomputed if some else None)

    def _step(self, twin: Runtime, work: PassWork, recorder: AllocationRecorder) -> None:
        """Forward, a loss like the built-in ones, backward, commit."""
        result = run_forward(
            twin,
            work,
            head_chunk_rows=self._head_chunk_rows,
            map_error=lambda error: error,
            mark=recorder.mark,
            begin_call=recorder.call,
        )
        recorder.mark("loss")
        if result.graph is None:
            return
        losses = [outputs.logprobs.sum() * -1.0 for outputs in result.outputs if outputs.logprobs is not None]
        losses += [
            _Used.apply(tensor)  # type: ignore[no-untyped-call]
            for outputs in result.outputs
            for tensor in (outputs.top_logprobs, outputs.logits, outputs.hidden_states)
            if tensor is not None
        ]
        total = torch.stack(losses).sum()
        del losses
        recorder.mark("backward")
        total.backward()
        recorder.mark("end")


def price_of(
    made: Sequence[Stretch], mode: Recompute, *, num_layers: int, recomputed: int | None, caller_bytes: int
) -> Price:
    """Return the price of a pass from its stretches at full depth.

    Args:
        made: Its stretches.
        mode: What its layers do in backward.
        num_layers, recomputed: Layers, and how many of them run again where not all are treated alike.
        caller_bytes: Of the caller's own loss, while it is alive.
    """
    best, best_key = np.zeros(NUM_CATEGORIES, dtype=np.int64), made[0].key
    for stretch in made:
        live = stretch.live.copy()
        if stretch.key.phase in CALLER_PHASES:
            live[:, CALLER] += caller_bytes
        highest = live[int(live.sum(1).argmax())]
        if highest.sum() > best.sum():
            best, best_key = highest, stretch.key
    ends = [stretch.left for stretch in made if stretch.key.phase == "outputs"]
    return itemised(
        category_names(mode),
        best.tolist(),
        retained_bytes=int(ends[-1].sum()),
        phase=best_key.phase,
        layer=best_key.layer(num_layers, recomputed),
    )


def two_kinds(runtime: Runtime, work: PassWork) -> bool:
    """Return whether some layers of a pass run again in backward and some do not."""
    return (
        runtime.recompute == "auto"
        and not work.no_grad
        and work.recomputed is not None
        and 0 < work.recomputed < runtime.facts.num_layers
    )


def mode_of(runtime: Runtime, work: PassWork) -> Recompute:
    """Return what the layers of a pass do in backward: all of them the same, or ``auto``."""
    if runtime.recompute != "auto" or two_kinds(runtime, work):
        return runtime.recompute
    return "none" if work.recomputed == 0 else "full"


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class _Used(torch.autograd.Function):
    """A loss whose gradient is a whole tensor, as the gradients of logits and hidden states are in any real loss."""

    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        ctx.like = output.shape, output.dtype
        return output.new_zeros((), dtype=_wide(output.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        shape, dtype = ctx.like
        return torch.empty(shape, dtype=dtype, device=grad.device)


class _Relay:
    """Passes what a twin tells to the recorder of the dry run at hand."""

    def __init__(self) -> None:
        self.recorder: AllocationRecorder | None = None

    def mark(self, phase: str, layer: int | None = None) -> None:
        if self.recorder is not None:
            self.recorder.mark(phase, layer)

    def call(self, kind: str) -> None:
        if self.recorder is not None:
            self.recorder.call(kind)
