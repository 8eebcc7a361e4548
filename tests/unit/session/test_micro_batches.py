"""The numbers do not depend on the split; what cannot be run is refused by name; nothing is ever truncated."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from tests.builders import (
    CONTEXT,
    VOCABULARY,
    completion,
    completions,
    distance,
    gradients,
    logprobs,
    negative_sum,
    run,
    tokens,
)
from tests.unit.session.conftest import NewRank
from trainer_rank import AtomicGroup, Layout, Request
from trainer_rank.errors import RequestError, TrainerRankMemoryError
from trainer_rank.meters.simulated import SimulatedMeter
from trainer_rank.prefix import build_tree, first_divergences
from trainer_rank.requests import IGNORED
from trainer_rank.session import TrainerRank

UNEVEN = completions([1, 3, 100], prompt=5)


@pytest.fixture(scope="module")
def ways(shared_rank: TrainerRank) -> list[TrainerRank]:
    """Ranks on one model that run the same requests as a tree, flat, and either cut in two."""
    options: list[dict[str, Any]] = [
        {"layout": Layout.no_sharing()},
        {"layout": Layout.full_sharing()},
        {"max_packed_tokens": 106},
        {"max_packed_tokens": 105, "layout": Layout.no_sharing()},
    ]
    runtime, meter = shared_rank.runtime, shared_rank.meter
    return [TrainerRank(runtime, meter=meter, verify_backend=False, **one) for one in options]


@pytest.mark.parametrize("normalisation", ["token-mean", "sequence-mean", "sum"])
def test_loss_and_gradient_do_not_depend_on_the_split(
    rank: TrainerRank, ways: list[TrainerRank], normalisation: str
) -> None:
    """Completions of 1, 3 and 100 tokens in one pass and in two, as a tree and flat: one loss, one gradient."""
    loss, grads, _ = run(rank, UNEVEN, normalisation=normalisation)
    counts = []
    for other in ways:
        again, again_grads, count = run(other, UNEVEN, normalisation=normalisation)
        counts.append(count)
        assert again == pytest.approx(loss, rel=1e-9)
        assert distance(again_grads, grads) <= 1e-9
    assert counts == [1, 1, 2, 2]


@pytest.mark.parametrize("cuts", [(0, 1, 2), (0, 1), (1, 2), (0, 2)])
def test_any_partition_of_the_same_normaliser_gives_the_same_gradient(rank: TrainerRank, cuts: tuple[int, ...]) -> None:
    """Coefficients are fixed over the whole batch, so calling for some requests first changes nothing."""
    (whole,) = rank.forward_micro_batches(UNEVEN)
    coefficients = whole.coefficients
    _, grads, _ = run(rank, UNEVEN)
    rank.zero_grad()
    for part in (cuts, tuple(index for index in range(3) if index not in cuts)):
        for micro_batch in rank.forward_micro_batches([UNEVEN[index] for index in part]):
            factors = [coefficients[part[index]] for index in micro_batch.indices]
            scored = [result.logprobs for result in micro_batch.results if result.logprobs is not None]
            torch.stack([-factor * one.sum() for factor, one in zip(factors, scored, strict=True)]).sum().backward()
    assert distance(gradients(rank), grads) <= 1e-9


def test_the_token_mean_is_the_mean_over_tokens(rank: TrainerRank) -> None:
    """Not the mean of means: the loss is the sum of all log-probs over the number of scored tokens."""
    (micro_batch,) = rank.forward_micro_batches(UNEVEN)
    total = sum(float(logprobs(result).sum()) for result in micro_batch.results)
    loss, _, _ = run(rank, UNEVEN)
    assert loss == pytest.approx(-total / 104, rel=1e-12)


def test_requests_are_scored_from_their_parent_s_last_row(rank: TrainerRank) -> None:
    """[5,6,7], [5,6,8] and [5,6] share two rows; the branch tokens are scored from row 6, and lengths are kept."""
    batch = [Request.next_token(row) for row in ([5, 6, 7], [5, 6, 8], [5, 6])]
    fully = TrainerRank(rank.runtime, meter=rank.meter, verify_backend=False, layout=Layout.full_sharing())
    (micro_batch,) = fully.forward_micro_batches(batch)
    found = [logprobs(result) for result in micro_batch.results]
    assert [tuple(one.shape) for one in found] == [(3,), (3,), (2,)]
    assert (micro_batch.stats.packed_rows, micro_batch.stats.trained_tokens) == (4, 5)
    for request, packed in zip(batch, found, strict=True):
        (alone,) = rank.forward_micro_batches([request])
        assert float((packed - logprobs(alone.results[0])).abs().max()) <= 1e-9
        assert float(packed[-1]) == 0.0
    # One distribution after 5, 6: two of its tokens cannot have more than all of the mass.
    assert math.exp(float(found[0][1])) + math.exp(float(found[1][1])) < 1


def test_a_batch_in_which_nothing_is_scored_is_exactly_zero(new_rank: NewRank) -> None:
    """Loss 0, gradient 0, a warning, and a step that moves nothing."""
    rank = new_rank()
    silent = [Request(tokens=[1, 2, 3], labels=[IGNORED] * 3), Request.next_token([4, 5], trained=[False, False])]
    before = [parameter.detach().clone() for parameter in rank.runtime.trainable_parameters()]
    with pytest.warns(RuntimeWarning, match="no_trained_tokens"):
        batches = rank.forward_micro_batches(silent)
    for micro_batch in batches:
        loss = negative_sum(micro_batch)
        loss.backward()
        assert float(loss.detach()) == 0.0
        assert micro_batch.num_trained == 0
    assert all(not grad.any() for grad in gradients(rank))
    outcome = rank.optim_step(lr=0.1)
    assert (outcome.grad_norm, outcome.skipped) == (0.0, False)
    after = rank.runtime.trainable_parameters()
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_a_masked_request_among_others_gets_exact_zeros_and_no_gradient(rank: TrainerRank) -> None:
    """It changes neither loss nor gradient."""
    silent = Request(tokens=tokens(3, 4), labels=[IGNORED] * 4)
    loss, grads, _ = run(rank, completions([2, 3]))
    again, again_grads, _ = run(rank, [silent, *completions([2, 3])])
    assert again == pytest.approx(loss, rel=1e-12)
    assert distance(again_grads, grads) <= 1e-12


@pytest.mark.parametrize(
    ("request_", "field", "value"),
    [
        (Request.next_token(np.zeros(CONTEXT + 1, dtype=np.int64)), "tokens", str(CONTEXT + 1)),
        (Request.next_token([1, VOCABULARY, 2]), "tokens", str(VOCABULARY)),
        (Request(tokens=[1, 2], labels=[VOCABULARY + 7, IGNORED]), "labels", str(VOCABULARY + 7)),
        (Request.next_token([1, 2], adapter="other"), "adapter", "'other'"),
    ],
)
def test_a_request_the_model_cannot_run_is_named_before_anything_runs(
    rank: TrainerRank, request_: Request, field: str, value: str
) -> None:
    """The error says which request, which field and which value, at the call and not at the first pass."""
    with pytest.raises(RequestError, match=value) as caught:
        rank.forward_micro_batches([completions([2])[0], [request_]])
    assert (caught.value.index, caught.value.field) == (1, field)
    assert str(caught.value).startswith(f"request 1: {field}")


def test_an_unknown_normalisation_is_named(rank: TrainerRank) -> None:
    """With the known ones."""
    with pytest.raises(RequestError, match=r"token-mean.*'mean'"):
        rank.forward_micro_batches(completions([2]), normalisation="mean")


@pytest.mark.parametrize("seed", range(4))
def test_the_cap_on_packed_rows_holds_and_no_token_is_lost(new_rank: NewRank, seed: int) -> None:
    """Lognormal lengths: no pass above the cap, and trained tokens out are trained tokens in."""
    random = np.random.default_rng(seed)
    lengths = np.clip(random.lognormal(2.0, 1.0, 24), 1, 50).astype(int).tolist()
    batch = [*completions(lengths[:12], prompt=10, seed=seed), *completions(lengths[12:], prompt=10, seed=seed + 99)]
    rank = new_rank(max_packed_tokens=64, meter=SimulatedMeter("1TiB"))
    rows, trained, scored = [], 0, 0
    for micro_batch in rank.forward_micro_batches(batch):
        rows.append(micro_batch.stats.packed_rows)
        trained += micro_batch.stats.trained_tokens
        scored += sum(int((logprobs(result) != 0).sum()) for result in micro_batch.results)
    assert max(rows) <= 64
    assert len(rows) > 1
    assert trained == scored == sum(lengths)


def test_a_lone_request_above_the_cap_is_refused_by_name(new_rank: NewRank) -> None:
    """Never truncated: index, rows and cap are in the message, and nothing ran."""
    rank = new_rank(max_packed_tokens=20)
    batch = [*completions([2, 3]), completion(tokens(1, 9), tokens(2, 30))]
    with pytest.raises(TrainerRankMemoryError, match=r"request 2 of 39 tokens .* 39 packed rows .* 20") as caught:
        next(rank.forward_micro_batches(batch))
    error = caught.value
    assert (error.refused, error.request_index, error.request_length) == (True, 2, 39)
    assert error.term == "max_packed_tokens"
    assert "Nothing ran" in str(error)


def test_an_atomic_group_above_the_cap_is_refused_by_its_longest_member(new_rank: NewRank) -> None:
    """The whole group is at fault; the message says how many stay together."""
    group = AtomicGroup([Request.next_token(tokens(1, 12)), Request.next_token(tokens(2, 15))])
    with pytest.raises(TrainerRankMemoryError, match="request 2 of 15 tokens and the 1 request"):
        next(new_rank(max_packed_tokens=20).forward_micro_batches([completions([2])[0], group]))


def test_the_cap_makes_a_pass_share_more(new_rank: NewRank) -> None:
    """A short prompt is not worth sharing for speed, but it is when that keeps a pass whole."""
    batch = completions([4, 4], prompt=2)
    (loose,) = new_rank().forward_micro_batches(batch)
    (tight,) = new_rank(max_packed_tokens=10).forward_micro_batches(batch)
    assert (loose.stats.packed_rows, tight.stats.packed_rows) == (12, 10)


def test_near_identical_prefixes_are_packed_as_they_are_and_reported(rank: TrainerRank) -> None:
    """One changed token is reported where it stands; the tokens that are scored are the caller's own."""
    row = tokens(5, 60)
    other = row.copy()
    other[20] = (other[20] + 1) % VOCABULARY
    batch = [Request.next_token(row), Request.next_token(other)]
    (found,) = first_divergences(build_tree([request.tokens for request in batch]))
    assert (found.position, found.lost_rows) == (20, 39)
    (micro_batch,) = rank.forward_micro_batches(batch)
    assert micro_batch.stats.packed_rows == 20 + 2 * 40
    together = [float(logprobs(result).sum()) for result in micro_batch.results]
    alone = []
    for request in batch:
        (one,) = rank.forward_micro_batches([request])
        alone.append(float(logprobs(one.results[0]).sum()))
    assert together == pytest.approx(alone, rel=1e-9)
    assert together[0] != together[1]


