"""Preference pairs: the loss against a twin, weights that do not depend on the split, and whole pairs in the data."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.training.loss_batches import FakeBatch, batch, gradient, leaf, partitions, request
from trainer_rank.errors import DataError, RequestError
from trainer_rank.requests import AtomicGroup, Request, flatten, normaliser
from trainer_rank.training.config import LossSection
from trainer_rank.training.losses import Preference, dpo, keep_pairs, objective_for, preference
from trainer_rank.training.losses.pairs import check_pairs
from trainer_rank.training.rollouts import Limits, read_rollouts

BETA = 0.3


def member(mask: list[int], ref: list[float], *, chosen: bool, pair: str = "p", weight: float = 1.0) -> Request:
    """Return one member of a pair."""
    return request(mask, Preference(pair=pair, chosen=chosen, ref_logprobs=np.asarray(ref, dtype=np.float32)), weight)


def pair_of(pair: str, weight: float = 1.0) -> list[Request]:
    """Return a pair of different lengths."""
    return [
        member([1, 1, 0], [-0.5, -0.25, 0.0], chosen=True, pair=pair, weight=weight),
        member([1, 1, 1], [-1.0, -0.5, -0.75], chosen=False, pair=pair, weight=weight),
    ]


def naive(weight: float, chosen: float, rejected: float) -> float:
    """Return a pair's loss, as the paper writes it; both differences are of summed log-probs."""
    return -weight * math.log(1 / (1 + math.exp(-BETA * (chosen - rejected))))


def whole(requests: list[Request], values: list[list[float]], kind: str) -> tuple[FakeBatch, list[Any]]:
    """Return one micro-batch of all requests, and its leaves."""
    rows = [leaf(one) for one in values]
    return batch(requests, rows, normaliser(requests, kind).coefficients), rows


def test_a_single_pair_is_the_formula() -> None:
    """Value and gradient: -+ beta times sigmoid(-margin) for every trained token of the two."""
    micro_batch, (chosen, rejected) = whole(pair_of("p"), [[-0.5, -1.0, 0.0], [-1.0, -1.5, -0.25]], "sequence-mean")
    loss = dpo(micro_batch, beta=BETA)
    loss.backward()
    gains = (-1.5 + 0.75, -2.75 + 2.25)
    assert loss.item() == pytest.approx(naive(1.0, *gains))
    slope = BETA / (1 + math.exp(BETA * (gains[0] - gains[1])))
    assert gradient(chosen) == pytest.approx([-slope] * 3)
    assert gradient(rejected) == pytest.approx([slope] * 3)


@pytest.mark.parametrize(("kind", "total"), [("sequence-mean", 3.5), ("sum", 1.0)])
def test_a_pair_counts_as_one(kind: str, total: float) -> None:
    """Mean over pairs by weight, or their sum, whatever the lengths of the members."""
    requests = [*pair_of("p", 0.5), *pair_of("q", 3.0)]
    values = [[-0.5, -1.0, 0.0], [-1.0, -1.5, -0.25], [-0.25, -0.25, 0.0], [-2.0, -2.0, -2.0]]
    micro_batch, _ = whole(requests, values, kind)
    gains = [sum(one) + reference for one, reference in zip(values, (0.75, 2.25) * 2, strict=True)]
    wanted = naive(0.5, *gains[:2]) + naive(3.0, *gains[2:])
    assert dpo(micro_batch, beta=BETA, normalisation=kind).item() == pytest.approx(wanted / total)


