"""What comes back is what was asked for: every leaf once, in its place, whatever the order and the split."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.builders import completion, completions, logprobs, tokens
from tests.unit.session.conftest import NewRank
from trainer_rank import AtomicGroup, Request, restore
from trainer_rank.errors import RequestError
from trainer_rank.meters import Meter
from trainer_rank.requests import flatten
from trainer_rank.session import TrainerRank


class Pair(NamedTuple):
    """A named tuple of two requests."""

    chosen: Any
    rejected: Any


def collect(rank: TrainerRank, nest: Any) -> tuple[dict[int, Any], list[tuple[int, ...]]]:
    """Return results by flat index and the indices of each micro-batch; a leaf that comes twice fails."""
    found: dict[int, Any] = {}
    parts = []
    for micro_batch in rank.forward_micro_batches(nest):
        assert not found.keys() & set(micro_batch.indices)
        assert list(flatten(micro_batch.inputs).leaves) == list(micro_batch.requests)
        found.update(zip(micro_batch.indices, micro_batch.results, strict=True))
        parts.append(micro_batch.indices)
    return found, parts


def checksums(rank: TrainerRank, nest: Any) -> list[float]:
    """Return the summed log-prob of every leaf in the caller's order."""
    found, _ = collect(rank, nest)
    return [float(logprobs(found[index]).sum()) for index in range(len(flatten(nest).leaves))]


@pytest.fixture(scope="module")
def capped(meter: Meter, shared_rank: TrainerRank) -> TrainerRank:
    """A rank on the shared model whose passes hold at most 16 packed rows."""
    return TrainerRank(shared_rank.runtime, meter=meter, verify_backend=False, max_packed_tokens=16)


LEAVES = completions([1, 4, 4, 3, 2, 5], prompt=3)

nests = st.recursive(
    st.sampled_from(LEAVES),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        st.builds(Pair, inner, inner),
        st.builds(AtomicGroup, st.lists(st.sampled_from(LEAVES[:3]), min_size=1, max_size=2)),
    ),
    max_leaves=5,
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(nests)
def test_every_leaf_comes_exactly_once_in_any_nest(capped: TrainerRank, nest: Any) -> None:
    """Indices over all micro-batches are 0 .. n-1, and restoring puts each leaf's own result in its place."""
    found, _ = collect(capped, nest)
    leaves = flatten(nest).leaves
    assert sorted(found) == list(range(len(leaves)))
    assert all(found[index].logprobs.shape == (leaf.num_tokens,) for index, leaf in enumerate(leaves))
    back = restore(nest, dict(enumerate(leaves)))
    assert flatten(back).leaves == leaves
    assert type(back) is type(nest)


@pytest.mark.parametrize("seed", range(3))
def test_results_follow_the_caller_s_order_whatever_the_order_of_arrival(
    capped: TrainerRank, rank: TrainerRank, seed: int
) -> None:
    """Each request's checksum is the one it has alone, however the batch was shuffled and split."""
    batch = [*completions([1, 4, 4, 3, 2, 5], prompt=3), *completions([5, 1, 3], prompt=2, seed=40), LEAVES[1]]
    alone = [checksums(rank, [request])[0] for request in batch]
    order = np.random.default_rng(seed).permutation(len(batch)).tolist()
    assert checksums(capped, [batch[index] for index in order]) == pytest.approx(
        [alone[index] for index in order], rel=1e-9
    )


@pytest.mark.parametrize("order", ["sorted", "reversed", "interleaved"])
def test_adversarial_orders_of_arrival_change_nothing(capped: TrainerRank, rank: TrainerRank, order: str) -> None:
    """Lengths that rise, fall or alternate, where sorting and forgetting to sort back would show."""
    batch = sorted(completions([1, 2, 3, 4, 5, 6], prompt=3), key=lambda request: request.num_tokens)
    if order == "reversed":
        batch.reverse()
    elif order == "interleaved":
        batch = [*batch[::2], *batch[1::2]]
    assert checksums(capped, batch) == pytest.approx([checksums(rank, [one])[0] for one in batch], rel=1e-9)


def test_exact_duplicates_each_get_their_own_result(rank: TrainerRank) -> None:
    """The same request three times comes back three times, equal."""
    assert len(set(checksums(rank, [LEAVES[1]] * 3))) == 1


