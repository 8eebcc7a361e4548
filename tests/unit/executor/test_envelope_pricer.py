"""Envelopes of a real model against whole-pass traces, and what happens when one cannot be had."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.builders import completion, completions, tiny_runtime, tokens
from trainer_rank.errors import EnvelopeError
from trainer_rank.executor import envelope_pricer
from trainer_rank.executor.dry_run import DryRunPricer
from trainer_rank.executor.envelope_pricer import EnvelopePricer, TracedByKind, make_envelope
from trainer_rank.executor.envelope_store import EnvelopeStore
from trainer_rank.executor.pass_features import all_calls
from trainer_rank.executor.sample_passes import SamplePasses
from trainer_rank.memory import Call, Envelope, PassFeatures, Piece, Recompute
from trainer_rank.planner import PassWork, pass_work
from trainer_rank.prefix import Layout
from trainer_rank.requests import Request
from trainer_rank.runtime import Runtime

CHUNK_ROWS = 7
LAYOUTS = [Layout.no_sharing(), Layout.full_sharing(), Layout.uniform_depth(3), Layout.uniform_depth(6), None]


@pytest.fixture(scope="module", params=["full", "none"])
def runtime(request: pytest.FixtureRequest) -> Runtime:
    recompute: Recompute = request.param
    return tiny_runtime(layers=4, dtype=torch.float32, recompute=recompute)


@pytest.fixture(scope="module")
def traced(runtime: Runtime) -> TracedByKind:
    """Traces of the sample passes, which every envelope of the runtime can be solved from."""
    return {}


@pytest.fixture(scope="module")
def envelope(runtime: Runtime, traced: TracedByKind) -> Envelope:
    return make_envelope(runtime, traced=traced)


@pytest.fixture
def store(tmp_path: Path) -> EnvelopeStore:
    return EnvelopeStore(tmp_path / "envelopes")


def pricers(runtime: Runtime, envelope: Envelope) -> tuple[EnvelopePricer, DryRunPricer]:
    pricer = EnvelopePricer(runtime, head_chunk_rows=CHUNK_ROWS, caller_bytes_per_token=0)
    return pricer, DryRunPricer(runtime, head_chunk_rows=CHUNK_ROWS, caller_bytes_per_token=0)


def work(batch: Sequence[Request], layout: Layout | None = None) -> PassWork:
    return pass_work(batch, range(len(batch)), layout)


def batches() -> Iterator[list[Request]]:
    """Small trees of every kind: flat, chain, nested, apart, repeated, one alone."""
    prompt = tokens(1, 12)
    branch = np.concatenate([prompt, tokens(2, 70)])
    yield completions([3, 3, 9, 20], prompt=11)
    yield [completion(prompt, tokens(3, 5)), completion(branch, tokens(4, 5)), completion(branch, tokens(5, 80))]
    yield [completion(branch[:length], tokens(6, 2)) for length in (5, 20, 40)]
    yield [completion(tokens(number, 9), tokens(number + 20, 4)) for number in range(7, 10)]
    yield [completion(prompt, tokens(9, 4))] * 3
    yield [completion(prompt, tokens(10, 130))]


@pytest.mark.parametrize("number", range(6))
def test_every_layout_of_small_trees_costs_what_its_trace_says(
    runtime: Runtime, envelope: Envelope, number: int
) -> None:
    """Peak, retained bytes, terms and phase, all to the byte."""
    pricer, dry = pricers(runtime, envelope)
    batch = list(batches())[number]
    for layout in LAYOUTS:
        one = work(batch, layout)
        found, traced = envelope.price(pricer.features(one)), dry.price(one)
        assert (found.required_bytes, found.retained_bytes) == (traced.required_bytes, traced.retained_bytes)
        assert set(found.terms) == set(traced.terms)
        assert found.phase == traced.phase


def floor(batch: Sequence[Request], exact: PassFeatures) -> PassFeatures:
    """Return what no layout of a batch falls below: rows and head rows shared as far as can be, no calls."""
    shared = work(batch, Layout.full_sharing())
    return replace(exact, packed_rows=shared.batch.packed_rows, head_rows=shared.head.num_rows, index_rows=0, calls=())


def ceiling(batch: Sequence[Request], exact: PassFeatures, envelope: Envelope) -> PassFeatures:
    """Return what no layout of a batch exceeds: nothing shared, every kind of call as large as all rows together."""
    apart = work(batch, Layout.no_sharing())
    rows, most = apart.batch.packed_rows, max(call.backward_scratch for call in exact.calls) + 10**6
    kinds = {piece.call for piece in envelope.pieces} - {""}
    return replace(
        exact,
        packed_rows=rows,
        head_rows=apart.head.num_rows,
        index_rows=3 * 8 * rows,
        calls=tuple(
            Call(kind=kind, rows=8 * rows, keys=8 * rows, valid=rows, aligned_rows=8 * rows,
                 forward_scratch=most, backward_scratch=most)
            for kind in kinds
        ),
    )  # fmt: skip


@pytest.mark.parametrize("number", range(6))
def test_bounds_on_features_bound_every_layouts_price(runtime: Runtime, envelope: Envelope, number: int) -> None:
    """lower <= exact <= upper, whatever is shared."""
    pricer, dry = pricers(runtime, envelope)
    batch = list(batches())[number]
    for layout in LAYOUTS:
        one = work(batch, layout)
        features, exact = pricer.features(one), dry.price(one).required_bytes
        assert envelope.at_least(floor(batch, features)).num_bytes <= exact
        assert exact <= envelope.at_most(ceiling(batch, features, envelope)).num_bytes


@pytest.mark.parametrize(
    ("name", "thin", "thick"),
    [
        (
            "index copies of wide labels",
            [Request(tokens=tokens(1, 40), labels=np.zeros((40, 2), dtype=np.int64))],
            [Request(tokens=tokens(1, 40), labels=np.zeros((40, 60), dtype=np.int64))],
        ),
        (
            "outputs of many requests that share all their rows",
            [Request.next_token(tokens(2, 40))],
            [Request.next_token(tokens(2, 40))] * 300,
        ),
    ],
    ids=["wide labels", "many requests"],
)
def test_memory_that_grows_with_what_is_asked_and_not_with_rows(
    runtime: Runtime, envelope: Envelope, name: str, thin: list[Request], thick: list[Request]
) -> None:
    """The same packed rows, another price, and that of the trace."""
    pricer, dry = pricers(runtime, envelope)
    small, large = work(thin), work(thick)
    assert small.batch.packed_rows == large.batch.packed_rows
    prices = [envelope.price(pricer.features(one)).required_bytes for one in (small, large)]
    assert prices[1] > prices[0]
    assert prices == [dry.price(one).required_bytes for one in (small, large)]


def test_passes_without_gradients_have_an_envelope_of_their_own(runtime: Runtime) -> None:
    """Nothing is kept for a backward that never comes."""
    pricer = EnvelopePricer(runtime, head_chunk_rows=CHUNK_ROWS, caller_bytes_per_token=0, dry_runs_first=0)
    batch = [replace(one, no_grad=True) for one in completions([3, 3, 9, 20], prompt=11)]
    found = pricer.price(work(batch))
    dry = DryRunPricer(runtime, head_chunk_rows=CHUNK_ROWS, caller_bytes_per_token=0).price(work(batch))
    assert found.required_bytes == dry.required_bytes
    assert found.required_bytes < pricer.price(work(completions([3, 3, 9, 20], prompt=11))).required_bytes


def test_the_sample_passes_show_every_kind_of_call(runtime: Runtime) -> None:
    """Otherwise passes would be run dry one by one for want of a sample."""
    samples = SamplePasses(no_grad=False, adapter=None)
    kinds = {
        call.kind
        for one in (*samples.counting(), *samples.calls())
        for call in all_calls(runtime, one, head_chunk_rows=CHUNK_ROWS).calls
    }
    buckets = {f"{kind}{first}" for kind in ("view", "gathered", "padded") for first in ("", "-first")}
    assert kinds == {"single", "root", "buffers", "first", "merge", "chunk"} | buckets


def test_an_envelope_is_made_once_and_then_loaded(
    runtime: Runtime, envelope: Envelope, store: EnvelopeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Across pricers, which may live in other processes."""
    made = []

    def make(runtime: Runtime, *, no_grad: bool, **_: object) -> Envelope:
        made.append(no_grad)
        return envelope

    monkeypatch.setattr(envelope_pricer, "make_envelope", make)
    for _ in range(2):
        pricer = EnvelopePricer(runtime, head_chunk_rows=5, caller_bytes_per_token=0, store=store, dry_runs_first=0)
        one = work(completions([4, 8], prompt=5))
        assert pricer.price(one) == envelope.price(pricer.features(one))
    assert made == [False]


