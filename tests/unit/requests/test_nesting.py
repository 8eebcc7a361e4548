"""Nests: flattened in reading order, restored, cut."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_rank.errors import RequestError
from trainer_rank.requests import AtomicGroup, Request, cut, flatten, restore


class Pair(NamedTuple):
    """A named tuple of nests."""

    chosen: Any
    rejected: Any


def request() -> Request:
    """Return a request of its own identity."""
    return Request(tokens=[1])


def nests() -> st.SearchStrategy[Any]:
    """Nests of every container, empty ones included."""
    leaf = st.builds(request)
    return st.recursive(
        leaf,
        lambda child: st.one_of(
            st.lists(child, max_size=3),
            st.lists(child, max_size=3).map(tuple),
            st.lists(child, max_size=3).map(AtomicGroup),
            st.dictionaries(st.sampled_from("abc"), child, max_size=3),
            st.builds(Pair, child, child),
        ),
        max_leaves=8,
    )


def reading_order(nest: Any) -> list[Request]:
    """The naive twin of ``flatten(nest).leaves``."""
    if isinstance(nest, Request):
        return [nest]
    children = nest.values() if isinstance(nest, dict) else nest
    return [leaf for child in children for leaf in reading_order(child)]


def same(a: Any, b: Any) -> bool:
    """Whether two nests have equal containers and identical leaves."""
    if isinstance(a, Request) or isinstance(b, Request):
        return a is b
    if type(a) is not type(b) or len(a) != len(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return all(same(x, y) for x, y in zip(a, b, strict=True))


def pruned(nest: Any, kept: set[int]) -> Any:
    """The naive twin of ``cut``: leaves by identity, containers that lose every leaf gone, None when all is gone."""
    if isinstance(nest, Request):
        return nest if id(nest) in kept else None
    pairs = list(nest.items() if isinstance(nest, dict) else enumerate(nest))
    left = [(key, pruned(child, kept)) for key, child in pairs]
    left = [(key, child) for key, child in left if child is not None]
    if pairs and not left:
        return None
    if isinstance(nest, dict):
        return dict(left)
    values = [child for _, child in left]
    if isinstance(nest, Pair):
        return Pair(*values) if len(values) == 2 else tuple(values)
    return type(nest)(values)


@given(nest=nests())
def test_leaves_come_in_reading_order(nest: Any) -> None:
    """Every leaf once, as the nest is read."""
    found, wanted = flatten(nest).leaves, reading_order(nest)
    assert len(found) == len(wanted)
    assert all(a is b for a, b in zip(found, wanted, strict=True))


@given(nest=nests())
def test_restore_undoes_flatten(nest: Any) -> None:
    """Putting the leaves back gives the caller's nest, container types and keys included."""
    assert same(restore(nest, dict(enumerate(flatten(nest).leaves))), nest)


@given(nest=nests(), data=st.data())
def test_cut_keeps_the_structure_of_what_is_kept(nest: Any, data: st.DataObject) -> None:
    """Missing leaves go, emptied containers go with them, everything else keeps its place and type."""
    leaves = flatten(nest).leaves
    kept = data.draw(st.sets(st.integers(0, max(len(leaves) - 1, 0)), max_size=len(leaves)))
    found = cut(nest, {index: leaves[index] for index in kept if index < len(leaves)})
    wanted = pruned(nest, {id(leaves[index]) for index in kept if index < len(leaves)})
    if wanted is None:
        assert not reading_order(found)
        assert isinstance(found, list) == isinstance(nest, Request | list)
    else:
        assert same(found, wanted)


@given(nest=nests(), data=st.data())
def test_cuts_over_a_partition_give_every_leaf_once(nest: Any, data: st.DataObject) -> None:
    """Over all micro-batches of a call each leaf appears exactly once."""
    leaves = flatten(nest).leaves
    owner = data.draw(st.lists(st.integers(0, 2), min_size=len(leaves), max_size=len(leaves)))
    seen: list[Request] = []
    for part in range(3):
        values = {index: leaf for index, leaf in enumerate(leaves) if owner[index] == part}
        seen += reading_order(cut(nest, values))
    assert sorted(map(id, seen)) == sorted(map(id, leaves))


@given(nest=nests())
def test_groups_partition_the_leaves(nest: Any) -> None:
    """Each flat index is in one group; groups are runs in reading order."""
    flat = flatten(nest)
    assert [index for group in flat.groups for index in group] == list(range(len(flat.leaves)))


def test_an_atomic_group_is_one_group_whatever_is_inside() -> None:
    """Containers and groups inside it do not break it up; leaves beside it are groups of one."""
    group = AtomicGroup([request(), [request(), AtomicGroup([request()])], {"a": request()}])
    assert flatten([request(), group, request()]).groups == ((0,), (1, 2, 3, 4), (5,))


def test_an_atomic_group_survives_as_itself() -> None:
    """Restored and cut groups are still atomic."""
    nest = [AtomicGroup([request(), request()]), request()]
    assert isinstance(restore(nest, {0: "a", 1: "b", 2: "c"})[0], AtomicGroup)
    assert cut(nest, {0: "a", 1: "b"}) == [AtomicGroup(["a", "b"])]


def test_a_named_tuple_that_loses_a_field_becomes_a_tuple() -> None:
    """Its fields could no longer be told apart."""
    nest = Pair(request(), request())
    assert cut(nest, {1: "b"}) == ("b",)
    assert type(cut(nest, {1: "b"})) is tuple
    assert cut(nest, {0: "a", 1: "b"}) == Pair("a", "b")
    assert type(cut(nest, {0: "a", 1: "b"})) is Pair


def test_a_lone_request_is_a_nest() -> None:
    """It flattens to itself and restores to its value."""
    lone = request()
    assert flatten(lone).leaves == (lone,)
    assert restore(lone, {0: "value"}) == "value"


def test_a_generator_is_read_once() -> None:
    """It is kept as the list it gave, so that results can be restored."""
    flat = flatten(request() for _ in range(3))
    assert len(flat.leaves) == 3
    assert restore(flat.nest, {0: "a", 1: "b", 2: "c"}) == ["a", "b", "c"]


@pytest.mark.parametrize("empty", [[], (), {}, AtomicGroup([]), [[], {}]])
def test_an_empty_nest_has_no_leaves(empty: Any) -> None:
    """Nothing to run is no error, and an empty nest restores to itself."""
    assert flatten(empty).leaves == ()
    assert flatten(empty).groups == ()
    assert restore(empty, {}) == empty


@pytest.mark.parametrize(
    ("nest", "where"),
    [
        ([{"a": [3]}], r"requests\[0\]\['a'\]\[0\] must be a Request .* got int"),
        (None, "requests must be a Request .* got NoneType"),
        ([request(), "text"], r"requests\[1\] must be a Request .* got str"),
    ],
)
def test_a_stranger_in_the_nest_is_named_with_its_place(nest: Any, where: str) -> None:
    """The message says where it is and what it is."""
    with pytest.raises(RequestError, match=where) as caught:
        flatten(nest)
    assert caught.value.field == "requests"


def test_a_missing_result_is_an_error() -> None:
    """``restore`` wants every leaf."""
    with pytest.raises(KeyError):
        restore([request(), request()], {0: "a"})
