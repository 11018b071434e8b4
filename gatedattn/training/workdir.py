"""The folder of a run: that it can be written, and that nobody else writes it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import jax

from gatedattn.config import ConfigError
from gatedattn.training.console import say

LOCK = "run.lock"


@contextlib.contextmanager
def opened(workdir: Path) -> Iterator[None]:
    """Make the folder and hold its lock. Raises `ConfigError` if it cannot be written, or another run is at work in it.

    The lock is the kernel's (flock on run.lock): it goes when the process goes, however it went, so that a stale one cannot be.
    The file only says who holds it. With several hosts the first process holds it for all.
    """
    if jax.process_index() != 0:
        yield
        return
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        file = open(workdir / LOCK, "a+")
    except OSError as error:
        raise ConfigError(f"--workdir={workdir} cannot be written ({error.strerror}): give another") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{workdir} is in use by another run{_holder(file)}: wait for it, or give another --workdir"
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL):
                raise
            say(f"WARNING: the file system of {workdir} has no locks: see to it that no second run writes there")
        try:
            file.truncate(0)
            file.write(
                json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%F %T %z")}) + "\n"
            )
            file.flush()
        except OSError as error:
            raise ConfigError(f"--workdir={workdir} cannot be written ({error.strerror}): make room, or give another") from None
        yield


def _holder(file) -> str:
    """' (process 12 on host x since ...)', as far as the lock file tells."""
    try:
        file.seek(0)
        who = json.loads(file.read(1000))
        return f" (process {int(who['pid'])} on {str(who['host'])[:60]} since {str(who['since'])[:30]})"
    except (OSError, ValueError, TypeError, KeyError):
        return ""
