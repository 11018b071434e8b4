"""Batches made ahead of time by a thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")


def prefetch(batches: Callable[[int], T], start_step: int, stop_step: int, depth: int = 2) -> Iterator[T]:
    """`batches(step)` for the steps from `start_step` up to `stop_step`, made ahead by a thread, at most `depth` waiting.

    What the thread raises is raised here, after the batches before it. Closing the iterator ends the thread.
    """
    ready: queue.Queue = queue.Queue(depth)
    stopped = threading.Event()

    def put(item) -> None:
        while not stopped.is_set():
            try:
                return ready.put(item, timeout=0.1)
            except queue.Full:
                continue

    def work() -> None:
        try:
            for step in range(start_step, stop_step):
                if stopped.is_set():
                    return
                put((batches(step), None))
        except BaseException as error:
            put((None, error))
        else:
            put((None, StopIteration()))

    thread = threading.Thread(target=work, name="prefetch", daemon=True)
    thread.start()
    try:
        while True:
            batch, error = ready.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield batch
    finally:
        stopped.set()
        thread.join()