def test_a_nest_that_is_cut_keeps_its_structure(capped: TrainerRank) -> None:
    """Each micro-batch has the caller's containers around the leaves it holds, inputs and outputs alike."""
    nest = {"a": [LEAVES[5], (LEAVES[4],)], "b": [LEAVES[1], LEAVES[2]], "c": []}
    seen: dict[str, int] = {"a": 0, "b": 0}
    parts = list(capped.forward_micro_batches(nest))
    assert len(parts) > 1
    for micro_batch in parts:
        assert set(micro_batch.inputs) <= {"a", "b", "c"}
        assert micro_batch.inputs.keys() == micro_batch.outputs.keys()
        for key in seen.keys() & micro_batch.inputs.keys():
            assert isinstance(micro_batch.inputs[key], list)
            leaves = flatten(micro_batch.inputs[key]).leaves
            seen[key] += len(leaves)
            outputs = micro_batch.outputs[key]
            flat = [part for one in outputs for part in (one if isinstance(one, tuple) else [one])]
            assert [one.logprobs.numel() for one in flat] == [leaf.num_tokens for leaf in leaves]
    assert seen == {"a": 2, "b": 2}


def test_an_atomic_group_is_never_cut(new_rank: NewRank) -> None:
    """Preference pairs whose halves share nothing stay together although each half would go better elsewhere."""
    batch = [
        AtomicGroup([completion(tokens(seed, 3), tokens(seed + 50, 2)), completion(tokens(seed + 9, 3), [1, 2])])
        for seed in range(5)
    ]
    _, parts = collect(new_rank(max_packed_tokens=22), batch)
    assert len(parts) > 1
    home = {index: number for number, part in enumerate(parts) for index in part}
    assert all(home[2 * pair] == home[2 * pair + 1] for pair in range(5))


def test_a_named_tuple_that_stays_whole_stays_named(rank: TrainerRank) -> None:
    """Fields are reached by name in the outputs."""
    (micro_batch,) = rank.forward_micro_batches([Pair(LEAVES[1], LEAVES[2])])
    assert micro_batch.outputs[0].chosen.logprobs.shape == (LEAVES[1].num_tokens,)


def test_a_lone_request_is_a_nest(rank: TrainerRank) -> None:
    """No list is needed around one request, and its output stands where it stood."""
    (micro_batch,) = rank.forward_micro_batches(LEAVES[1])
    assert micro_batch.outputs.logprobs.shape == (LEAVES[1].num_tokens,)


@pytest.mark.parametrize("nothing", [[], {}, (), [[], {"a": []}]])
def test_nothing_runs_nothing(rank: TrainerRank, nothing: Any) -> None:
    """An empty nest is fine: no micro-batch, no warning, no error."""
    assert list(rank.forward_micro_batches(nothing)) == []


def test_something_else_in_the_nest_is_an_error_that_says_where(rank: TrainerRank) -> None:
    """The path leads to it."""
    with pytest.raises(RequestError, match=r"requests\[1\]\['a'\] .* got int"):
        rank.forward_micro_batches([LEAVES[0], {"a": 3}])


def test_inactive_requests_come_back_without_a_result_and_cost_nothing(rank: TrainerRank) -> None:
    """They ride along: no rows, no bytes, ``logprobs`` None, and the active ones are as without them."""
    idle = Request(tokens=tokens(7, 500))
    (plain,) = rank.forward_micro_batches([LEAVES[1], LEAVES[2]])
    (mixed,) = rank.forward_micro_batches([idle, LEAVES[1], [idle], LEAVES[2]])
    assert [result.logprobs is None for result in mixed.results] == [True, False, True, False]
    assert mixed.indices == (0, 1, 2, 3)
    assert mixed.stats.packed_rows == plain.stats.packed_rows
    assert mixed.stats.required_bytes == plain.stats.required_bytes
    assert torch.equal(logprobs(mixed.results[1]), logprobs(plain.results[0]))


def test_a_batch_of_inactive_requests_runs_nothing(rank: TrainerRank) -> None:
    """They come back in one micro-batch that took no pass and no memory."""
    (micro_batch,) = rank.forward_micro_batches([Request(tokens=[1, 2]), Request(tokens=[3])])
    assert (micro_batch.stats.passes, micro_batch.stats.required_bytes) == (0, 0)
    assert all(result.logprobs is None for result in micro_batch.results)
