"""Which requests can be the hardest of a data set when each runs alone: few of them need a price."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from trainer_rank.memory import PassFeatures, reaches
from trainer_rank.planner import PassWork, pass_work
from trainer_rank.requests import Flat, Request
from trainer_rank.session.units import Unit


def hardest_units(
    flat: Flat, units: Sequence[Unit], features: Callable[[PassWork], PassFeatures] | None
) -> Iterator[int]:
    """Yield the numbers of the units that no other single request with as many labels per position reaches in every
    feature its price grows with.

    Atomic groups are all yielded: which of its layouts a group takes is known only against a budget. So are requests
    with outputs beside log-probs, which the features do not count.

    Args:
        flat: All requests.
        units: Those of one group, which may share a pass.
        features: Of a pass, for prices that grow with every one of them; None yields all that differ in shape.
    """
    alike: dict[tuple[object, ...], int] = {}
    for number, unit in enumerate(units):
        request = flat.leaves[unit.indices[0]]
        if len(unit.indices) > 1 or request.wants_dense:
            yield number
        elif request.num_trained:
            alike.setdefault(_shape(request), number)
    if features is None:
        yield from alike.values()
        return
    alone = []
    for number in alike.values():
        (index,) = units[number].indices
        alone.append((features(pass_work([flat.leaves[index]], [index])), number))
    # What is learned of one mix of outputs is not in the price of another.
    kept: dict[tuple[int, ...], list[PassFeatures]] = {}
    # A pass that reaches another has at least its sum of counts, so it comes first.
    for found, number in sorted(alone, key=lambda pair: (-sum(pair[0].totals), pair[1])):
        labels = flat.leaves[units[number].indices[0]].labels
        assert labels is not None, "an inactive request computes nothing"
        alike_in_outputs = kept.setdefault(labels.shape[1:], [])
        if not any(reaches(other, found) for other in alike_in_outputs):
            alike_in_outputs.append(found)
            yield number


def _shape(request: Request) -> tuple[object, ...]:
    """Return what the features of a request alone depend on."""
    labels = request.labels
    assert labels is not None, "an inactive request computes nothing"
    # With one label per position it does not matter which positions are scored.
    where = request.num_trained if labels.ndim == 1 else (labels >= 0).tobytes()
    return request.num_tokens, labels.shape, where
