"""Which forwards share what is learned, and which of them packed rows price."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from trainer_rank.memory.signature import (
    INACTIVE,
    ONE_LAYER,
    SINGLE,
    MemorySignature,
    RecomputeReading,
    RecomputeSetting,
    is_short,
    packed_priced,
    request_key,
)
from trainer_rank.requests import Request

TRAINED = MemorySignature(mix=(SINGLE,), grad_modes=(True,), adapters=("",), recompute=ONE_LAYER.name)
READING = RecomputeReading(decoder=ONE_LAYER, decoder_training=True, built_with=ONE_LAYER, all_training=True)


def key_of(request: Request) -> str:
    return request_key(
        None if request.labels is None else request.labels.shape,
        top_k=request.top_k,
        logits=request.logits,
        hidden_states=request.hidden_states,
    )


@pytest.mark.parametrize(
    ("tokens", "labels", "key"),
    [
        ([1, 2, 3], [2, 3, -100], "target:single"),
        ([[1, 2, 3]], [[2, 3, -100]], "target:single"),
        ([[1, 2, 3]], [2, 3, -100], "target:single"),
        ([1, 2, 3], [[2, 5], [3, 5], [4, 5]], "target:(2,)"),
        ([[1, 2, 3]], [[2, 5], [3, 5], [4, 5]], "target:(2,)"),
        ([[1, 2, 3]], [[[2, 5], [3, 5], [4, 5]]], "target:(2,)"),
        ([1, 2, 3], [[2], [3], [4]], "target:(1,)"),
        ([1, 2, 3], None, "inactive"),
    ],
)
def test_labels_are_told_apart_by_their_normalised_shape(tokens: object, labels: object, key: str) -> None:
    """Wide labels stay wide, and single ones single, however the caller wrote the leading axis."""
    assert key_of(Request(tokens=tokens, labels=labels)) == key  # type: ignore[arg-type]


def test_other_outputs_are_part_of_the_key() -> None:
    one = Request(tokens=[1, 2], labels=[2, -100], top_k=3, logits=True, hidden_states=True)  # type: ignore[arg-type]
    assert key_of(one) == "target:single+top_k:3+logits+hidden_states"
    assert request_key(hidden_states=True) == "hidden_states"


def signature(*requests: tuple[str, int]) -> MemorySignature:
    return MemorySignature.of(requests, grad_modes=[True], adapters=[""], recompute="full/uniform/1")


@pytest.mark.parametrize(("length", "short"), [(63, True), (64, False), (65, False)])
@pytest.mark.parametrize("lead", [(), (1,)])
def test_the_gate_of_short_requests(length: int, short: bool, lead: tuple[int, ...]) -> None:
    """63, 64 and 65 tokens, given as (N,) and as (1, N)."""
    request = Request(tokens=np.ones((*lead, length), dtype=np.int64), labels=np.ones((*lead, length), dtype=np.int64))
    found = signature((key_of(request), request.num_tokens), (SINGLE, 4096))
    assert found.short_requests is short
    assert packed_priced(found, True) is not short


def test_short_is_only_a_single_target_request() -> None:
    assert not is_short(INACTIVE, 3)
    assert not is_short("target:(2,)", 3)
    assert not is_short("hidden_states", 3)
    mixed = signature((INACTIVE, 3), (SINGLE, 64))
    assert not mixed.short_requests
    assert packed_priced(mixed, True)


def test_short_requests_ride_along_but_do_not_identify() -> None:
    """A short batch finds what longer ones taught; so does one with inactive requests beside."""
    long, short = signature((SINGLE, 64)), signature((SINGLE, 63))
    assert long == short
    assert hash(long) == hash(short)
    assert (long.short_requests, short.short_requests) == (False, True)
    assert signature((SINGLE, 64), (INACTIVE, 1)) == long
    assert signature((SINGLE, 64), ("top_k:2", 64)) != long


def test_a_signature_survives_json() -> None:
    one = MemorySignature.of(
        [("target:(2,)", 5), (SINGLE, 9)], grad_modes=[True, False, True], adapters=["b", "a"], recompute="none"
    )
    assert one.grad_modes == (False, True)
    assert one.adapters == ("a", "b")
    assert MemorySignature.from_json(one.to_json()) == one


def test_packed_rows_price_training_on_single_targets_and_nothing_else() -> None:
    assert packed_priced(TRAINED, True)
    assert packed_priced(replace(TRAINED, mix=(INACTIVE, SINGLE)), True)
    assert not packed_priced(TRAINED, False)
    for other in (
        replace(TRAINED, grad_modes=(False,)),
        replace(TRAINED, grad_modes=(False, True)),
        replace(TRAINED, mix=("target:(2,)",)),
        replace(TRAINED, mix=("hidden_states", SINGLE)),
        replace(TRAINED, mix=("logits",)),
        replace(TRAINED, mix=("target:single+top_k:2",)),
        replace(TRAINED, short_requests=True),
    ):
        assert not packed_priced(other, True), other


@pytest.mark.parametrize(
    ("setting", "one_layer"),
    [
        (ONE_LAYER, True),
        (RecomputeSetting(granularity="full", method="uniform", num_layers=2), False),
        (RecomputeSetting(granularity="full", method="block", num_layers=1), False),
        (RecomputeSetting(granularity="full", method="uniform"), False),
        (RecomputeSetting(granularity="selective"), False),
        (RecomputeSetting(), False),
    ],
)
def test_recompute_is_one_layer_at_a_time_or_it_is_not(setting: RecomputeSetting, one_layer: bool) -> None:
    assert replace(READING, decoder=setting).one_layer is one_layer
    # What the model was built with counts only when there is no decoder to read.
    assert replace(READING, decoder=None, built_with=setting).one_layer is one_layer
    assert replace(READING, built_with=RecomputeSetting()).one_layer


def test_a_decoder_in_evaluation_recomputes_nothing() -> None:
    """Its own mode decides; without a decoder every submodule must train."""
    evaluated = replace(READING, decoder_training=False)
    assert not evaluated.one_layer
    assert evaluated.name == "none"
    assert replace(READING, all_training=False).one_layer
    assert not replace(READING, decoder=None, all_training=False).one_layer
    assert replace(READING, decoder=None, decoder_training=False).one_layer


def test_settings_have_names() -> None:
    assert ONE_LAYER.name == "full/uniform/1"
    assert RecomputeSetting().name == "none"
    assert RecomputeSetting(granularity="selective").name == "selective"
    assert RecomputeSetting(granularity="full", method="block", num_layers=3).name == "full/block/3"
