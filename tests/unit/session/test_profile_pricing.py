"""The ``profile`` pricer on a live rank: what it reads, when it learns, what it refuses to be used for."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from fractions import Fraction
from math import floor
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.builders import completion, completions, negative_sum, tiny_runtime, tokens
from tests.unit.session.conftest import NewRank
from trainer_rank.errors import ConfigError, ReplayError
from trainer_rank.memory import Observation
from trainer_rank.memory.signature import ONE_LAYER, RecomputeSetting
from trainer_rank.planner import pass_work
from trainer_rank.report import AdmissionRecord, Record, replay_profile
from trainer_rank.requests import AtomicGroup, Request
from trainer_rank.runtime.recompute import read_recompute
from trainer_rank.session import TrainerRank
from trainer_rank.session.pricing import Forward

SAFETY = Fraction(11, 10)
FULL = {"recompute": "full", "dtype": torch.float32, "layers": 2}


@pytest.fixture
def profile_rank(new_rank: NewRank) -> Callable[..., TrainerRank]:
    return lambda **options: new_rank(model=FULL, pricing="profile", **options)


def train(rank: TrainerRank, nest: Any) -> None:
    for micro_batch in rank.forward_micro_batches(nest):
        negative_sum(micro_batch).backward()
        del micro_batch
    rank.zero_grad()


def required(rank: TrainerRank, nest: Any) -> int:
    (planned,) = rank.plan(nest)
    return planned.admission.price.required_bytes


def static(rows: int, labels: int) -> int:
    """A cold price: two layers of width 32 in float32, so 2 // 4 + 4 = 4 widths a row."""
    return floor(SAFETY * (4 * labels + rows * 32 * 4 * 4))


LONG = completions([60, 80, 70], prompt=40)
"""210 tokens after 40 that all share: 250 rows, 330 tokens, no request under 64."""


def test_a_cold_start_is_priced_by_the_static_estimate_alone(profile_rank: Callable[..., TrainerRank]) -> None:
    assert required(profile_rank(), LONG) == static(250, 330)


def test_an_observation_counts_from_the_next_call_on(profile_rank: Callable[..., TrainerRank]) -> None:
    """Within a call prices stay; then the formula holds with what was observed."""
    rank = profile_rank()
    # What other tests left behind would be freed while this is measured.
    gc.collect()
    run = rank.forward_micro_batches(LONG)
    negative_sum(next(run)).backward()
    assert rank._pricing.learned()["profiles"] == []
    with pytest.raises(StopIteration):
        next(run)
    rank.zero_grad()
    seen = rank.last_observation
    assert seen is not None
    assert seen.retained_bytes is not None
    rate = Fraction(seen.peak_bytes - 4 * 330, 250)
    other = completions([100, 100], prompt=100)
    # 300 rows, 400 tokens: beyond no window, so rows and tokens.
    assert required(rank, other) == floor(SAFETY * (4 * 400 + rate * 300 + 6144 * 400))
    kept = Fraction(seen.retained_bytes - 4 * 330, 250)
    (planned,) = rank.plan(other)
    assert planned.admission.price.retained_bytes == floor(SAFETY * (4 * 400 + kept * 300 + 6144 * 400))


def test_short_and_inactive_requests_and_other_outputs(profile_rank: Callable[..., TrainerRank]) -> None:
    """A short request has the logical price of the same profile; an inactive one changes nothing; others are cold."""
    rank = profile_rank()
    train(rank, LONG)
    seen = rank.last_observation
    assert seen is not None
    rate, ratio = Fraction(seen.peak_bytes - 4 * 330, 250), Fraction(330, 250)
    short = [*completions([100, 100], prompt=100), Request.next_token(tokens(9, 63))]
    assert required(rank, short) == floor(SAFETY * (4 * 463 + rate * max(363, 463 / ratio)))
    idle = Request(tokens=tokens(3, 500))
    assert required(rank, [*LONG, idle]) == required(rank, LONG)
    wide = Request(tokens=tokens(4, 90), labels=np.ones((90, 2), dtype=np.int64))
    assert required(rank, [wide]) == static(90, 180)
    silent = [completion(tokens(1, 40), tokens(2, 60), no_grad=True)]
    assert required(rank, silent) == static(100, 100)
    hidden = [Request(tokens=tokens(4, 90), hidden_states=True)]
    assert required(rank, hidden) == floor(SAFETY * (90 * 32 * 4 + 90 * 32 * 4 * 4))


