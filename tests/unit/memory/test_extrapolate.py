"""Two shallow timelines tell the timeline of any depth of the same layers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_rank.memory import Event, Mark, Timeline, Trace, extrapolate_layers, fold


def stack(num_layers: int, *, kept: int, work: int, grad: int, head: int) -> Timeline:
    """Return the timeline of a stack that keeps ``kept`` bytes per layer and makes ``grad`` bytes per layer back."""
    steps: list[Mark | Event] = []
    for layer in range(num_layers):
        steps += [Mark("forward", layer), Event(work), Event(kept), Event(-work)]
    steps += [Mark("head"), Event(head), Event(-head), Mark("backward")]
    for layer in reversed(range(num_layers)):
        steps += [Mark("backward", layer), Event(2 * work), Event(grad), Event(-2 * work), Event(-kept)]
    return fold(Trace(steps=(*steps, Mark("end")), num_layers=num_layers))


sizes = st.integers(0, 1000)


@given(st.integers(3, 40), sizes, sizes, sizes, sizes)
def test_the_peak_of_any_depth_is_exact(num_layers: int, kept: int, work: int, grad: int, head: int) -> None:
    """Whichever phase and end wins at depth, bytes and phase are those of the deep stack itself."""
    costs = {"kept": kept, "work": work, "grad": grad, "head": head}
    found = extrapolate_layers(stack(2, **costs), stack(3, **costs), num_layers)
    wanted = stack(num_layers, **costs)
    assert found.peak.peak_bytes == wanted.peak.peak_bytes
    assert found.end_of("head") == wanted.end_of("head") == kept * num_layers
    assert found.instants[-1].end_bytes == wanted.instants[-1].end_bytes == grad * num_layers


def test_layers_are_numbered_at_the_full_depth() -> None:
    """The last layer of the answer is the last layer of the deep model, not of the shallow one."""
    costs = {"kept": 10, "work": 5, "grad": 1, "head": 0}
    found = extrapolate_layers(stack(2, **costs), stack(3, **costs), 30)
    assert {instant.mark.layer for instant in found.instants} == {None, 0, 29}
    assert found.num_layers == 30
    assert (found.peak.mark, found.peak.peak_bytes) == (Mark("backward", 29), 30 * 10 + 2 * 5 + 1)


def test_which_end_wins_may_change_with_depth() -> None:
    """Gradients that outgrow what is kept move the peak from the last layer to the first."""
    costs = {"kept": 1, "work": 50, "grad": 9, "head": 0}
    found = extrapolate_layers(stack(2, **costs), stack(3, **costs), 30)
    assert found.peak.mark == Mark("backward", 0)


def test_the_deeper_timeline_is_its_own_extrapolation() -> None:
    """Nothing is added when the depth wanted is the depth given."""
    costs = {"kept": 3, "work": 4, "grad": 5, "head": 6}
    found = extrapolate_layers(stack(2, **costs), stack(3, **costs), 3)
    assert found.peak.peak_bytes == stack(3, **costs).peak.peak_bytes


@pytest.mark.parametrize(("shallow", "deeper", "wanted"), [(1, 2, 4), (2, 2, 4), (3, 2, 4), (2, 4, 3)])
def test_depths_out_of_order_are_refused(shallow: int, deeper: int, wanted: int) -> None:
    """The message gives the three depths."""
    costs = {"kept": 1, "work": 1, "grad": 1, "head": 1}
    with pytest.raises(ValueError, match=f"{shallow}, {deeper}, {wanted}"):
        extrapolate_layers(stack(shallow, **costs), stack(deeper, **costs), wanted)


def test_depths_that_ran_different_phases_are_refused() -> None:
    """A phase in one timeline only cannot be carried anywhere; the message names it."""
    costs = {"kept": 1, "work": 1, "grad": 1, "head": 1}
    odd = fold(Trace(steps=(Mark("warm-up"), Event(1)), num_layers=3))
    with pytest.raises(ValueError, match="warm-up"):
        extrapolate_layers(stack(2, **costs), odd, 5)
