"""Ctrl-C and SIGTERM: remembered as well as raised.

An exception that a signal raises can be lost, for instance inside a garbage-collection callback. So the handler also
notes that it was called, and whoever drains a stream of events asks after each one.
"""

from __future__ import annotations

import signal
from types import FrameType


class Interrupts:
    """Whether the user asked the process to stop."""

    def __init__(self) -> None:
        self.requested = False

    def install(self) -> None:
        """Handle SIGINT and SIGTERM from now on."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        self.requested = True
        raise KeyboardInterrupt


interrupts = Interrupts()
