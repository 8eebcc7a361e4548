"""Plans for GPUs that are not there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import Qwen3Config

from trainer_rank.errors import ConfigError, UnsupportedModelError
from trainer_rank.meters.devices import Device
from trainer_rank.meters.waste import SEGMENTS_BYTES
from trainer_rank.planning.plan import Options, make_plan
from trainer_rank.planning.shape import Shape
from trainer_rank.runtime.geometries import GEOMETRIES, find_geometry
from trainer_rank.units import GIB, MIB

SHAPE = Shape.parse("groups=2 g=4 system=16 prompt=64 completion=32")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with the configuration of a small model, and no weights."""
    folder = tmp_path_factory.mktemp("model")
    Qwen3Config(
        hidden_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        intermediate_size=256, vocab_size=4000, tie_word_embeddings=False,
    ).save_pretrained(folder)  # fmt: skip
    return str(folder)


def gpu(capacity: int) -> Device:
    return Device(name="test", usable_bytes=capacity, multiprocessors=8, context_bytes=MIB, cublas_bytes=0)


def test_a_step_that_fits_is_planned_whole(model: str) -> None:
    """Every request in one pass; the parts sum to the peak; JSON holds it all."""
    report = make_plan(Options(model=model), gpu(GIB), SHAPE.requests)
    assert report.fits
    (one,) = report.passes
    assert (one.requests, one.packed_rows) == (8, 16 + 2 * 64 + 8 * 32)
    assert sum(one.terms.values()) == one.required_bytes
    assert report.peak_bytes == sum(report.resident.values()) + sum(report.pending.values()) + one.required_bytes
    assert json.loads(json.dumps(report.as_json()))["passes"][0]["packed_rows"] == one.packed_rows


def test_a_smaller_device_takes_more_passes(model: str) -> None:
    """Each of them within the device."""
    whole = make_plan(Options(model=model), gpu(128 * MIB), SHAPE.requests)
    # The waste of the allocator has a fixed part.
    capacity = whole.peak_bytes - whole.passes[0].required_bytes // 3 + SEGMENTS_BYTES
    report = make_plan(Options(model=model), gpu(capacity), SHAPE.requests)
    assert report.fits
    assert len(report.passes) > 1
    assert report.peak_bytes <= report.capacity_bytes


def test_a_refusal_lists_changes_that_were_priced(model: str) -> None:
    """Each fix, made, gives the plan it promises."""
    options = Options(model=model, recompute="none", dtype="float32", head_chunk_rows=4096)
    long = Shape.parse("completion=6000")
    needed = make_plan(options, gpu(8 * GIB), long.requests).peak_bytes
    small = gpu(int(0.6 * needed))
    refused = make_plan(options, small, long.requests)
    assert not refused.fits
    assert refused.short_bytes > 0
    by_change = {fix.change: fix for fix in refused.fixes}
    assert "recompute: none -> full" in by_change
    again = make_plan(replace(options, recompute="full"), small, long.requests)
    assert again.fits
    assert again.peak_bytes == by_change["recompute: none -> full"].after_bytes < refused.peak_bytes


def test_weights_that_do_not_fit_are_said_so(model: str) -> None:
    """Before anything else is asked."""
    report = make_plan(Options(model=model), gpu(2 * MIB), SHAPE.requests, with_fixes=False)
    assert not report.fits
    assert report.refusal is not None
    assert "weights alone" in report.refusal


def test_an_unknown_model_is_refused_with_the_nearest_names() -> None:
    """And a folder without a configuration by what it lacks."""
    with pytest.raises(ConfigError, match=r"'Qwen3-9B'; nearest: .*Qwen3-8B"):
        make_plan(Options(model="Qwen3-9B"), gpu(GIB), SHAPE.requests)


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    """Not guessed to be a name."""
    with pytest.raises(ConfigError, match=r"must be a folder with config\.json"):
        make_plan(Options(model=str(tmp_path)), gpu(GIB), SHAPE.requests)


def test_an_unsupported_family_is_refused_by_layer_and_reason(tmp_path: Path) -> None:
    """Experts are not supported yet."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "num_experts": 8}), encoding="utf-8")
    with pytest.raises(UnsupportedModelError, match="experts"):
        make_plan(Options(model=str(tmp_path)), gpu(GIB), SHAPE.requests)


def test_geometries_are_found_under_the_names_people_use() -> None:
    """With an organisation, in lower case, with the suffix of a tuned variant."""
    assert find_geometry("Qwen/Qwen2.5-7B-Instruct") is GEOMETRIES["Qwen2.5-7B"]
    assert find_geometry("smollm2-135m") is GEOMETRIES["SmolLM2-135M"]


@pytest.mark.parametrize(
    ("name", "billions"),
    [("Qwen3-8B", 8.19), ("Qwen2.5-7B", 7.62), ("Llama-3.1-8B", 8.03), ("SmolLM2-135M", 0.1345), ("Qwen3-0.6B", 0.596)],
)
def test_geometries_have_the_published_number_of_parameters(name: str, billions: float) -> None:
    """Counted from the geometry: embeddings, attention, MLP; norms and biases are less than the tolerance."""
    one = GEOMETRIES[name]
    attention = one.hidden_size * one.head_dim * (2 * one.num_attention_heads + 2 * one.num_key_value_heads)
    layer = attention + 3 * one.hidden_size * one.intermediate_size
    embeddings = one.vocab_size * one.hidden_size * (1 if one.tie_word_embeddings else 2)
    assert one.num_hidden_layers * layer + embeddings == pytest.approx(billions * 1e9, rel=0.005)