@pytest.mark.parametrize("kind", ["sequence-mean", "sum"])
def test_loss_gradient_and_figures_do_not_depend_on_the_split(kind: str) -> None:
    """All five partitions of three pairs."""
    objective = objective_for(LossSection.model_validate({"name": "dpo", "normalisation": kind}))
    requests = [*pair_of("p", 0.5), *pair_of("q", 3.0), *pair_of("r")]
    draw = np.random.default_rng(0)
    values = [(-draw.random(3) * (one.labels != -100)).tolist() for one in requests]
    coefficients = normaliser(requests, kind).coefficients
    seen = []
    for partition in partitions((0, 1, 2)):
        rows, total, sums = [leaf(one) for one in values], 0.0, None
        for part in partition:
            members = list(itertools.chain.from_iterable((2 * pair, 2 * pair + 1) for pair in part))
            # Whatever order the members come in.
            members.reverse()
            micro_batch = batch(*([of[i] for i in members] for of in (requests, rows, coefficients)))
            loss = objective.loss(micro_batch)
            loss.backward()
            total += loss.item()
            sums = objective.metrics(micro_batch) if sums is None else sums + objective.metrics(micro_batch)
        assert sums is not None
        seen.append([total, *(number for row in rows for number in gradient(row)), *sums.means().values()])
    assert len(seen) == 5
    for other in seen[1:]:
        assert other == pytest.approx(seen[0], abs=1e-12)


def test_the_figures_of_a_pair() -> None:
    """Implicit rewards, their difference, and whether it has the right sign."""
    objective = objective_for(LossSection.model_validate({"name": "dpo", "beta": BETA}))
    micro_batch, _ = whole(pair_of("p"), [[-0.5, -1.0, 0.0], [-1.0, -1.5, -0.25]], "sequence-mean")
    means = objective.metrics(micro_batch).means()
    assert means == pytest.approx(
        {"accuracy": 0.0, "margin": BETA * -0.25, "chosen_reward": BETA * -0.75, "rejected_reward": BETA * -0.5}
    )


def test_a_pair_in_which_nothing_is_trained_gives_exactly_zero() -> None:
    """Loss and gradient 0, and the other pair's mean is over itself alone."""
    masked = [member([0, 0], [0.0, 0.0], chosen=chosen, pair="q") for chosen in (True, False)]
    micro_batch, rows = whole([*pair_of("p"), *masked], [[-1.0, -1.0, 0.0], [-1.0] * 3, [0.0] * 2, [0.0] * 2],
                              "sequence-mean")  # fmt: skip
    loss = dpo(micro_batch, beta=BETA)
    loss.backward()
    assert loss.item() == pytest.approx(naive(1.0, -2 + 0.75, -3 + 2.25))
    assert gradient(rows[2]) == gradient(rows[3]) == [0.0, 0.0]


def test_a_huge_margin_leaves_numbers() -> None:
    """The logarithm of a sigmoid is taken at once, so nothing underflows to log 0."""
    micro_batch, rows = whole(pair_of("p"), [[-1e5, 0.0, 0.0], [0.0] * 3], "sequence-mean")
    loss = dpo(micro_batch, beta=1.0)
    loss.backward()
    assert loss.item() == pytest.approx(1e5, rel=1e-4)
    assert gradient(rows[0]) == pytest.approx([-1.0] * 3)


def test_what_is_no_pair_is_refused() -> None:
    """A cut pair, a wrong payload, a missing reference, a member without trained tokens, a normalisation of tokens."""
    chosen, rejected = pair_of("p")
    row = [-1.0, -1.0, 0.0]
    with pytest.raises(RequestError, match=r"pair 'p': must have as many chosen as rejected .* got 1 and 0; put"):
        dpo(batch([chosen], [leaf(row)], [1.0]))
    with pytest.raises(TypeError, match="dpo needs a Preference as the request's payload, got NoneType"):
        dpo(batch([request([1])], [leaf([-1.0])], [1.0]))
    without = request([1], Preference(pair="p", chosen=True))
    with pytest.raises(TypeError, match=r"dpo needs ref_logprobs in the payload, got None; .* adapter-off"):
        dpo(batch([without], [leaf([-1.0])], [1.0]))
    masked = member([0, 0, 0], [0.0] * 3, chosen=False)
    with pytest.raises(RequestError, match="both members must have trained tokens, got 2 in the chosen and 0"):
        dpo(batch([chosen, masked], [leaf(row), leaf([0.0] * 3)], [1.0, 0.0]))
    with pytest.raises(ValueError, match="sequence-mean or sum for dpo, got 'token-mean'"):
        dpo(batch([chosen, rejected], [leaf(row), leaf(row)], [1.0, 1.0]), normalisation="token-mean")