def test_several_labels_per_position_come_back_in_their_shape(rank: TrainerRank) -> None:
    """(N, K) labels give (N, K) log-probs; a position's first label may be the next token."""
    row = tokens(1, 6)
    labels = np.stack([np.append(row[1:], IGNORED), np.full(6, 3), np.full(6, IGNORED)], axis=1)
    (wide,) = rank.forward_micro_batches([Request(tokens=row, labels=labels)])
    (plain,) = rank.forward_micro_batches([Request.next_token(row)])
    found, wanted = logprobs(wide.results[0]), logprobs(plain.results[0])
    assert found.shape == (6, 3)
    assert float((found[:, 0] - wanted).abs().max()) <= 1e-12
    assert not found[:, 2].any()


def test_an_ungraded_request_has_no_graph_and_the_same_numbers(rank: TrainerRank) -> None:
    """References are scored beside the trained requests without keeping anything for backward."""
    batch = completions([3, 4])
    silent = [Request(tokens=one.tokens, labels=one.labels, no_grad=True) for one in batch]
    found: dict[int, torch.Tensor] = {}
    for micro_batch in rank.forward_micro_batches([*batch, *silent]):
        for index, result in zip(micro_batch.indices, micro_batch.results, strict=True):
            assert result.logprobs is not None
            found[index] = result.logprobs
    assert [found[index].requires_grad for index in range(4)] == [True, True, False, False]
    assert all(torch.allclose(found[index].detach(), found[index + 2], rtol=0, atol=1e-9) for index in (0, 1))


def test_the_runtime_s_own_adapter_may_be_named(rank: TrainerRank) -> None:
    """By name or without one it is the same adapter: such requests share rows and a pass."""
    one, other = completions([3, 4], prompt=20)
    named = Request(tokens=other.tokens, labels=other.labels, adapter=rank.runtime.facts.adapter)
    (micro_batch,) = rank.forward_micro_batches([AtomicGroup([one, named])])
    assert (micro_batch.stats.passes, micro_batch.stats.packed_rows) == (1, 27)
