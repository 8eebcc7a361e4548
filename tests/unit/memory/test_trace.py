"""Folding allocation events into peaks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainer_rank.memory import Event, Instant, Mark, Timeline, Trace, fold


def trace(*steps: Mark | Event) -> Trace:
    """Return a trace of a two-layer model."""
    return Trace(steps=steps, num_layers=2)


def test_a_stretch_keeps_its_largest_live_bytes() -> None:
    """The peak of a stretch includes what was live when it began, and its end is what is live when it ends."""
    timeline = fold(trace(Mark("forward"), Event(100), Event(50), Event(-50), Mark("head"), Event(20), Event(-120)))
    assert timeline.instants == (
        Instant(mark=Mark("start"), peak_bytes=0, end_bytes=0),
        Instant(mark=Mark("forward"), peak_bytes=150, end_bytes=100),
        Instant(mark=Mark("head"), peak_bytes=120, end_bytes=0),
    )
    assert timeline.peak.mark == Mark("forward")


def test_events_before_the_first_mark_are_counted() -> None:
    """They belong to a phase named ``start``."""
    assert fold(trace(Event(7), Event(-7))).instants == (Instant(mark=Mark("start"), peak_bytes=7, end_bytes=0),)


def test_a_mark_that_comes_again_makes_another_instant() -> None:
    """A layer run twice (recompute) is two stretches."""
    timeline = fold(trace(Mark("forward", 0), Event(5), Event(-5), Mark("forward", 0), Event(9)))
    assert [instant.peak_bytes for instant in timeline.instants] == [0, 5, 9]


def test_the_end_of_a_phase_is_its_last_end() -> None:
    """A phase of several stretches ends with its last; a phase that never came ends with nothing."""
    timeline = fold(trace(Mark("forward", 0), Event(5), Mark("forward", 1), Event(5), Mark("head")))
    assert timeline.end_of("forward") == 10
    assert timeline.end_of("optimizer") == 0


def test_of_equal_peaks_the_first_is_the_peak() -> None:
    """The answer does not depend on anything but the order of events."""
    timeline = fold(trace(Mark("forward"), Event(8), Event(-8), Mark("backward"), Event(8)))
    assert timeline.peak.mark.phase == "forward"


@given(st.lists(st.one_of(st.integers(-50, 50), st.sampled_from(["forward", "backward"])), max_size=30))
def test_the_fold_agrees_with_replaying_every_prefix(steps: list[int | str]) -> None:
    """The largest peak over the stretches is the largest number of live bytes at any moment."""
    marked = [Mark(step) if isinstance(step, str) else Event(step) for step in steps]
    live, highest = 0, 0
    for step in marked:
        live += step.delta_bytes if isinstance(step, Event) else 0
        highest = max(highest, live)
    timeline: Timeline = fold(trace(*marked))
    assert max(instant.peak_bytes for instant in timeline.instants) == highest
    assert timeline.instants[-1].end_bytes == live
