"""Several processes as one run: how they find each other, take turns and agree; and what happens when one of them dies.

Every process runs the same command. JAX joins them (`join`), each holds its part of every array and reads its own rows of a batch;
the first one writes the logs, all of them the checkpoints, to one workdir that all can see.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
from jax.experimental import multihost_utils

from gatedattn.config import ConfigError

HEARTBEAT_SECONDS = 30  # a process that is not heard of for so long is dead, and the others end
JOIN_SECONDS = 300


def join(coordinator: str | None = None, process_count: int | None = None, process_id: int | None = None) -> None:
    """Become one of several processes, if there are several; call it before anything asks JAX for its devices.

    Without arguments JAX is asked where a TPU pod, Slurm (`srun`) or Open MPI (`mpirun`) has started several processes; elsewhere
    this process is the only one. With `coordinator` "host:port", the first process's, all three must be given.

    Raises:
        ConfigError: arguments that do not fit together, or the others could not be reached.
    """
    given = {"coordinator": coordinator, "process_count": process_count, "process_id": process_id}
    missing = [name for name, value in given.items() if value is None]
    if 0 < len(missing) < 3:
        raise ConfigError(f"several processes need all of --coordinator=HOST:PORT --process_count=N --process_id=0..N-1; missing: "
                          f"{', '.join('--' + name for name in missing)}")  # fmt: skip
    arguments: dict = {}
    if not missing:
        host, _, port = coordinator.rpartition(":")
        if not host or not port.isdecimal():
            raise ConfigError(f"--coordinator={coordinator}: must be HOST:PORT of the first process, e.g. 10.0.0.1:9876")
        if not 0 <= process_id < process_count:
            raise ConfigError(f"--process_id={process_id}: must be in 0..{process_count - 1} (--process_count={process_count})")
        arguments = dict(coordinator_address=coordinator, num_processes=process_count, process_id=process_id)
    elif not _started_as_one_of_several():
        return
    if gpus := _gpus_under_slurm():
        arguments["local_device_ids"] = gpus
    try:
        jax.distributed.initialize(
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS, initialization_timeout=JOIN_SECONDS, **arguments
        )
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"the processes of this run did not find each other: {_line(error)}") from None


def _started_as_one_of_several() -> bool:
    """Whether a launcher that JAX knows has started this process among others, or this is a host of a TPU pod."""
    env = os.environ
    if int(env.get("SLURM_NTASKS", 1)) > 1 and "SLURM_PROCID" in env or int(env.get("OMPI_COMM_WORLD_SIZE", 1)) > 1:
        return True
    wants_tpu = "tpu" in env.get("JAX_PLATFORMS", "tpu") and importlib.util.find_spec("libtpu") is not None
    chips = [*Path("/dev").glob("accel[0-9]*"), *Path("/dev/vfio").glob("[0-9]*")]
    return wants_tpu and bool(chips)


def _gpus_under_slurm() -> list[int]:
    """The GPUs of this process, counted among those that it sees; empty where JAX's own choice is right.

    Under Slurm JAX gives the i-th task on a host the i-th GPU it sees. With one task on a host the other GPUs would idle
    (jax-ml/jax#16788); where Slurm shows a task none but its own, there is no i-th (jax-ml/jax#28194).
    """
    env = os.environ
    if "SLURM_PROCID" not in env or "JAX_LOCAL_DEVICE_IDS" in env:
        return []
    visible = env.get("CUDA_VISIBLE_DEVICES")
    count = len([*Path("/dev").glob("nvidia[0-9]*")]) if visible is None else len([id for id in visible.split(",") if id])
    tasks = int(env.get("SLURM_NTASKS", 1)) / int(env.get("SLURM_STEP_NUM_NODES", 1))  # on a host
    return list(range(count)) if tasks <= 1 or count == 1 else []


def is_first() -> bool:
    return jax.process_index() == 0


@contextlib.contextmanager
def one_after_the_other(name: str) -> Iterator[None]:
    """The first process goes first, alone; the others follow when it is through, and find what it has left."""
    if jax.process_count() == 1:
        yield
        return
    if not is_first():
        multihost_utils.sync_global_devices(name)
    yield
    if is_first():
        multihost_utils.sync_global_devices(name)


def told_to_stop(step: int) -> bool:
    """Whether some process was sent SIGTERM. All processes get True at the same step, so that they save the same state."""
    return jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(step)


def leave(message: str, code: int) -> None:
    """End this process with a line on stderr, without waiting for others as JAX does at exit: they may wait for us."""
    print(f"error: {message}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    if jax.distributed.is_initialized() and jax.process_count() > 1:
        os._exit(code)
    sys.exit(code)


def guarded(action: Callable[[], None]) -> None:
    """`action()`; where a collective fails since another process has died, a line instead of XLA's traceback."""
    try:
        action()
    except jax.errors.JaxRuntimeError as error:
        if not jax.distributed.is_initialized() or jax.process_count() == 1:
            raise
        leave(
            f"process {jax.process_index()} of {jax.process_count()}: another process of this run has ended or cannot be reached: "
            f"{_line(error)}\nstart all of them again with the same command: the run goes on from its newest checkpoint", 1
        )  # fmt: skip


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
