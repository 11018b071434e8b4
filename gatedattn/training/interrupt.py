"""Ctrl-C and SIGTERM as a request to stop after the current step."""

from __future__ import annotations

import builtins
import os
import signal
import threading
from typing import Self

import jax

from gatedattn.training import hosts


class Interrupt:
    """While the context is entered, SIGINT and SIGTERM only set `signum`; the loop looks at it between steps.

    The first Ctrl-C says so. A second one ends the process at once (in a notebook it raises KeyboardInterrupt): XLA, when it is
    interrupted in the middle of a compilation, crashes. Outside the main thread, where Python allows no handlers, nothing is
    caught. With several processes SIGTERM is JAX's business, which lets all of them know (see `look`), and Ctrl-C is not caught.
    """

    def __init__(self):
        self.signum: int | None = None

    def __enter__(self) -> Self:
        self.before = {}
        if threading.current_thread() is threading.main_thread() and jax.process_count() == 1:
            self.before = {s: signal.signal(s, self._handle) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_) -> None:
        for signum, handler in self.before.items():
            signal.signal(signum, handler)

    def look(self, step: int) -> int | None:
        """The signal, if one came; after `step` steps on all processes alike."""
        if self.signum is None and hosts.told_to_stop(step):
            self.signum = signal.SIGTERM
        return self.signum

    def _handle(self, signum, frame) -> None:
        if self.signum is not None and signum == signal.SIGINT:
            if hasattr(builtins, "__IPYTHON__"):
                raise KeyboardInterrupt
            os.write(2, b"\nstopped without saving: the run goes on from its newest checkpoint\n")
            os._exit(128 + signum)
        self.signum = signum
        name = signal.Signals(signum).name
        os.write(2, f"\n{name}: stopping after the next step, which is saved; Ctrl-C once more stops at once\n".encode())