def test_grad_modes_together_are_one_forward_with_one_signature(profile_rank: Callable[..., TrainerRank]) -> None:
    """An atomic group of both modes learns for itself and is never priced by packed rows."""
    rank = profile_rank()
    mixed = AtomicGroup([LONG[0], completion(tokens(1, 40), tokens(2, 60), no_grad=True)])
    assert required(rank, [mixed]) == static(200, 200)
    train(rank, [mixed])
    (entry,) = rank.learned()["profiles"]
    assert entry["signature"]["grad_modes"] == [False, True]
    seen = rank.last_observation
    assert seen is not None
    assert required(rank, [mixed]) == floor(SAFETY * (4 * 200 + Fraction(seen.peak_bytes - 4 * 200, 200) * 200))
    assert required(rank, LONG) == static(250, 330)


def test_training_mode_is_read_when_a_price_is_made(profile_rank: Callable[..., TrainerRank]) -> None:
    """A decoder set to evaluation runs nothing again: another signature, cold, and never by packed rows."""
    rank = profile_rank()
    train(rank, LONG)
    warm = required(rank, LONG)
    layer = rank.runtime._layers()[1]  # type: ignore[attr-defined]
    layer.eval()
    assert rank.runtime.recompute_reading.name == "none"
    assert required(rank, LONG) == static(250, 330)
    layer.train()
    assert required(rank, LONG) == warm


class Layer(nn.Module):
    """A decoder layer with the library's flag."""

    def __init__(self, flag: bool) -> None:
        super().__init__()
        self.gradient_checkpointing = flag


@pytest.mark.parametrize(
    ("flags", "name"), [((True, True), "full/uniform/1"), ((True, False), "full/block/1"), ((False, False), "none")]
)
def test_recompute_is_read_from_the_layers(flags: tuple[bool, ...], name: str) -> None:
    layers = nn.ModuleList([Layer(flag) for flag in flags])
    reading = read_recompute(layers, list(layers), ONE_LAYER)
    assert reading.name == name
    assert reading.one_layer is all(flags)
    layers[0].eval()
    assert read_recompute(layers, list(layers), ONE_LAYER).name == "none"


def test_without_a_decoder_to_read_the_constructor_and_every_submodule_decide() -> None:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    assert read_recompute(model, list(model), ONE_LAYER).one_layer
    assert not read_recompute(model, list(model), RecomputeSetting()).one_layer
    model[1].eval()
    assert not read_recompute(model, list(model), ONE_LAYER).one_layer
    assert read_recompute(model, [], ONE_LAYER).decoder is None


def test_elastic_recompute_is_full_under_this_pricer(new_rank: NewRank) -> None:
    """Whatever the last forward of another rank left in the layers' flags, its own next one runs every layer again."""
    rank = new_rank(model={**FULL, "recompute": "auto"}, pricing="profile")
    layers = rank.runtime._layers()  # type: ignore[attr-defined]
    layers[0].gradient_checkpointing = False
    assert rank.runtime.recompute_reading.one_layer
    train(rank, LONG)
    assert all(layer.gradient_checkpointing for layer in layers)
    (entry,) = rank.learned()["profiles"]
    assert entry["signature"]["recompute"] == "full/uniform/1"
    layers[1].eval()
    assert not rank.runtime.recompute_reading.one_layer


@pytest.mark.parametrize("recompute", ["full", "none"])
def test_the_runtime_reads_its_model(recompute: str) -> None:
    runtime = tiny_runtime(recompute=recompute, layers=2)  # type: ignore[arg-type]
    reading = runtime.recompute_reading
    assert reading.decoder is not None
    assert reading.one_layer is (recompute == "full")
    assert reading.built_with.one_layer is (recompute == "full")


def test_a_record_says_what_a_price_was_made_of(profile_rank: Callable[..., TrainerRank], new_rank: NewRank) -> None:
    """The flag for a replay, the signature and the profile; plain values."""
    records: list[Record] = []
    rank = profile_rank(on_decision=records.append)
    train(rank, LONG)
    train(rank, LONG)
    admissions = [record for record in records if isinstance(record, AdmissionRecord)]
    first, second = (json.loads(json.dumps(record.as_line()))["pricing"] for record in admissions)
    assert first["name"] == "profile"
    assert first["forwards"][0]["profile"] is None
    (forward,) = second["forwards"]
    assert (forward["one_layer_recompute"], forward["packed_priced"], forward["short_requests"]) == (True, True, False)
    assert forward["signature"]["recompute"] == "full/uniform/1"
    assert forward["profile"]["packed_rows"] == 250
    plain: list[Record] = []
    train(new_rank(on_decision=plain.append), LONG)
    assert isinstance(plain[0], AdmissionRecord)
    assert plain[0].pricing == {"name": "envelope", "learned": [None]}


