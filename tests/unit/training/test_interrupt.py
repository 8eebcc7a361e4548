"""Signals as a request to stop."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from trainer_rank.training.interrupt import SIGNALS, Interrupts, StopRequested


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_only_asks(number: signal.Signals) -> None:
    """The code that runs goes on to its next check; afterwards the handlers are those of before."""
    before = [signal.getsignal(one) for one in SIGNALS]
    interrupts = Interrupts()
    with interrupts:
        interrupts.check()
        os.kill(os.getpid(), number)
        assert interrupts.requested
        with pytest.raises(StopRequested):
            interrupts.check()
    assert [signal.getsignal(one) for one in SIGNALS] == before


def test_the_second_ctrl_c_stops_at_once() -> None:
    """As if nothing had handled it; a process in the background would ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Interrupts() as interrupts:
            os.kill(os.getpid(), signal.SIGINT)
            assert interrupts.requested
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_in_another_thread_it_does_nothing() -> None:
    """Signals are the main thread's; entering is no error."""
    found = []

    def enter() -> None:
        with Interrupts() as interrupts:
            found.append(interrupts.requested)

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert found == [False]
    assert signal.getsignal(signal.SIGINT) is before
