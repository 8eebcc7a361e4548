"""Figures of a data set, each against a count by hand."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from trainer_rank.training.data_summary import summarise
from trainer_rank.training.rollouts import Rollout


def rollouts(*rows: list[int], **fields: list[Any]) -> list[Rollout]:
    """Return one rollout per row, on lines 1, 2, ...; every token is trained unless fields say otherwise."""
    made = []
    for index, row in enumerate(rows):
        given = {name: values[index] for name, values in fields.items()}
        trained = given.pop("trained", [1] * len(row))
        made.append(
            Rollout(
                tokens=np.asarray(row, dtype=np.int64),
                trained=np.asarray(trained, dtype=np.bool_),
                **{"group": None, "weight": 1.0, "advantage": None, "old_logprobs": None, "line": index + 1, **given},
            )
        )
    return made


def naive_rows(rows: list[list[int]]) -> int:
    """Return the packed rows of full sharing: the distinct prefixes."""
    return len({tuple(row[: stop + 1]) for row in rows for stop in range(len(row))})


def test_sizes_and_sharing() -> None:
    """Against prefixes counted one by one, over the whole set and within groups."""
    generator = random.Random(0)
    rows = [[generator.randrange(3) for _ in range(generator.randrange(1, 30))] for _ in range(60)]
    groups = [generator.choice(["a", "b", "c"]) for _ in rows]
    found = summarise(rollouts(*rows, group=groups))
    assert found.logical_tokens == sum(map(len, rows))
    assert found.packed_rows == naive_rows(rows)
    by_group = [[row for row, name in zip(rows, groups, strict=True) if name == wanted] for wanted in set(groups)]
    assert found.packed_rows_by_group == sum(map(naive_rows, by_group))
    assert (found.requests, found.groups) == (60, 3)
    assert found.sharing_ratio == found.logical_tokens / found.packed_rows
    assert found.sharing_ratio_by_group < found.sharing_ratio
    assert sum(one.requests for one in found.lengths) == 60
    assert sum(one.tokens for one in found.lengths) == found.logical_tokens
    assert all(before.stop == after.start for before, after in zip(found.lengths, found.lengths[1:], strict=False))


def test_percentiles_are_lengths_that_occur() -> None:
    """Of 200 lengths, 198 are at most the 99th percentile."""
    found = summarise(rollouts(*([7] * length for length in range(1, 201))))
    assert (found.min_length, found.median_length, found.p99_length, found.max_length) == (1, 100, 198, 200)
    assert len(found.lengths) <= 13


def test_duplicates_name_the_first_line() -> None:
    """Equal tokens, wherever they stand in the file; a prefix is no duplicate."""
    found = summarise(rollouts([1, 2], [1, 2, 3], [1, 2], [4], [1, 2]))
    assert found.duplicates == ((3, 1), (5, 1))


def test_lines_that_train_nothing() -> None:
    """No token marked, only token 0 marked, or the weight 0."""
    found = summarise(
        rollouts([1, 2], [1, 3], [1, 4], [1, 5], trained=[[0, 1], [0, 0], [1, 0], [0, 1]], weight=[1.0, 1.0, 1.0, 0.0])
    )
    assert found.trains_nothing == (2, 3, 4)
    assert found.trained_tokens == 2


def test_near_prefixes_are_found_and_counted() -> None:
    """The worst first, with the tokens around the place; the rest is a number."""
    head, tail = list(range(100, 130)), list(range(200, 240))
    found = summarise(rollouts([*head, 1, *tail], [*head, 2, 2, *tail]))
    (one,) = found.near_prefixes
    assert (one.position, one.lost_rows, {one.line_a, one.line_b}) == (30, 40, {1, 2})
    assert one.before == tuple(head[-16:])
    assert {one.after_a[0], one.after_b[0]} == {1, 2}
    none = summarise(rollouts([*head, 1, *tail], [*head, 2, *tail]), most_near_prefixes=0)
    assert (none.near_prefixes, none.num_near_prefixes) == ((), 1)


def test_a_summary_is_of_something() -> None:
    """Our own fault, if ever."""
    with pytest.raises(ValueError, match="at least one request"):
        summarise([])
