"""``trainer-rank plan``: will it fit, in how many passes, what is the peak and what causes it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainer_rank.errors import ConfigError
from trainer_rank.meters.devices import Device, find_device
from trainer_rank.planning.shape import Shape
from trainer_rank.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from trainer_rank.planning.plan import Requests

DOES_NOT_FIT = 1


def plan(
    model: Annotated[str, typer.Option(help="Built-in geometry (Qwen3-8B, ...) or folder with config.json.")],
    shape: Annotated[
        str | None, typer.Option(help='Lengths, e.g. "groups=2 g=8 system=2048 prompt=8192 completion=512".')
    ] = None,
    data: Annotated[Path | None, typer.Option(help="JSON Lines file of rollouts, all in one step.")] = None,
    device: Annotated[str | None, typer.Option(help="Usual name of a GPU: H200, A100-40GB, L4, ...")] = None,
    memory: Annotated[str | None, typer.Option(help="Bytes of a GPU instead of its name: 24GiB.")] = None,
    recompute: Annotated[str, typer.Option(help="full or none.")] = "full",
    lora_rank: Annotated[
        int | None, typer.Option(help="Rank of the adapters on every projection [default: 16].")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Train all weights instead of adapters.")] = False,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    head_chunk_rows: Annotated[int, typer.Option(help="Rows that meet the vocabulary at a time.")] = 512,
    max_packed_tokens: Annotated[int | None, typer.Option(help="Cap on packed rows of a pass.")] = None,
    caller_bytes_per_token: Annotated[int, typer.Option(help="Bytes of your own loss per token.")] = 256,
    all_passes: Annotated[bool, typer.Option("--all-passes", help="List every pass.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Say whether a training step fits a GPU, without the GPU and without weights.

    Exit status 0: it fits. 1: it does not. 2: the input is wrong.
    """
    if (device is None) == (memory is None):
        raise ConfigError(f"give exactly one of --device and --memory, got device={device} and memory={memory}")
    if (shape is None) == (data is None):
        raise ConfigError(f"give exactly one of --shape and --data, got shape={shape!r} and data={data}")
    if full and lora_rank is not None:
        raise ConfigError(f"--full trains all weights and --lora-rank {lora_rank} adapters; give one of them")
    _check_choice("recompute", recompute, ("full", "none"))
    _check_choice("dtype", dtype, ("bfloat16", "float32"))
    for name, value, least in (
        ("lora-rank", lora_rank, 1),
        ("head-chunk-rows", head_chunk_rows, 1),
        ("max-packed-tokens", max_packed_tokens, 1),
        ("caller-bytes-per-token", caller_bytes_per_token, 0),
    ):
        if value is not None and value < least:
            raise ConfigError(f"--{name} must be at least {least}, got {value}")
    gpu = _gpu(device, memory)
    lengths = None if shape is None else Shape.parse(shape)
    # PEFT asks Transformers for a property under its former name; a user can do nothing about it.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers\.")
    # Imported after the input is known to be valid: torch and transformers take seconds.
    from trainer_rank.cli.plan_display import print_json, print_text
    from trainer_rank.planning.plan import Options, make_plan

    options = Options(
        model=model,
        lora_rank=None if full else 16 if lora_rank is None else lora_rank,
        recompute="full" if recompute == "full" else "none",
        dtype=dtype,
        head_chunk_rows=head_chunk_rows,
        max_packed_tokens=max_packed_tokens,
        caller_bytes_per_token=caller_bytes_per_token,
    )
    report = make_plan(options, gpu, _requests(lengths, data))
    if json:
        print_json(report)
    else:
        print_text(report, all_passes=all_passes)
    if not report.fits:
        raise typer.Exit(DOES_NOT_FIT)


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"--{name} must be {' or '.join(choices)}, got {value!r}")


def _gpu(device: str | None, memory: str | None) -> Device:
    if device is not None:
        return find_device(device)
    assert memory is not None, "one of the two is given"
    try:
        capacity = parse_bytes(memory, field="--memory")
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if not capacity:
        raise ConfigError("--memory must be more than 0 bytes, got 0")
    return Device(name=f"a GPU of {format_bytes(capacity)}", usable_bytes=capacity, multiprocessors=132)


def _requests(lengths: Shape | None, data: Path | None) -> Requests:
    """Return what makes the requests once the vocabulary is known. A file is read now: its faults come first."""
    if lengths is not None:
        return lengths.requests
    assert data is not None, "one of the two is given"
    from trainer_rank.requests import Request
    from trainer_rank.training.rollouts import read_rollouts

    rollouts = read_rollouts(data)
    return lambda vocabulary_size: [
        Request.next_token(rollout.tokens, trained=rollout.trained, weight=rollout.weight) for rollout in rollouts
    ]
