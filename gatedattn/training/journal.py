"""Lines and TensorBoard events, written by a thread: a slow file system does not slow training, a full one does not end it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog

from gatedattn.training.console import say


class Journal:
    """Appends to the files of `folder`. What cannot be written now (the disk is full) is kept and written when it can be."""

    def __init__(self, folder: Path, names: Sequence[str], purge_step: int | None = None):
        self.folder = folder
        self.files = {name: open(folder / name, "ab", buffering=0) for name in names}
        self.waiting = dict.fromkeys(names, b"")
        self.failing = False
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self.last: Future | None = None
        self.fault: Exception | None = None
        self.board: EventsWriter | None = None
        self._submit(lambda: self._open_board(purge_step))

    def line(self, name: str, text: str) -> None:
        """Append a line to a file; does not wait."""
        self._submit(lambda: self._append(name, text.encode() + b"\n"))

    def events(self, step: int, summaries: Callable[[], list]) -> None:
        """TensorBoard summaries of a step, made in the thread; does not wait."""
        self._submit(lambda: self._events(step, summaries()))

    def sync(self) -> None:
        """Wait until all is on the disk, so that no checkpoint is there before the lines of its steps."""
        self._submit(lambda: [os.fsync(file.fileno()) for file in self.files.values()])
        self.last.result()
        self._raise()

    def close(self) -> None:
        self.sync()
        self._submit(lambda: self.board.close() if self.board else None)
        self.thread.shutdown()
        for file in self.files.values():
            file.close()
        if any(self.waiting.values()):
            say(
                f"WARNING: {self.folder}: the last lines of {', '.join(n for n, t in self.waiting.items() if t)} could not be written"
            )

    def _submit(self, action: Callable[[], object]) -> None:
        def guarded() -> None:
            try:
                action()
            except OSError as error:
                if not self.failing:
                    say(
                        f"WARNING: {self.folder} cannot be written ({error.strerror}): training goes on, lines are kept until it can"
                    )
                self.failing = True
            except Exception as error:
                self.fault = error
            else:
                self.failing = any(self.waiting.values())

        self._raise()
        self.last = self.thread.submit(guarded)

    def _raise(self) -> None:
        """A fault of ours, raised here rather than lost in the thread."""
        if self.fault:
            raise self.fault

    def _append(self, name: str, text: bytes) -> None:
        self.waiting[name] += text
        for each, file in self.files.items():
            while self.waiting[each]:
                written = file.write(self.waiting[each])  # a nearly full disk takes a part
                self.waiting[each] = self.waiting[each][written:]

    def _open_board(self, purge_step: int | None) -> None:
        """Not SummaryWriter: its own thread dies of a full disk, and the next ten events wait for it for ever."""
        board = self.folder / "tensorboard"
        board.mkdir(exist_ok=True)
        self.board = EventsWriter(str(board / "events"), f".{os.getpid()}.{time.monotonic_ns()}")
        if purge_step is not None:
            self.board.write_event(Event(step=purge_step, file_version="brain.Event:2"))
            self.board.write_event(Event(step=purge_step, session_log=SessionLog(status=SessionLog.START)))

    def _events(self, step: int, summaries: list) -> None:
        if self.board is None:
            return
        try:
            for summary in summaries:
                self.board.write_event(Event(wall_time=time.time(), step=step, summary=summary))
            self.board.flush()
        except OSError:
            self.board = None  # an event written in half spoils those behind it
            say(
                f"WARNING: {self.folder}/tensorboard cannot be written: no more events in this session (the .jsonl files have all)"
            )
            raise