def test_a_recorded_price_is_made_again_from_its_record(profile_rank: Callable[..., TrainerRank]) -> None:
    """To the byte, cold and warm, packed and extrapolated; what is missing is named, never guessed."""
    records: list[Record] = []
    rank = profile_rank(on_decision=records.append)
    mixed = AtomicGroup([LONG[0], completion(tokens(1, 40), tokens(2, 60), no_grad=True)])
    for nest in (LONG, LONG, [*LONG, Request.next_token(tokens(9, 63))], [mixed], [mixed]):
        train(rank, nest)
    admissions = [record for record in records if isinstance(record, AdmissionRecord)]
    assert len(admissions) == 5
    for record in admissions:
        line = json.loads(json.dumps(record.as_line()))
        price = replay_profile({**line["pricing"], "unknown": 1})
        assert (price.required_bytes, price.retained_bytes) == (record.required_bytes, record.retained_bytes)
    (forward,) = line["pricing"]["forwards"]
    for name in ("one_layer_recompute", "short_requests", "profile", "segments"):
        without = {key: value for key, value in forward.items() if key != name}
        with pytest.raises(ReplayError, match=rf"incomplete: pricing\.forwards\[0\]\.{name} is not recorded"):
            replay_profile({**line["pricing"], "forwards": [without]})
    with pytest.raises(ReplayError, match=r"incomplete: pricing\.model\.hidden_size"):
        replay_profile({**line["pricing"], "model": {"num_layers": 2}})


def test_what_was_learned_goes_to_json_and_back(profile_rank: Callable[..., TrainerRank], new_rank: NewRank) -> None:
    rank, fresh = profile_rank(), profile_rank()
    train(rank, LONG)
    learned = json.loads(json.dumps(rank.learned()))
    fresh.load_learned(learned)
    assert required(fresh, LONG) == required(rank, LONG) != static(250, 330)
    # What another pricer learned is not its own.
    fresh.load_learned(new_rank().learned())
    assert required(fresh, LONG) == required(rank, LONG)


def test_forwards_alive_together_teach_nothing_but_one_does(profile_rank: Callable[..., TrainerRank]) -> None:
    rank = profile_rank()
    seen = Observation(
        packed_rows=500, logical_tokens=660, head_rows=420, num_segments=8, num_requests=6, peak_bytes=10**9,
        peak_resident_bytes=None, retained_bytes=10**6,
    )  # fmt: skip
    forward = Forward(requests=tuple(LONG), works=(pass_work(LONG, [0, 1, 2]),))
    rank._pricing.observe([forward, forward], seen)
    assert rank.learned()["profiles"] == []
    negative_sum(rank.forward(LONG)).backward()
    rank.zero_grad()
    assert len(rank.learned()["profiles"]) == 1


def test_the_hardest_request_is_found_among_all_signatures(profile_rank: Callable[..., TrainerRank]) -> None:
    """A learned signature can make a smaller request the harder one."""
    rank = profile_rank()
    wide = Request(tokens=tokens(4, 90), labels=np.ones((90, 2), dtype=np.int64))
    train(rank, LONG)
    hardest = rank.hardest([*LONG, wide])
    assert hardest is not None
    assert hardest.indices == (1,)


def test_callers_it_does_not_support_are_refused_or_named(profile_rank: Callable[..., TrainerRank]) -> None:
    with pytest.raises(ConfigError, match=r"caller_bytes_per_token must not exceed 6144 .*pricing='envelope'"):
        profile_rank(caller_bytes_per_token=6145)
    rank = profile_rank(caller_bytes_per_token=6144)

    def heavy(micro_batch: Any) -> torch.Tensor:
        held = micro_batch.results[0].logprobs.new_ones((2000, sum(r.num_tokens for r in micro_batch.requests)))
        held.requires_grad_()
        return negative_sum(micro_batch) + 0.0 * held.square().sum()

    with pytest.raises(ConfigError, match=r"what the loss needs must not exceed 6144 bytes per logical token"):
        rank.trace_loss(heavy, LONG)
    run = rank.forward_micro_batches(LONG)
    heavy(next(run)).backward()
    with pytest.warns(RuntimeWarning, match=r"caller_above_declaration: .*pricing='profile' charges.*6144"):
        next(run, None)


def test_an_unknown_pricer_is_refused(new_rank: NewRank) -> None:
    with pytest.raises(ConfigError, match="pricing must be 'envelope' or 'profile', got 'guess'"):
        new_rank(pricing="guess")
