"""Recompute chosen pass by pass: prices to the byte, numbers that do not depend on it, and the fastest that fits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.builders import completion, completions, negative_sum, offering, tiny_runtime, tokens
from trainer_rank import TrainerRank
from trainer_rank.errors import TrainerRankMemoryError
from trainer_rank.executor.dry_run import DryRunPricer
from trainer_rank.executor.envelope_pricer import TracedByKind, make_envelope
from trainer_rank.executor.pass_features import pass_features
from trainer_rank.executor.run import run_forward
from trainer_rank.memory import fold
from trainer_rank.meters import open_meter
from trainer_rank.planner import pass_work
from trainer_rank.planner.recompute import recompute_choices
from trainer_rank.planner.speed import Speed
from trainer_rank.prefix import Layout
from trainer_rank.report import AdmissionRecord, Record

LAYERS = 6
BATCH = completions([30, 20, 60, 61], prompt=90)


def elastic(recompute: Any = "auto", **options: Any) -> Any:
    return tiny_runtime(**{"layers": LAYERS, "hidden": 64, "dtype": torch.float32, "recompute": recompute, **options})


def test_a_few_layers_of_either_kind_tell_the_rest() -> None:
    """The composed price is the peak of the pass traced whole, whatever the number that run again."""
    runtime = elastic(lora=False)
    dry = DryRunPricer(runtime, head_chunk_rows=64, caller_bytes_per_token=0)
    for recomputed in (0, 1, 4, LAYERS):
        work = replace(pass_work(BATCH, range(4)), recomputed=recomputed)
        whole = fold(dry.trace(work, LAYERS, recomputed))
        assert dry.price(work).required_bytes == whole.peak.peak_bytes
        assert dry.price(work).retained_bytes == whole.end_of("outputs")


def test_one_set_of_traces_gives_the_envelope_of_every_number() -> None:
    """Exact for passes that had no part in it; fewer recomputed layers never need less."""
    runtime = elastic()
    traced: TracedByKind = {}
    dry = DryRunPricer(runtime, head_chunk_rows=64, caller_bytes_per_token=0)
    found = []
    for recomputed in (1, 4):
        work = replace(pass_work(BATCH, range(4)), recomputed=recomputed)
        envelope = make_envelope(runtime, recomputed=recomputed, traced=traced)
        price = envelope.price(pass_features(runtime, work, head_chunk_rows=64))
        assert price.required_bytes == dry.price(work).required_bytes
        assert price.retained_bytes == dry.price(work).retained_bytes
        found.append(price.required_bytes)
    assert len(traced) == 1
    assert found == sorted(found, reverse=True)


def grads_with(recomputed: int | None, recompute: str) -> list[Tensor]:
    runtime = elastic(recompute)
    work = replace(pass_work(BATCH, range(4)), recomputed=recomputed)
    result = run_forward(runtime, work, head_chunk_rows=64, map_error=lambda error: error)
    torch.stack([logprobs.sum() for logprobs in result.logprobs]).sum().backward()
    return [parameter.grad for parameter in runtime.trainable_parameters() if parameter.grad is not None]


def test_gradients_do_not_depend_on_it_in_a_single_bit() -> None:
    """Any number of recomputed layers, against a model that keeps everything."""
    known = grads_with(None, "none")
    for recomputed in (0, 3, LAYERS, None):
        found = grads_with(recomputed, "auto")
        assert all(torch.equal(one, other) for one, other in zip(known, found, strict=True))


def test_the_fewest_layers_that_fit_are_recomputed() -> None:
    """From a budget for everything down to the least; what is admitted runs under a real cap, below it is refused."""
    with open_meter("cpu") as meter:
        runtime = elastic()
        dry = DryRunPricer(runtime, head_chunk_rows=64, caller_bytes_per_token=256)
        prices = {
            k: dry.price(replace(pass_work(BATCH, range(4), Layout.full_sharing()), recomputed=k)).required_bytes
            for k in recompute_choices(LAYERS)
        }
        state = runtime.facts.adam_state_bytes
        assert sorted(prices.values(), reverse=True) == list(prices.values())
        for k in (1, LAYERS):
            rank = TrainerRank(
                runtime, meter=offering(meter, prices[k] + state + 128), head_chunk_rows=64, verify_backend=False,
                layout=Layout.full_sharing(),
            )  # fmt: skip
            (planned,) = rank.plan(BATCH)
            assert planned.works[0].recomputed == k
            for micro_batch in rank.forward_micro_batches(BATCH):
                negative_sum(micro_batch).backward()
                del micro_batch
            rank.zero_grad()


def test_a_narrow_pass_that_keeps_activations_beats_a_wide_one_that_does_not() -> None:
    """Requests that share nothing lose nothing by a cut, so they are cut until no layer runs again."""
    with open_meter("cpu") as meter:
        runtime = elastic()
        apart = [completion(tokens(number, 40), tokens(10 + number, 60)) for number in range(4)]
        dry = DryRunPricer(runtime, head_chunk_rows=64, caller_bytes_per_token=256)
        one = dry.price(replace(pass_work(apart[-1:], [3]), recomputed=0)).required_bytes
        room = one + 3 * runtime.facts.trainable_bytes + runtime.facts.adam_state_bytes
        rank = TrainerRank(runtime, meter=offering(meter, room), head_chunk_rows=64, verify_backend=False)
        assert [work.recomputed for planned in rank.plan(apart) for work in planned.works] == [0, 0, 0, 0]


def test_looking_for_a_faster_cut_records_no_refusal() -> None:
    """A request that needs every layer recomputed is refused under no smaller choice: none was offered to anyone."""
    with open_meter("cpu") as meter:
        runtime = elastic()
        dry = DryRunPricer(runtime, head_chunk_rows=64, caller_bytes_per_token=256)
        least = dry.price(replace(pass_work(BATCH[-1:], [0]), recomputed=LAYERS)).required_bytes
        records: list[Record] = []
        rank = TrainerRank(
            runtime, meter=offering(meter, least + runtime.facts.adam_state_bytes + 128), head_chunk_rows=64,
            verify_backend=False, on_decision=records.append,
        )  # fmt: skip
        (planned,) = rank.plan(BATCH[-1:])
        assert planned.works[0].recomputed == LAYERS
        for micro_batch in rank.forward_micro_batches(BATCH[-1:]):
            negative_sum(micro_batch).backward()
            del micro_batch
        verdicts = [record.verdict for record in records if isinstance(record, AdmissionRecord)]
        assert verdicts == ["admitted"]


def test_what_does_not_fit_with_all_recomputed_is_refused() -> None:
    """The words are those of every refusal."""
    with open_meter("cpu") as meter:
        runtime = elastic()
        rank = TrainerRank(runtime, meter=offering(meter, 40_000), head_chunk_rows=64, verify_backend=False)
        with pytest.raises(TrainerRankMemoryError, match="cannot fit alone"):
            list(rank.forward_micro_batches(BATCH))


def test_choices_and_times() -> None:
    """None first, all last; what is recomputed costs one forward more, and a pass without gradients only its own."""
    assert recompute_choices(4) == (0, 4)
    assert recompute_choices(30) == (0, 7, 15, 22, 30)
    work = pass_work(BATCH, range(4))
    rows = work.batch.packed_rows + 16 + 16 * work.batch.num_segments
    times = [Speed().time([replace(work, recomputed=k)], 12) for k in (0, 6, 12, None)]
    assert times == [rows * 3, rows * 3.5, rows * 4, rows * 4]
    assert Speed().time([replace(work, no_grad=True)], 12) == rows