@pytest.mark.parametrize("damage", ["{", '{"columns": []}', "null", '{"columns": 3}'])
def test_a_damaged_cache_is_made_anew_with_a_note(
    runtime: Runtime, envelope: Envelope, store: EnvelopeStore, tmp_path: Path, damage: str
) -> None:
    """Half a file, another layout, no object, wrong types."""
    facts = {"model": "one"}
    store.save(facts, envelope)
    (path,) = (tmp_path / "envelopes").glob("*.json")
    path.write_text(damage, encoding="utf-8")
    with pytest.warns(RuntimeWarning, match="is damaged"):
        assert store.load(facts) is None
    store.save(facts, envelope)
    again = store.load(facts)
    assert again is not None
    assert [piece.terms.tolist() for piece in again.pieces] == [one.terms.tolist() for one in envelope.pieces]
    assert store.load({"model": "another"}) is None


def test_a_folder_that_cannot_be_written_costs_only_time(envelope: Envelope, tmp_path: Path) -> None:
    """The cache is a convenience."""
    blocked = tmp_path / "file"
    blocked.write_text("in the way", encoding="utf-8")
    with pytest.warns(RuntimeWarning, match="cannot be written"):
        EnvelopeStore(blocked / "below").save({}, envelope)


@pytest.mark.parametrize("percent", [99, 102], ids=["too low", "too high"])
def test_an_envelope_that_fails_its_check_is_not_used(
    runtime: Runtime, envelope: Envelope, traced: TracedByKind, monkeypatch: pytest.MonkeyPatch, percent: int
) -> None:
    """Held-out passes decide; the pass is then run dry, and the user is told why."""
    honest = envelope_pricer.solve

    def bent(*args: object, **options: object) -> Envelope:
        made = honest(*args, **options)  # type: ignore[arg-type]
        pieces = tuple(replace(piece, terms=piece.terms * percent // 100) for piece in made.pieces)
        return replace(made, pieces=pieces)

    monkeypatch.setattr(envelope_pricer, "solve", bent)
    with pytest.raises(EnvelopeError, match="held-out pass"):
        make_envelope(runtime, traced=traced)
    monkeypatch.setattr(
        envelope_pricer,
        "make_envelope",
        lambda runtime, **options: make_envelope(runtime, **{**options, "traced": traced}),
    )
    pricer = EnvelopePricer(runtime, head_chunk_rows=CHUNK_ROWS, caller_bytes_per_token=0, dry_runs_first=0)
    one = work(completions([4, 8], prompt=5))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = pricer.price(one)
    assert any("run dry instead" in str(warning.message) for warning in caught)
    exact = DryRunPricer(runtime, head_chunk_rows=CHUNK_ROWS, caller_bytes_per_token=0).price(one)
    assert found.required_bytes == exact.required_bytes


def test_a_few_shapes_are_run_dry_before_an_envelope_is_made(
    runtime: Runtime, envelope: Envelope, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of few shapes never pays for an envelope; prices are the same before and after."""
    made: list[bool] = []
    monkeypatch.setattr(envelope_pricer, "make_envelope", lambda runtime, **options: made.append(True) or envelope)
    pricer = EnvelopePricer(runtime, head_chunk_rows=CHUNK_ROWS, caller_bytes_per_token=0, dry_runs_first=2)
    works = [work(completions([length, 8], prompt=5)) for length in (2, 3, 4)]
    before = [pricer.price(one) for one in (works[0], works[0], works[1])]
    assert not made
    pricer.price(works[2])
    assert made == [True]
    assert [pricer.price(one) for one in (works[0], works[0], works[1])] == before


def test_moments_name_their_phase_and_layer(runtime: Runtime, envelope: Envelope) -> None:
    """What an explanation needs: the phase, with recompute told from backward, and the layer where there is one."""
    named = {piece.phase for piece in envelope.pieces}
    assert {"forward", "head", "loss", "backward"} <= named
    assert ("recompute" in named) == (runtime.recompute == "full")
    assert all(isinstance(piece, Piece) and piece.layer in (None, 0, 3) for piece in envelope.pieces)
