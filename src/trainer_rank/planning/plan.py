"""Plans a step on a simulated device, with the rank that would run it there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoConfig

from trainer_rank.errors import ConfigError, TrainerRankMemoryError
from trainer_rank.memory import Recompute
from trainer_rank.meters.devices import DEVICES, Device
from trainer_rank.meters.simulated_device import Simulated
from trainer_rank.planning.report import Fix, PassReport, PlanReport
from trainer_rank.requests import Request
from trainer_rank.runtime.geometries import find_geometry
from trainer_rank.runtime.transformers import LoraConfig, TransformersRuntime
from trainer_rank.session import TrainerRank
from trainer_rank.session.planned import PlannedPass

PROJECTIONS: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_FEWEST_CHUNK_ROWS: Final = 64

Requests = Callable[[int], Sequence[Request]]
"""Makes the requests for a vocabulary of so many tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How the step is trained.

    Attributes:
        model: A built-in geometry, or a folder with ``config.json``.
        lora_rank: Rank of the adapters on every projection; None trains every parameter.
        recompute, dtype: As for the runtime.
        head_chunk_rows, max_packed_tokens, caller_bytes_per_token: As for ``TrainerRank``.
    """

    model: str
    lora_rank: int | None = 16
    recompute: Recompute = "full"
    dtype: str = "bfloat16"
    head_chunk_rows: int = 512
    max_packed_tokens: int | None = None
    caller_bytes_per_token: int = 256


def make_plan(options: Options, device: Device, requests: Requests, *, with_fixes: bool = True) -> PlanReport:
    """Return whether and how a step over the requests fits a device; nothing is trained and no weight is read.

    Raises:
        ConfigError: The model is unknown or its folder holds no configuration.
        UnsupportedModelError: The model cannot be run as prefix trees.
        RequestError: A request is malformed for this model.
    """
    runtime = _runtime(options)
    report = _plan(options, device, runtime, requests(runtime.facts.vocabulary_size))
    if report.fits or not with_fixes:
        return report
    return replace(report, fixes=tuple(_fixes(options, device, requests, report)))


def _runtime(options: Options) -> TransformersRuntime:
    lora = None if options.lora_rank is None else LoraConfig(r=options.lora_rank, target_modules=list(PROJECTIONS))
    return TransformersRuntime.from_config(
        _config(options.model), lora=lora, recompute=options.recompute, dtype=options.dtype, stands_for="cuda"
    )


def _config(model: str) -> Any:
    path = Path(model)
    if path.exists():
        folder = path.parent if path.name == "config.json" else path
        if not (folder / "config.json").is_file():
            raise ConfigError(f"model must be a folder with config.json, and {model} has none")
        return AutoConfig.from_pretrained(folder)
    geometry = asdict(find_geometry(model))
    return AutoConfig.for_model(geometry.pop("model_type"), **geometry)


def _plan(options: Options, device: Device, runtime: TransformersRuntime, requests: Sequence[Request]) -> PlanReport:
    facts = runtime.facts
    tensors = [*runtime.model.parameters(), *runtime.model.buffers()]
    weights = {"CUDA context": device.context_bytes, "weights": facts.weight_bytes}
    pending = {"optimizer state": facts.adam_state_bytes}
    common: dict[str, Any] = {
        "model": options.model,
        "device": device.name,
        "options": asdict(options),
        "capacity_bytes": device.usable_bytes,
        "pending": pending,
        "fixes": (),
    }
    needed = sum(weights.values())
    if needed > device.usable_bytes:
        return PlanReport(
            **common, fits=False, resident=weights, passes=(), short_bytes=needed - device.usable_bytes,
            refusal="the weights alone do not fit", peak_bytes=needed,
        )  # fmt: skip
    with Simulated(device) as meter:
        try:
            meter.place(tensors)
            reading = meter.read()
            rounding = reading.resident_bytes - needed
            resident = {**weights, "allocator's rounding": rounding, "reserve": reading.reserve_bytes}
            rank = TrainerRank(
                runtime, meter=meter, head_chunk_rows=options.head_chunk_rows,
                max_packed_tokens=options.max_packed_tokens, caller_bytes_per_token=options.caller_bytes_per_token,
            )  # fmt: skip
            planned = rank.plan(requests)
        except torch.OutOfMemoryError as error:
            return PlanReport(
                **common, fits=False, resident=weights, passes=(), short_bytes=max(1, needed - device.usable_bytes),
                refusal=f"the weights alone do not fit: {error}", peak_bytes=needed,
            )  # fmt: skip
        except TrainerRankMemoryError as error:
            return PlanReport(
                **common, fits=False, resident=resident, passes=(), refusal=str(error),
                short_bytes=error.short_bytes or 0,
                peak_bytes=sum(resident.values()) + (error.admission.charged_bytes if error.admission else 0),
            )  # fmt: skip
    charged = max((one.admission.charged_bytes for one in planned), default=0)
    return PlanReport(
        **common, fits=True, resident=resident, passes=tuple(map(_pass, planned)), refusal=None, short_bytes=0,
        peak_bytes=sum(resident.values()) + charged,
    )  # fmt: skip


def _pass(planned: PlannedPass) -> PassReport:
    price, stats = planned.admission.price, planned.stats
    return PassReport(
        requests=stats.requests,
        packed_rows=stats.packed_rows,
        logical_tokens=stats.logical_tokens,
        head_rows=sum(work.head.num_rows for work in planned.works),
        required_bytes=price.required_bytes,
        phase=price.phase,
        terms={term.name: term.num_bytes for term in price.terms},
    )


def _fixes(options: Options, device: Device, requests: Requests, refused: PlanReport) -> Iterator[Fix]:
    """Yield the changes that make the step fit, each planned anew; those that change least come first."""
    before = refused.peak_bytes
    for change, changed in _changes(options):
        plan = make_plan(changed, device, requests, with_fixes=False)
        if plan.fits:
            yield Fix(change=change, before_bytes=before, after_bytes=plan.peak_bytes, passes=len(plan.passes))
    for larger in sorted(DEVICES, key=lambda one: one.usable_bytes):
        if larger.usable_bytes > device.usable_bytes and larger.usable_bytes > before:
            plan = make_plan(options, larger, requests, with_fixes=False)
            if plan.fits:
                yield Fix(change=f"take a {larger.name} instead of {device.name}", before_bytes=before,
                          after_bytes=plan.peak_bytes, passes=len(plan.passes))  # fmt: skip
                return


def _changes(options: Options) -> Iterator[tuple[str, Options]]:
    """Yield single changes of the options, and then all of them together."""
    together = options
    rows = options.head_chunk_rows
    if rows > _FEWEST_CHUNK_ROWS:
        fewer = max(_FEWEST_CHUNK_ROWS, min(512, rows // 4))
        together = replace(together, head_chunk_rows=fewer)
        yield f"chunk the head: {rows:,} -> {fewer:,} rows", replace(options, head_chunk_rows=fewer)
    if options.recompute == "none":
        together = replace(together, recompute="full")
        yield "recompute: none -> full", replace(options, recompute="full")
    if options.dtype == "float32":
        together = replace(together, dtype="bfloat16")
        yield "dtype: float32 -> bfloat16", replace(options, dtype="bfloat16")
    if together != options:
        yield "all of these together", together
    if options.lora_rank is None:
        yield "train adapters of rank 16 instead of all weights", replace(together, lora_rank=16)
