"""Each layout and each split gives the numbers of the stock library model run one by one: outputs and gradients."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from tests.equivalence.models import FAMILIES, VOCABULARY, Numbers, Pair, assert_same
from tests.property.strategies import Rows, rows_and_decisions
from trainer_rank import Layout, Request, TrainerRank, restore
from trainer_rank.executor.run import run_forward
from trainer_rank.meters import SimulatedMeter
from trainer_rank.planner import pass_work
from trainer_rank.prefix import build_tree
from trainer_rank.requests import IGNORED

pair = cache(Pair.make)
"""Models are made once; every test clears the gradients it needs cleared."""


def tokens(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Return random runs of tokens."""
    draw = np.random.default_rng((seed, *lengths))
    return [draw.integers(0, VOCABULARY, length).tolist() for length in lengths]


def scored(rows: list[list[int]], seed: int = 0) -> tuple[list[Request], list[Tensor]]:
    """Return requests with next-token and random labels, some ignored, two per position on every third; and weights."""
    draw = np.random.default_rng(seed)
    requests = []
    for number, row in enumerate(rows):
        labels = np.array([*row[1:], draw.integers(0, VOCABULARY)])
        if number % 3 == 2:
            labels = np.stack([labels, draw.integers(0, VOCABULARY, len(row))], axis=1)
        ignored = draw.random(labels.shape) < 0.3
        ignored.flat[draw.integers(0, ignored.size)] = False
        requests.append(Request(tokens=row, labels=np.where(ignored, IGNORED, labels)))
    return requests, [torch.from_numpy(draw.normal(size=np.shape(request.labels))) for request in requests]


A, B, C, D, E = tokens(9, 4, 6, 18, 3)
TREES = {
    "flat": [A + B, A + C, A + D, A + E],
    "deep": [A + B + C + E, A + B + C + D, A + B + E, A + D],
    "conversation": [A, A + B, A + B + C, A + B + C + D],
    "duplicates": [A + B, A + C, A + B, A + B],
    "empty completion": [A + B, A, A + C],
    "one-token requests": [[5], [5], [5, 7], [9]],
    "unshared": [[1, *A], [2, *B], [3, *C]],
    "two roots": [[1, *A, *B], [1, *A, *C], [2, *D], [2, *D, *E]],
}


def layouts(rows: list[list[int]]) -> list[Layout]:
    """Return the two extremes, one level, and two mixed layouts."""
    count = build_tree([np.array(row) for row in rows]).num_segments
    draw = np.random.default_rng(count)
    mixed = [Layout.mixed(tuple((draw.random(count) < share).tolist())) for share in (0.4, 0.7)]
    return [Layout.full_sharing(), Layout.no_sharing(), Layout.uniform_depth(1), *mixed]


