"""What observed passes add to the envelope's prices, through a real rank."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.builders import BentMeter, completion, completions, negative_sum, offering, tiny_runtime, tokens
from tests.unit.session.conftest import NewRank
from trainer_rank.errors import TrainerRankMemoryError
from trainer_rank.memory import Observation
from trainer_rank.meters import Meter
from trainer_rank.planner import PassWork
from trainer_rank.report import Record
from trainer_rank.requests import Request
from trainer_rank.session import MicroBatch, TrainerRank
from trainer_rank.session.residual_pricing import ResidualPricing
from trainer_rank.store import LearnedStore
from trainer_rank.units import GIB

LARGE = completions([30, 30, 30, 30], prompt=40)
SMALL = completions([5, 4], prompt=6)
PER_TOKEN = 20_000


class Keep(torch.autograd.Function):
    """Identity that keeps ``PER_TOKEN`` bytes per logical token until its backward: a loss nobody declared."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, value: Tensor, num_tokens: int) -> Tensor:
        ctx.save_for_backward(torch.empty(PER_TOKEN * num_tokens, dtype=torch.uint8))
        return value.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grads[0], None


def heavy(micro_batch: MicroBatch) -> Tensor:
    num_tokens = sum(request.num_tokens for request in micro_batch.requests)
    kept: Tensor = Keep.apply(negative_sum(micro_batch), num_tokens)
    return kept


def train(
    rank: TrainerRank, requests: Sequence[Request], loss: Callable[[MicroBatch], Tensor] = heavy
) -> list[Observation]:
    """Run one call and return what its micro-batches needed."""
    found = []
    for micro_batch in rank.forward_micro_batches(requests):
        loss(micro_batch).backward()
        found.append(micro_batch)
    rank.zero_grad()
    return [one.observed for one in found if one.observed is not None]


def price(rank: TrainerRank, requests: Sequence[Request]) -> int:
    (planned,) = rank.plan(requests)
    return planned.stats.required_bytes


def signature_of(rank: TrainerRank, work: PassWork) -> str:
    pricer = rank._pricing
    assert isinstance(pricer, ResidualPricing)
    return pricer._signature(work)


def learned(rank: TrainerRank, requests: Sequence[Request]) -> int:
    (planned,) = rank.plan(requests)
    return sum(term.num_bytes for term in planned.admission.terms if term.name == "learned")


@pytest.mark.filterwarnings("ignore:caller_above_declaration")
def test_what_a_pass_was_short_of_is_in_the_next_price(new_rank: NewRank) -> None:
    """The first is admitted at the traced price; from the next call on the same pass costs what it needed."""
    rank = new_rank(caller_bytes_per_token=0)
    traced = price(rank, LARGE)
    (observed,) = train(rank, LARGE)
    assert observed.peak_bytes > traced + 1_000_000
    assert price(rank, LARGE) == observed.peak_bytes
    assert learned(rank, LARGE) == observed.peak_bytes - traced


@pytest.mark.filterwarnings("ignore:caller_above_declaration")
def test_prices_within_a_call_agree(new_rank: NewRank) -> None:
    """What the first micro-batch taught waits for the next call: the plan that was admitted is the one that runs."""
    rank = new_rank(caller_bytes_per_token=0, max_packed_tokens=75)
    before = sorted(one.stats.required_bytes for one in rank.plan(LARGE))
    ran = []
    for micro_batch in rank.forward_micro_batches(LARGE):
        ran.append(micro_batch.stats.required_bytes)
        heavy(micro_batch).backward()
        del micro_batch
    assert len(ran) > 2
    assert sorted(ran) == before
    assert sorted(one.stats.required_bytes for one in rank.plan(LARGE)) > before


@pytest.mark.filterwarnings("ignore:caller_above_declaration")
def test_a_large_surprise_does_not_refuse_smaller_work(new_rank: NewRank, meter: Meter) -> None:
    """A small pass is charged its share of what the large one was short of; a small device takes it."""
    rank = new_rank(caller_bytes_per_token=0)
    own, large = price(rank, SMALL), price(rank, LARGE)
    (observed,) = train(rank, LARGE)
    rank.learned()
    few, many = (one.stats.logical_tokens for batch in (SMALL, LARGE) for one in rank.plan(batch))
    share = (observed.peak_bytes - large) * few // many
    assert learned(rank, SMALL) == pytest.approx(share, abs=2)
    pending = sum(term.num_bytes for term in rank.plan(SMALL)[0].admission.pending)
    tight = offering(meter, own + share + pending + 2)
    small = TrainerRank(rank.runtime, meter=tight, caller_bytes_per_token=0, verify_backend=False)
    small.load_learned(rank.learned())
    assert len(small.plan(SMALL)) == 1


