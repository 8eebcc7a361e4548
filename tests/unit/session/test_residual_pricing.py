"""What observed passes add to the envelope's prices, through a real rank."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.builders import completions, negative_sum, offering, tiny_runtime
from tests.unit.session.conftest import NewRank
from trainer_rank.errors import TrainerRankMemoryError
from trainer_rank.memory import Observation
from trainer_rank.meters import Meter
from trainer_rank.requests import Request
from trainer_rank.session import MicroBatch, TrainerRank
from trainer_rank.store import LearnedStore

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
    tokens = [one.stats.logical_tokens for batch in (SMALL, LARGE) for one in rank.plan(batch)]
    share = (observed.peak_bytes - large) * tokens[0] // tokens[1]
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
