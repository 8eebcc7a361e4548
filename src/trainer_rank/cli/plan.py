"""``trainer-rank plan``: will it fit, in how many passes, what is the peak and what causes it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated

import typer

from trainer_rank.errors import ConfigError

DOES_NOT_FIT = 1


def plan(
    model: Annotated[
        str | None, typer.Option(help="Built-in geometry (Qwen3-8B, ...) or folder with config.json.")
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help='Lengths, e.g. "groups=2 g=8 system=2048 prompt=8192 completion=512".')
    ] = None,
    data: Annotated[Path | None, typer.Option(help="JSON Lines or Parquet file of requests (docs/data.md).")] = None,
    groups_per_step: Annotated[int | None, typer.Option(help="Groups of the data in a step [default: all].")] = None,
    config: Annotated[Path | None, typer.Option(help="Take model, data and options from a training run.")] = None,
    device: Annotated[str | None, typer.Option(help="Usual name of a GPU: H200, A100-40GB, L4, ...")] = None,
    memory: Annotated[str | None, typer.Option(help="Bytes of a GPU instead of its name: 24GiB.")] = None,
    recompute: Annotated[str | None, typer.Option(help="full, none or auto [default: full].")] = None,
    lora_rank: Annotated[int | None, typer.Option(help="Rank of the adapters [default: 16].")] = None,
    targets: Annotated[
        str | None, typer.Option(help="Layers that get one: q_proj,v_proj; or attention [default: all-linear].")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Train all weights instead of adapters.")] = False,
    dtype: Annotated[str | None, typer.Option(help="bfloat16 or float32 [default: bfloat16].")] = None,
    head_chunk_rows: Annotated[
        str, typer.Option(help="Rows that meet the vocabulary at a time; none: all at once.")
    ] = "512",
    max_packed_tokens: Annotated[int | None, typer.Option(help="Cap on packed rows of a pass.")] = None,
    caller_bytes_per_token: Annotated[int, typer.Option(help="Bytes of your own loss per token.")] = 256,
    all_passes: Annotated[bool, typer.Option("--all-passes", help="List every pass.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")] = False,
    html: Annotated[Path | None, typer.Option(help="Also write a page with charts to this file.")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Say whether a training step fits a GPU, without the GPU and without weights.

    Exit status 0: it fits. 1: it does not. 2: the input is wrong.
    """
    from trainer_rank.cli.plan_inputs import read_inputs

    inputs = read_inputs(
        {
            "model": model,
            "shape": shape,
            "data": data,
            "groups-per-step": groups_per_step,
            "config": config,
            "device": device,
            "memory": memory,
            "recompute": recompute,
            "lora-rank": lora_rank,
            "targets": targets,
            "full": full,
            "dtype": dtype,
            "head-chunk-rows": head_chunk_rows,
            "max-packed-tokens": max_packed_tokens,
            "caller-bytes-per-token": caller_bytes_per_token,
        }
    )
    if html is not None and not html.absolute().parent.is_dir():
        raise ConfigError(f"--html must name a file in a folder that exists, got {html}; make {html.parent} first")
    # PEFT asks Transformers for a property under its former name; a user can do nothing about it.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers\.")
    # Imported after the input is known to be valid: torch and transformers take seconds.
    from trainer_rank.cli.plan_display import print_json, print_text
    from trainer_rank.planning.plan import make_data_set_plan, make_plan

    if inputs.data is not None:
        report = make_data_set_plan(inputs.options, inputs.gpu, inputs.data, with_details=True)
    else:
        assert inputs.shape is not None, "a plan is of a shape or of data"
        lengths = inputs.shape
        report = make_plan(inputs.options, inputs.gpu, lengths.requests, with_details=True, shorter=lengths.shorter)
    if html is not None:
        from trainer_rank.cli.plan_html import write_page

        write_page(report, html)
    if json:
        print_json(report)
    else:
        print_text(report, all_passes=all_passes)
        if html is not None:
            typer.echo(f"page: {html}")
    if not report.fits:
        raise typer.Exit(DOES_NOT_FIT)
