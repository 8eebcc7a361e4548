"""The floor of two live expert outputs: its numbers, and everything that zeroes it."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from trainer_rank.memory.expert_floor import (
    KNOWN,
    OUTPUT_PAIR_AND_SUM,
    ExpertLayer,
    expert_bytes_per_row,
)
from trainer_rank.memory.profile import ForwardShape, Profile, ProfileModel, price_forward
from trainer_rank.units import GIB

LAYER = ExpertLayer(
    types=KNOWN[0], dtype="bfloat16", hidden_size=2048, projection_size=2048, adapter_size=2048, top_k=8,
    router_top_k=8,
)  # fmt: skip
BARE = ProfileModel(num_layers=40, hidden_size=2048, vocabulary_size=248_320, element_size=2)
FLOORED = replace(BARE, expert_bytes_per_row=expert_bytes_per_row([LAYER] * 40))


def cold(model: ProfileModel, rows: int, tokens: int | None = None, *, outputs: int = 0) -> int:
    shape = ForwardShape(
        packed_rows=rows, logical_tokens=rows if tokens is None else tokens, output_bytes=outputs, packed=False
    )
    return price_forward(model, shape, None).required_bytes


def test_the_coefficient() -> None:
    assert expert_bytes_per_row([LAYER]) == 2 * 8 * 2048 * 2
    assert expert_bytes_per_row([LAYER], live_outputs=OUTPUT_PAIR_AND_SUM) == 3 * 8 * 2048 * 2
    assert expert_bytes_per_row([]) == 0
    # The layer that needs most, not their sum.
    assert expert_bytes_per_row([LAYER, replace(LAYER, top_k=4, router_top_k=4)]) == 2 * 8 * 2048 * 2
    with pytest.raises(ValueError, match="live_outputs must be 2 or 3, got 1"):
        expert_bytes_per_row([LAYER], live_outputs=1)


def test_one_output_at_106_432_rows() -> None:
    one = 106_432 * 8 * 2048 * 2
    assert one == 3_487_563_776
    assert round(one / GIB, 3) == 3.248
    assert 106_432 * FLOORED.expert_bytes_per_row == 2 * one


def test_the_cold_requirement_with_and_without() -> None:
    """106,432 rows, nothing requested: 6.252 GiB become 7.146 GiB."""
    assert cold(BARE, 106_432) == 6_713_560_268
    assert cold(FLOORED, 106_432) == 7_672_640_307
    assert round(cold(BARE, 106_432) / GIB, 3) == 6.252
    assert round(cold(FLOORED, 106_432) / GIB, 3) == 7.146


def test_a_larger_learned_requirement_is_unchanged() -> None:
    """495,955 rows: the floor alone gives 35.8 GB, and a forward priced at 66.3 GB stays there."""
    assert cold(FLOORED, 495_955) == 35_753_197_568
    learned = Profile(
        peak_rate=Fraction(60_275_307_960, 495_955),
        retained_rate=None,
        packed_rows=495_955,
        ratio=Fraction(1_052_548, 495_955),
    )
    shape = ForwardShape(packed_rows=495_955, logical_tokens=1_052_548, packed=False)
    for model in (BARE, FLOORED):
        assert price_forward(model, shape, learned).required_bytes == 66_302_838_756


def test_the_counterexample_of_a_cold_forward() -> None:
    """45,981 rows, 172,687 tokens whose hidden states are returned.

    The price reproduces to the byte. It was admitted against 4,652,784,333 bytes, and the forward ran out of memory:
    the floor is one part of a cold forward, not a bound on it.
    """
    outputs = FLOORED.output_bytes(hidden_states_rows=172_687)
    assert outputs == 707_325_952
    assert cold(FLOORED, 45_981, 172_687, outputs=outputs) == 4_092_810_444


def test_the_floor_is_no_retained_rate() -> None:
    shape = ForwardShape(packed_rows=1000, logical_tokens=1000, packed=True)
    known = Profile(peak_rate=Fraction(10), retained_rate=Fraction(3), packed_rows=1000, ratio=Fraction(1))
    found = [price_forward(model, shape, known) for model in (BARE, FLOORED)]
    assert found[0].required_bytes < found[1].required_bytes
    assert found[0].retained_bytes == found[1].retained_bytes


@pytest.mark.parametrize(
    "changed",
    [
        *({"types": replace(KNOWN[0], **{part: "another.Type"})} for part in (
            "layer", "experts", "projection", "adapter", "base", "router", "dispatcher",
        )),
        {"dtype": "float32"},
        {"hidden_size": 1024},
        {"projection_size": 1024},
        {"adapter_size": 1024},
        {"top_k": 4},
        {"router_top_k": 4},
        {"tensor_parallel": 2},
        {"context_parallel": 2},
        {"expert_parallel": 2},
        {"expert_tensor_parallel": 2},
        {"has_hooks": True},
        {"has_overrides": True},
        {"capacity_factor": 1.0},
        {"pads": True},
        {"quantised": True},
        {"latent": True},
        {"cuda_graph": True},
    ],
    ids=str,
)  # fmt: skip
def test_any_difference_in_any_layer_zeroes_the_whole_coefficient(changed: dict[str, object]) -> None:
    other = replace(LAYER, **changed)  # type: ignore[arg-type]
    assert expert_bytes_per_row([other]) == 0
    assert expert_bytes_per_row([LAYER, other, LAYER]) == 0


def test_half_precision_of_either_kind_is_known() -> None:
    assert expert_bytes_per_row([replace(LAYER, dtype="float16")]) == 2 * 8 * 2048 * 2