@pytest.mark.filterwarnings("ignore:caller_above_declaration")
def test_a_small_surprise_does_not_poison_a_large_pass(new_rank: NewRank) -> None:
    """One short pass says nothing about growth: the large one costs that much more, not that much per token."""
    rank = new_rank(caller_bytes_per_token=0)
    own = price(rank, LARGE)
    (observed,) = train(rank, SMALL)
    rank.learned()
    short = observed.peak_bytes - (price(rank, SMALL) - learned(rank, SMALL))
    assert price(rank, LARGE) == own + short


@pytest.mark.filterwarnings("ignore:caller_above_declaration")
def test_27_tokens_do_not_poison_20_000(new_rank: NewRank) -> None:
    """A warm-up that needed far more than its price raises that of a long pass by as many bytes, in one pass still."""
    rank = new_rank(caller_bytes_per_token=0)
    warm_up, long = completions([18], prompt=9), completions([1900] * 10, prompt=1000)
    (before,) = rank.plan(long)
    assert before.stats.packed_rows == 20_000
    (observed,) = train(rank, warm_up)
    assert observed.packed_rows == 27
    (after,) = rank.plan(long)
    short = observed.peak_bytes - (price(rank, warm_up) - learned(rank, warm_up))
    assert short > 500_000
    assert after.stats.required_bytes == before.stats.required_bytes + short


def test_129_gb_observed_once_do_not_block_the_same_tokens_on_fewer_rows(new_rank: NewRank, meter: Meter) -> None:
    """The incident: 73,696 tokens, nothing shared, were short of 123 GB; shared, on 21,487 rows, they fit 80 GiB."""
    budget = 80 * GIB
    roomy = BentMeter(meter, lambda reading: replace(reading, available_bytes=budget, budget_bytes=budget))
    rank = new_rank(caller_bytes_per_token=0, meter=roomy)
    shared = completions([1023] * 18, prompt=3071)
    (before,) = rank.plan(shared)
    assert (before.stats.packed_rows, before.stats.logical_tokens) == (21_485, 73_692)
    (work,) = before.works
    state = rank.learned()
    state["learned"] = {signature_of(rank, work): [[73_696, 73_696, 6 * 10**9, 129 * 10**9]]}
    rank.load_learned(state)
    (after,) = rank.plan(shared)
    assert learned(rank, shared) == pytest.approx(123e9 * 21_485 / 73_696, rel=1e-6)
    assert after.admission.admitted


@pytest.mark.filterwarnings("ignore:caller_above_declaration")
def test_a_pass_without_its_backward_teaches_nothing(new_rank: NewRank) -> None:
    """It needed less than it will: what larger ones were short of stays in its price."""
    rank = new_rank(caller_bytes_per_token=0)
    train(rank, [*LARGE, *completions([30, 30], prompt=40, seed=9)])
    before = learned(rank, LARGE)
    assert before > 1_000_000
    for micro_batch in rank.forward_micro_batches(LARGE):
        del micro_batch
    assert learned(rank, LARGE) == before


@pytest.mark.filterwarnings("ignore:caller_above_declaration")
def test_the_hardest_request_is_found_by_what_was_learned_too(new_rank: NewRank) -> None:
    """A longer request of other outputs does not stand for one whose outputs were short of memory."""
    rank = new_rank(caller_bytes_per_token=0)
    row = tokens(3, 70)
    labels = np.stack([row, row], axis=1)
    labels[:60] = -100
    wide = Request(tokens=row, labels=labels)
    longer = completion(tokens(4, 110), tokens(5, 40))
    train(rank, [wide])
    assert price(rank, [wide]) > price(rank, [longer])
    hardest = rank.hardest([wide, longer])
    assert hardest is not None
    assert hardest.indices == (0,)


@pytest.mark.filterwarnings("ignore:caller_above_declaration")
def test_a_record_holds_what_the_learned_part_was_made_of(new_rank: NewRank) -> None:
    """Enough to make it again without the observations; nothing where nothing is known."""
    records: list[Record] = []
    rank = new_rank(caller_bytes_per_token=0, on_decision=records.append)
    for batch in (LARGE, SMALL, LARGE[:2], LARGE[:3]):
        train(rank, batch)
    lines = [json.loads(json.dumps(one.as_line())) for one in records]
    admissions = [line for line in lines if line["kind"] == "admission"]
    assert admissions[0]["pricing"] == {"name": "envelope", "learned": [None]}
    for line in admissions[1:]:
        (used,), (one,) = line["pricing"]["learned"], line["passes"]
        share = min(
            1.0, one["packed_rows"] / used["fewest_rows"], one["logical_tokens"] / used["fewest_tokens"]
        )  # fmt: skip
        extra = math.ceil(
            used["per_row"] * one["packed_rows"] + used["per_token"] * one["logical_tokens"]
            + share * (used["intercept"] + used["margin"])
        )  # fmt: skip
        if used["enough_bytes"] is not None:
            extra = min(extra, max(0, used["enough_bytes"] - used["traced_bytes"]))
        assert extra == used["extra_bytes"] == line["terms"].get("learned", 0)
        assert line["required_bytes"] == used["traced_bytes"] + used["extra_bytes"]


