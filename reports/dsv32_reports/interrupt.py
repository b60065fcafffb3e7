"""Ctrl-C and SIGTERM: while a stream of events is drained they are noted and acted on between two events.

An exception raised by a signal can strike anywhere, for instance inside Hypothesis' own bookkeeping or a
garbage-collection callback, and be lost or turned into another one. So the first signal only asks for the end of the
run; a second one stops at once.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

NOTED = b"dsv32: stopping after the current step; press Ctrl-C again to stop at once\n"


class Interrupts:
    """Whether the user asked the process to stop."""

    def __init__(self) -> None:
        self.requested = False
        self._noting = False

    def install(self) -> None:
        """Handle SIGINT and SIGTERM from now on."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Inside, the first signal is noted and raises nothing."""
        self._noting = True
        try:
            yield
        finally:
            self._noting = False

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        first, self.requested = not self.requested, True
        if not (self._noting and first):
            raise KeyboardInterrupt
        os.write(2, NOTED)


interrupts = Interrupts()
