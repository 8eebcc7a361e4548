"""Ctrl-C and SIGTERM as a request to stop between two passes."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Final

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class StopRequested(BaseException):
    """The run was asked to stop; not an error, so nothing that handles errors catches it."""


class Interrupts:
    """While it is entered, the first signal only asks for a stop, and the second stops at once.

    Signals reach the main thread only; in another thread it does nothing, and the process ends as it would.
    """

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        self._restore()

    def check(self) -> None:
        """Raise ``StopRequested`` when a signal came since the beginning."""
        if self.requested:
            raise StopRequested

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
