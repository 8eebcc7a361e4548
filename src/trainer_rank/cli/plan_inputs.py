"""What the options of ``trainer-rank plan`` say, checked before anything slow is imported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_rank.errors import ConfigError
from trainer_rank.meters.devices import Device, find_device
from trainer_rank.planning.options import PROJECTIONS, Options
from trainer_rank.planning.shape import Shape
from trainer_rank.training.lora_targets import family_of, targets_of
from trainer_rank.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from trainer_rank.planning.data_set import DataSet
    from trainer_rank.training.config import TrainConfig

# What a training run's configuration says itself.
_IN_CONFIG = ("model", "shape", "data", "recompute", "lora-rank", "targets", "full", "dtype", "groups-per-step")


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """A plan that is asked for; exactly one of ``shape`` and ``data`` is there."""

    options: Options
    gpu: Device
    shape: Shape | None
    data: DataSet | None


def read_inputs(given: Mapping[str, Any]) -> Inputs:
    """Return the plan that the options of the command line ask for, by name; None is not given.

    Raises:
        ConfigError: An option breaks its rule, or two contradict each other.
        DataError: The data file is malformed.
    """
    config = None
    if given["config"] is not None:
        twice = [name for name in _IN_CONFIG if given[name] not in (None, False)]
        if twice:
            raise ConfigError(
                f"--config {given['config']} says the {', '.join(twice)} itself; "
                f"leave out {', '.join(f'--{name}' for name in twice)}, or --config"
            )
        from trainer_rank.training.load_config import load_config

        config = load_config(given["config"])
        if config.pricing != "envelope":
            raise ConfigError(
                f"--config {given['config']}: pricing must be 'envelope' to plan with, got {config.pricing!r}, which "
                "prices by passes that ran. What a pass needs is the same under both; plan with pricing: envelope"
            )
    elif given["model"] is None:
        raise ConfigError("--model must name a built-in geometry or a folder with config.json; or give --config")
    elif (given["shape"] is None) == (given["data"] is None):
        raise ConfigError(
            f"exactly one of --shape and --data must be given, got --shape {given['shape']!r} and "
            f"--data {given['data']}"
        )
    for name in ("lora-rank", "targets"):
        if given["full"] and given[name] is not None:
            raise ConfigError(f"--full trains all weights and --{name} {given[name]} adapters; give one of them")
    if given["groups-per-step"] is not None and given["data"] is None:
        raise ConfigError("--groups-per-step belongs to --data; a shape is one step of groups=<number> groups")
    _check(given)
    chunk_rows = _chunk_rows(given["head-chunk-rows"])
    gpu = _gpu(given["device"], given["memory"], None if config is None else config.memory_budget)
    shape = None if given["shape"] is None else Shape.parse(given["shape"])
    data = None if shape is not None else _data(given, config)
    if chunk_rows is None:
        # A head in one piece has a row for each trained token at most.
        trained = 0 if shape is None else shape.trained_tokens
        trained += 0 if data is None else sum(one.num_trained for one in data.requests)
        chunk_rows = max(1, trained)
    options = _options(given, chunk_rows) if config is None else _options_of(config, given, chunk_rows)
    return Inputs(options=options, gpu=gpu, shape=shape, data=data)


def _check(given: Mapping[str, Any]) -> None:
    for name, choices in (("recompute", ("full", "none", "auto")), ("dtype", ("bfloat16", "float32"))):
        if given[name] is not None and given[name] not in choices:
            raise ConfigError(f"--{name} must be {' or '.join(choices)}, got {given[name]!r}")
    for name, least in (
        ("lora-rank", 1),
        ("max-packed-tokens", 1),
        ("caller-bytes-per-token", 0),
        ("groups-per-step", 1),
    ):
        if given[name] is not None and given[name] < least:
            raise ConfigError(f"--{name} must be a whole number of at least {least}, got {given[name]}")


def _gpu(device: str | None, memory: str | None, budget: int | str | None) -> Device:
    if device is None and memory is None and budget is not None:
        memory = str(budget)
    if (device is None) == (memory is None):
        raise ConfigError(
            f"exactly one of --device and --memory must be given, got --device {device} and --memory {memory}; "
            "write for example --device H200 or --memory 24GiB"
        )
    if device is not None:
        return find_device(device)
    assert memory is not None, "one of the two is given"
    try:
        capacity = parse_bytes(memory, field="--memory")
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if not capacity:
        raise ConfigError("--memory must be more than 0 bytes, got 0; write for example --memory 24GiB")
    return Device(name=f"a GPU of {format_bytes(capacity)}", usable_bytes=capacity, multiprocessors=132)


def _chunk_rows(text: str) -> int | None:
    """Return the rows of a chunk; None is all at once."""
    if text == "none":
        return None
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ConfigError(f"--head-chunk-rows must be a whole number of at least 1, or none, got {text!r}")
    return int(text)


def _targets(text: str | None, model: str) -> tuple[str, ...]:
    """Return the layers named in a text such as ``q_proj,v_proj``; the model knows which there are."""
    if text is None or text == "all-linear" or text == "attention":
        return targets_of(text, family_of(model))
    names = tuple(name.strip() for name in text.split(","))
    if not all(names) or len(set(names)) != len(names):
        raise ConfigError(
            f"--targets must be different names with commas between them, got {text!r}; "
            f"write for example --targets {','.join(PROJECTIONS[:2])}"
        )
    return names


def _options(given: Mapping[str, Any], head_chunk_rows: int) -> Options:
    rank = given["lora-rank"]
    return Options(
        model=given["model"],
        lora_rank=None if given["full"] else 16 if rank is None else rank,
        lora_targets=_targets(given["targets"], given["model"]),
        recompute=given["recompute"] or "full",
        dtype="bfloat16" if given["dtype"] is None else given["dtype"],
        head_chunk_rows=head_chunk_rows,
        max_packed_tokens=given["max-packed-tokens"],
        caller_bytes_per_token=given["caller-bytes-per-token"],
    )


def _options_of(config: TrainConfig, given: Mapping[str, Any], head_chunk_rows: int) -> Options:
    model = config.model
    return Options(
        model=model.path,
        lora_rank=None if model.lora is None else model.lora.rank,
        lora_targets=targets_of(None if model.lora is None else model.lora.targets, family_of(model.path)),
        recompute=model.recompute,
        dtype=model.dtype,
        head_chunk_rows=head_chunk_rows,
        max_packed_tokens=given["max-packed-tokens"] or config.max_packed_tokens,
        caller_bytes_per_token=given["caller-bytes-per-token"],
    )


def _data(given: Mapping[str, Any], config: TrainConfig | None) -> DataSet:
    from trainer_rank.planning.data_set import DataSet
    from trainer_rank.requests import Request
    from trainer_rank.training.data_files import read_data
    from trainer_rank.training.formats import Words
    from trainer_rank.training.schedule import group_rollouts

    if config is None:
        rollouts = read_data(Path(given["data"]), words=Words(model=given["model"]))
    else:
        words = Words(model=config.model.path, train_on=config.data.train_on)
        rollouts = read_data(Path(config.data.path), words=words)
    grouped = group_rollouts(rollouts)
    groups = [
        [Request.next_token(one.tokens, trained=one.trained, weight=one.weight) for one in group] for group in grouped
    ]
    lines = [one.line for group in grouped for one in group]
    if config is not None:
        repeats = config.steps is not None
        return DataSet(groups=groups, groups_per_step=config.groups_per_step, repeats=repeats, lines=lines)
    in_step = given["groups-per-step"]
    return DataSet(groups=groups, groups_per_step=len(groups) if in_step is None else in_step, lines=lines)