@pytest.mark.filterwarnings("ignore:caller_above_declaration")
def test_what_ran_is_not_refused_when_it_comes_again(new_rank: NewRank, meter: Meter) -> None:
    """Whatever other passes taught since, with as much memory as it took, and one byte less is refused."""
    rank = new_rank(caller_bytes_per_token=0)
    needed = 0
    for batch in (LARGE, SMALL, LARGE[:2], LARGE[:3], LARGE):
        (observed,) = train(rank, batch)
        needed = max(needed, observed.peak_bytes)
    pending = sum(term.num_bytes for term in rank.plan(LARGE)[0].admission.pending)
    for spare, fits in ((0, True), (-1, False)):
        tight = offering(meter, needed + pending + spare)
        again = TrainerRank(rank.runtime, meter=tight, caller_bytes_per_token=0, verify_backend=False)
        again.load_learned(rank.learned())
        assert (len(again.plan(LARGE)) == 1) == fits


def test_prices_that_were_enough_teach_nothing(new_rank: NewRank) -> None:
    """A loss within its declaration leaves every price as the trace has it."""
    rank = new_rank()
    before = price(rank, LARGE)
    train(rank, LARGE, negative_sum)
    assert price(rank, LARGE) == before
    assert learned(rank, LARGE) == 0


@pytest.mark.filterwarnings("ignore:caller_above_declaration")
def test_other_outputs_and_other_settings_are_learned_apart(new_rank: NewRank) -> None:
    """Gradients or none, recompute, the head's chunks: what one taught is not another's."""
    rank = new_rank(caller_bytes_per_token=0)
    train(rank, LARGE)
    rank.learned()
    silent = [Request(tokens=one.tokens, labels=one.labels, no_grad=True) for one in LARGE]
    assert learned(rank, LARGE) > 0
    assert learned(rank, silent) == 0
    chunked = new_rank(caller_bytes_per_token=0, head_chunk_rows=64)
    chunked.load_learned(rank.learned())
    assert learned(chunked, LARGE) == 0


@pytest.mark.filterwarnings("ignore:caller_above_declaration")
def test_several_passes_alive_together_teach_nothing(new_rank: NewRank) -> None:
    """No one knows which of them needed it."""
    rank = new_rank(caller_bytes_per_token=0)
    mixed = [*LARGE, *(Request(tokens=one.tokens, labels=one.labels, no_grad=True) for one in SMALL)]
    for micro_batch in [rank.forward(mixed)]:
        heavy(micro_batch).backward()
        del micro_batch
    assert rank.learned()["learned"] == {}


@pytest.mark.filterwarnings("ignore:caller_above_declaration")
def test_what_was_learned_goes_through_json_and_through_the_store(new_rank: NewRank, tmp_path: Path) -> None:
    """A checkpoint's state and a store's both give the price of the rank that learned it."""
    store = LearnedStore(tmp_path / "learned.sqlite3")
    rank = new_rank(caller_bytes_per_token=0, store=store)
    train(rank, LARGE)
    wanted, state = price(rank, LARGE), json.loads(json.dumps(rank.learned()))
    resumed = new_rank(caller_bytes_per_token=0)
    resumed.load_learned(state)
    assert price(resumed, LARGE) == wanted
    later = new_rank(caller_bytes_per_token=0, store=store)
    assert price(later, LARGE) == wanted
    other = new_rank(caller_bytes_per_token=0, store=store, model={"lora": False})
    assert learned(other, LARGE) == 0


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_a_store_that_cannot_be_used_is_told_once_and_the_rank_goes_on(new_rank: NewRank, tmp_path: Path) -> None:
    """A read-only home, say."""
    (tmp_path / "file").write_text("")
    store = LearnedStore(tmp_path / "file" / "learned.sqlite3")
    rank = new_rank(store=store)
    train(rank, SMALL, negative_sum)
    with pytest.warns(RuntimeWarning, match=r"what is learned stays in this process: .* set XDG_DATA_HOME"):
        rank.learned()
    # Warnings are errors here.
    train(rank, SMALL, negative_sum)
    rank.learned()


@pytest.mark.filterwarnings("ignore:caller_above_declaration")
def test_the_learned_term_is_in_a_refusal(meter: Meter) -> None:
    """Its bytes are said by name."""
    runtime = tiny_runtime()
    rank = TrainerRank(runtime, meter=meter, caller_bytes_per_token=0, verify_backend=False)
    train(rank, LARGE)
    state = rank.learned()
    (planned,) = rank.plan(LARGE[:1])
    tight = TrainerRank(
        runtime, meter=offering(meter, planned.admission.charged_bytes - 100), caller_bytes_per_token=0,
        verify_backend=False,
    )  # fmt: skip
    tight.load_learned(state)
    with pytest.raises(TrainerRankMemoryError, match=r"learned [\d.]+ [KM]iB"):
        tight.plan(LARGE[:1])
