"""Ctrl-C and SIGTERM as a request to stop after the current step."""

from __future__ import annotations

import signal
import threading
from typing import Self


class Interrupt:
    """While the context is entered, SIGINT and SIGTERM only set `signum`; the loop looks at it between steps.

    A second Ctrl-C raises KeyboardInterrupt at once. Outside the main thread, where Python allows no handlers, nothing is
    caught.
    """

    def __init__(self):
        self.signum: int | None = None

    def __enter__(self) -> Self:
        self.before = {}
        if threading.current_thread() is threading.main_thread():
            self.before = {s: signal.signal(s, self._handle) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_) -> None:
        for signum, handler in self.before.items():
            signal.signal(signum, handler)

    def _handle(self, signum, frame) -> None:
        if self.signum is not None and signum == signal.SIGINT:
            raise KeyboardInterrupt
        self.signum = signum