def test_pairs_become_atomic_groups() -> None:
    """Scattered members come together; a pair that is drawn twice is paired copy by copy."""
    first, second = pair_of("p"), pair_of("q")
    nest = keep_pairs([first[1], second[0], first[0], second[1], *first])
    assert [type(one) for one in nest] == [AtomicGroup] * 3
    assert [[leaf.payload.pair for leaf in one] for one in nest] == [["q"] * 2, ["p"] * 2, ["p"] * 2]
    assert [[leaf.payload.chosen for leaf in one] for one in nest] == [[True, False]] * 3
    assert len(flatten(nest).leaves) == 6
    with pytest.raises(RequestError, match=r"pair 'p'.* got 1 and 0"):
        keep_pairs([first[0]])


def lines(tmp_path: Path, *changes: dict[str, Any]) -> Path:
    """Write lines of preference data: each change to a member with two tokens."""
    path = tmp_path / "pairs.jsonl"
    common = {"tokens": [1, 2], "trained": [0, 1], "ref_logprobs": [None, -1.0]}
    path.write_text("".join(json.dumps({**common, **change}) + "\n" for change in changes), encoding="utf-8")
    return path


def test_pairs_are_read_and_share_a_step(tmp_path: Path) -> None:
    """By the group, by a pair within it, or by a pair alone, which then is the group."""
    path = lines(
        tmp_path,
        {"group": "a", "chosen": True}, {"group": "a", "chosen": False},
        {"group": "b", "pair": "1", "chosen": True}, {"group": "b", "pair": "2", "chosen": False},
        {"group": "b", "pair": "1", "chosen": False}, {"group": "b", "pair": "2", "chosen": True},
        {"pair": "c", "chosen": True}, {"pair": "c", "chosen": False},
    )  # fmt: skip
    rollouts = read_rollouts(path, Limits(loss="dpo"))
    check_pairs(rollouts, path)
    assert [one.group for one in rollouts] == ["a", "a", "b", "b", "b", "b", "c", "c"]
    payload = preference(rollouts[2])
    assert payload is not None
    assert payload.ref_logprobs is not None
    assert (payload.pair, payload.chosen, payload.ref_logprobs.tolist()) == (("b", "1"), True, [-1.0, 0.0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([{"chosen": True}], "1: pair: is required by the loss 'dpo'"),
        (
            [{"pair": "p", "chosen": True}],
            "1: pair 'p' must have one chosen and one rejected member, got 1 chosen and 0",
        ),
        ([{"pair": "p", "chosen": True}] * 2, "got 2 chosen and 0 rejected in lines 1, 2"),
        (
            [{"group": "g", "chosen": one} for one in (True, False, False)],
            "got 1 chosen and 2 rejected in lines 1, 2, 3; several pairs of one group need a field pair each",
        ),
        (
            [{"pair": "p", "chosen": True}, {"pair": "p", "chosen": False, "weight": 2}],
            "weight: must be the same for both members of pair 'p', got 1.0 and 2.0 in lines 1, 2",
        ),
        (
            [{"pair": "p", "chosen": True}, {"pair": "p", "chosen": False, "trained": [1, 0]}],
            "2: trained: must have a 1 in both members of pair 'p' or in none",
        ),
    ],
)
def test_pairs_that_are_not_whole_are_refused(tmp_path: Path, changes: list[dict[str, Any]], message: str) -> None:
    """Each fault names the pair and its lines."""
    path = lines(tmp_path, *changes)
    with pytest.raises(DataError) as caught:
        check_pairs(read_rollouts(path, Limits(loss="dpo")), path)
    assert message in str(caught.value)