@pytest.mark.parametrize("recompute", ["full", "none"])
@pytest.mark.parametrize("lora", [True, False], ids=["adapter", "all weights"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_layout_gives_the_numbers_of_the_stock_model(family: str, lora: bool, recompute: str) -> None:
    """Three families, adapter or all weights, recompute on and off: log-probs and every gradient, to rounding."""
    subject, checked = pair(family, lora=lora, recompute=recompute), 0
    for number, rows in enumerate(TREES.values()):
        requests, weights = scored(rows)
        wanted = subject.alone(requests, weights)
        layout = layouts(rows)[number % 5]
        assert_same(subject.packed(requests, weights, (range(len(rows)), layout)), wanted)
        checked += 1
    assert checked == len(TREES)


@pytest.mark.parametrize("rows", TREES.values(), ids=TREES.keys())
def test_layouts_of_each_shape(rows: list[list[int]]) -> None:
    """Full, none, one level and mixed sharing of every shape."""
    subject = pair("qwen3", lora=True)
    requests, weights = scored(rows, seed=1)
    wanted = subject.alone(requests, weights)
    found = [subject.packed(requests, weights, (range(len(rows)), layout)) for layout in layouts(rows)]
    assert len(found) == 5
    for numbers in found:
        assert_same(numbers, wanted)


@pytest.mark.parametrize("rows", TREES.values(), ids=TREES.keys())
def test_splits_of_each_shape(rows: list[list[int]]) -> None:
    """Passes accumulate to the gradient of the whole, wherever the split falls and whatever order they run in."""
    subject = pair("qwen2", lora=False)
    requests, weights = scored(rows, seed=2)
    wanted = subject.alone(requests, weights)
    full, count = Layout.full_sharing(), len(rows)
    splits = [
        [([index], full) for index in reversed(range(count))],
        [(range(0, count, 2), full), (range(1, count, 2), Layout.no_sharing())],
        [(range(count - 1, 0, -1), full), ([0], full)],
    ]
    for passes in splits:
        assert_same(subject.packed(requests, weights, *passes), wanted)


@given(drawn=rows_and_decisions(max_rows=5, max_tokens=5))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_small_tree_under_any_layout(drawn: tuple[Rows, tuple[bool, ...]]) -> None:
    """Random rows over three tokens, with a random decision per segment."""
    rows, decisions = drawn
    subject = pair("llama", lora=True)
    requests, weights = scored(rows, seed=3)
    found = subject.packed(requests, weights, (range(len(rows)), Layout.mixed(decisions)))
    assert_same(found, subject.alone(requests, weights))


def test_a_request_without_gradient_gets_the_same_log_probs() -> None:
    """``no_grad`` changes no number, builds no graph and leaves ``.grad`` alone."""
    subject = pair("qwen3", lora=True)
    requests, weights = scored(TREES["deep"])
    silent = [Request(tokens=request.tokens, labels=request.labels, no_grad=True) for request in requests]
    subject.clear()
    work = pass_work(silent, range(4), Layout.full_sharing())
    result = run_forward(subject.runtime, work, head_chunk_rows=5, map_error=lambda error: error)
    assert not any(found.requires_grad for found in result.logprobs)
    assert all(parameter.grad is None for parameter in subject.runtime.trainable_parameters())
    wanted = subject.alone(requests, weights)
    for found, expected in zip(result.logprobs, wanted.logprobs, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_head_chunks_change_no_number() -> None:
    """One row at a time or all at once: same log-probs and gradients."""
    subject, numbers = pair("llama", lora=False), []
    requests, weights = scored(TREES["deep"])
    for chunk in (1, 3, 1000):
        subject.clear()
        work = pass_work(requests, range(4), Layout.full_sharing())
        result = run_forward(subject.runtime, work, head_chunk_rows=chunk, map_error=lambda error: error)
        torch.stack([(w * found).sum() for w, found in zip(weights, result.logprobs, strict=True)]).sum().backward()
        numbers.append(Numbers([found.detach() for found in result.logprobs], subject.grads()))
    assert len(numbers) == 3
    for found in numbers[1:]:
        assert_same(found, numbers[0])


@pytest.mark.parametrize("rows_per_pass", [None, 40])
def test_a_rank_that_splits_gives_the_same_gradient(rows_per_pass: int | None) -> None:
    """Through ``forward_micro_batches``, in one pass or several: log-probs in the caller's order, the same gradient."""
    subject = pair("qwen3", lora=True)
    requests, weights = scored(TREES["flat"] + TREES["unshared"])
    wanted = subject.alone(requests, weights)
    rank = TrainerRank(
        subject.runtime, meter=SimulatedMeter("8GiB"), max_packed_tokens=rows_per_pass, verify_backend=False
    )
    rank.zero_grad()
    found: dict[int, Tensor] = {}
    passes = 0
    for batch in rank.forward_micro_batches([requests[:3], {"rest": requests[3:]}]):
        losses = [(w * result.logprobs).sum() for w, result in zip(batch.select(weights), batch.results, strict=True)]
        torch.stack(losses).sum().backward()
        found.update(zip(batch.indices, (result.logprobs.detach() for result in batch.results), strict=True))
        passes += 1
    assert (passes == 1) == (rows_per_pass is None)
    restored = restore([requests[:3], {"rest": requests[3:]}], found)
    assert_same(Numbers([*restored[0], *restored[1]["rest"]], subject.grads()), wanted)
