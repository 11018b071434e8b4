"""Checkpoints of a run: Orbax, asynchronous, atomic, each array with a checksum of its own.

Layout: `checkpoints/STEP/{params,optimizer,guard,config,about}`. Parameters are an item of their own, under their plain paths, so
that tools read them without knowing the optimizer. `about` holds what the arrays must look like and their checksums, taken on the
device before they are written and again after they are read: a flipped bit anywhere between the two is found, on any mesh. Data
needs no state: the batch of a step is a function of the seed and the step.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from jax.experimental import multihost_utils
from jaxtyping import Array, PyTree, UInt32
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, EveryNSteps, LatestN

from gatedattn.config import CheckpointConfig, ConfigError, RunConfig, to_mapping
from gatedattn.data.cache import DISK_FAULTS, digest
from gatedattn.sharding import path_string
from gatedattn.training.console import say
from gatedattn.training.step import TrainState

ABOUT = "about"


class Damaged(ConfigError):
    """A checkpoint that is not what was saved. The message says which and in what."""


class NotSaved(Exception):
    """A checkpoint that could not be written; older ones are as they were."""


class Checkpoints:
    """The checkpoints under `workdir`; `read_only` for everybody but the run itself. Use as a context manager: leaving it waits
    for the last save to be on disk, and raises `NotSaved` if it did not get there."""

    def __init__(self, workdir: str | Path, config: CheckpointConfig = CheckpointConfig(), *, read_only: bool = False):
        self.directory = Path(workdir).absolute() / "checkpoints"
        self.config, self.read_only = config, read_only
        self.manager = self._open()

    def _open(self) -> ocp.CheckpointManager:
        policies = [LatestN(self.config.keep)]
        if self.config.keep_every:
            policies.append(EveryNSteps(self.config.keep_every))
        writing = {} if self.read_only else {"preservation_policy": AnyPreservationPolicy(policies)}
        options = ocp.CheckpointManagerOptions(read_only=self.read_only, create=not self.read_only, **writing)
        return ocp.CheckpointManager(self.directory, options=options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind, error, traceback) -> None:
        try:
            self.finish()
        except NotSaved:
            if error is None:
                raise  # otherwise what happened first is what matters
        finally:
            self.manager.close()
            self._sweep()

    def steps(self) -> list[int]:
        """The steps of complete checkpoints, ascending."""
        return sorted(self.manager.all_steps())

    def latest(self) -> int | None:
        """Step of the newest complete checkpoint, None if there is none."""
        return max(self.manager.all_steps(), default=None)

    # --- writing -------------------------------------------------------------------------------------------------------------

    def save(self, state: TrainState, config: RunConfig, about: dict | None = None) -> None:
        """Copy the state to the host, then write it in the background while training goes on. `about` is kept with it.

        Waits for the save before. A step that is saved already is left alone. Raises `NotSaved` if this save or the one before
        could not be written; the next call tries again.
        """
        step = int(state.step)
        self.finish()
        if step == self.latest():
            return
        self._sweep()
        arrays = {
            "params": nnx.to_pure_dict(state.params),
            "optimizer": _plain(state.opt_state),
            "guard": _plain(state.guard),
        }
        arrays = {name: tree for name, tree in arrays.items() if jax.tree.leaves(tree)}
        about = {"step": step, "arrays": _describe(arrays), **(about or {})}
        about["digest"] = _digest(about)
        items = {name: ocp.args.StandardSave(tree) for name, tree in arrays.items()}
        items |= {"config": ocp.args.JsonSave(to_mapping(config)), ABOUT: ocp.args.JsonSave(about)}
        self._writing(step, lambda: self.manager.save(step, args=ocp.args.Composite(**items)))

    def finish(self) -> None:
        """Wait for the save in progress, if there is one. Raises `NotSaved`."""
        self._writing(self.latest(), self.manager.wait_until_finished)

    def check(self) -> None:
        """Raise `NotSaved` if a save in the background has failed; waits for nothing."""
        self._writing(self.latest(), self.manager.check_for_errors)

    def _writing(self, step: int | None, action: Callable[[], Any]) -> None:
        try:
            action()
        except Exception as error:  # tensorstore, Orbax and the operating system each have their own
            # The manager counts the step as saved, and its thread is dead: begin anew.
            try:
                self.manager.close()
            except Exception:
                pass
            self.manager = self._open()
            self._sweep()
            raise NotSaved(
                f"the checkpoint of step {step} could not be written to {self.directory}: {_reason(error)}"
            ) from error

    def _sweep(self) -> None:
        """Take away what a save left that a kill or a full disk cut short. Nothing else is being written: the run holds its lock,
        and the save before is over (other threads of one that failed may still write; then the next sweep has it)."""
        if jax.process_index() == 0 and not self.read_only:
            for path in self.directory.iterdir():
                if ".orbax-checkpoint-tmp" in path.name:
                    shutil.rmtree(path, ignore_errors=True)

    def delete_after(self, step: int) -> None:
        """Delete the checkpoints of later steps, newest first."""
        self.finish()
        for later in reversed([s for s in self.steps() if s > step]):
            self.manager.delete(later)

    # --- reading -------------------------------------------------------------------------------------------------------------

    def restore(self, like: TrainState, step: int | None = None) -> TrainState:
        """The state at `step` in the shapes, dtypes and shardings of `like`, a tree of arrays or `jax.ShapeDtypeStruct`s made by
        today's program: what was true of devices when it was saved does not matter.

        Without `step`, the newest that is intact: a damaged one is named, and put aside (in `damaged/`) where this is the run
        itself. Raises `ConfigError` if the saved arrays do not fit `like`, or no checkpoint is intact; `Damaged` with `step`.
        """
        if step is not None:
            return self._restore_state(like, step)
        steps = self.steps()
        for step in reversed(steps):
            try:
                return self._restore_state(like, step)
            except Damaged as error:
                say(f"  DAMAGED      {error}; using the checkpoint before it")
                self._put_aside(step)
        raise ConfigError(
            f"{self.directory}: none of the checkpoints ({', '.join(map(str, steps))}) is intact: use another workdir"
        )

    def about(self, step: int) -> dict:
        """What was saved with the arrays. Raises `Damaged`; an empty dict for a checkpoint that has none."""
        if not (self.directory / str(step) / ABOUT).exists():
            return {}
        about = self._read(step, **{ABOUT: ocp.args.JsonRestore()})[ABOUT]
        if not isinstance(about, dict) or about.get("digest") != _digest(about):
            raise self._damaged(step, "its description is not what was saved")
        return about

    def restore_params(self, like: PyTree, step: int | None = None) -> PyTree:
        """Only the parameters; `like` and errors as in `restore`."""
        step = self.latest() if step is None else step
        return _like_state(like, self._restore(step, params=nnx.to_pure_dict(like))["params"])

    def _restore_state(self, like: TrainState, step: int) -> TrainState:
        trees = {"params": nnx.to_pure_dict(like.params), "optimizer": _plain(like.opt_state), "guard": _plain(like.guard)}
        found = self._restore(step, **trees)
        opt_state, guard = (
            jax.tree.unflatten(jax.tree.structure(tree), found[name])
            for name, tree in (("optimizer", like.opt_state), ("guard", like.guard))
        )
        return TrainState(_like_state(like.params, found["params"]), opt_state, jnp.asarray(step, like.step.dtype), guard)

    def _restore(self, step: int, **trees: PyTree) -> dict:
        arrays = self.about(step).get("arrays", {})
        for name, tree in trees.items() if arrays else ():
            _compare(f"{self.directory}/{step}", name, arrays.get(name, {}), _shapes(tree))
        present = {name: tree for name, tree in trees.items() if jax.tree.leaves(tree)}
        try:
            found = self._read(step, **{name: ocp.args.StandardRestore(_abstract(tree)) for name, tree in present.items()})
        except Damaged as error:
            if arrays:
                raise
            raise ConfigError(f"{error}; or it does not fit this config") from error
        found = {name: found[name] for name in present}
        if arrays:
            sums = _checksums(found)
            for name, tree in sums.items():
                for path, value in tree.items():
                    if value != arrays[name][path][2]:
                        raise self._damaged(step, f"{name} {path} is not what was saved (its checksum differs)")
        return {name: found.get(name, tree) for name, tree in trees.items()}

    def _read(self, step: int, **items):
        """Items of a checkpoint. Raises `Damaged` on all processes if one of them cannot read its part."""
        found, why = None, ""
        try:
            found = self.manager.restore(step, args=ocp.args.Composite(**items))
        except Exception as error:  # a damaged file surfaces as whatever its reader makes of it
            why = _reason(error)
        if not _all_processes(not why):
            raise self._damaged(step, f"it cannot be read ({why or 'on another host'})")
        return found

    def _damaged(self, step: int, why: str) -> Damaged:
        return Damaged(f"{self.directory}/{step} is damaged: {why}")

    def _put_aside(self, step: int) -> None:
        if self.read_only:
            return
        if jax.process_index() == 0:
            aside = self.directory.parent / "damaged"
            aside.mkdir(exist_ok=True)
            shutil.rmtree(aside / str(step), ignore_errors=True)
            (self.directory / str(step)).rename(aside / str(step))
        _all_processes(True)
        self.manager.reload()


def checksum(x: Array) -> UInt32[Array, ""]:
    """Sum modulo 2^32 of an array's words, each times an odd number that depends on its place.

    Integer addition is associative: the sum is the same for any sharding. A single changed word always shows.
    """
    width = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}[x.dtype.itemsize]
    words = (x if x.dtype == bool else jax.lax.bitcast_convert_type(x, width)).astype(jnp.uint32)
    place, stride = jnp.zeros((), jnp.uint32), 1
    for axis in reversed(range(words.ndim)):
        place = place + jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis) * np.uint32(stride % 2**32)
        stride *= words.shape[axis]
    return jnp.sum(words * (place * np.uint32(2654435769 - 1) + np.uint32(1)), dtype=jnp.uint32)


@jax.jit
def _sums(leaves: list[Array]) -> UInt32[Array, "n"]:
    return jnp.stack([checksum(leaf) for leaf in leaves])


def _checksums(trees: dict[str, PyTree]) -> dict[str, dict[str, int]]:
    """Item -> path -> checksum."""
    leaves = jax.tree.leaves(trees)
    values = iter(np.asarray(_sums(leaves)).tolist() if leaves else ())
    return {name: {path: next(values) for path in _shapes(trees[name])} for name in sorted(trees)}


def _shapes(tree: PyTree) -> dict[str, list]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {path_string(path): [list(leaf.shape), str(leaf.dtype)] for path, leaf in leaves}


def _describe(trees: dict[str, PyTree]) -> dict[str, dict[str, list]]:
    sums = _checksums(trees)
    return {name: {path: [*like, sums[name][path]] for path, like in _shapes(tree).items()} for name, tree in trees.items()}


def _compare(where: str, item: str, saved: dict[str, list], wanted: dict[str, list]) -> None:
    for path in sorted(saved.keys() | wanted.keys()):
        has, needs = saved.get(path, [])[:2], wanted.get(path, [])
        if has != needs:
            kinds = [f"{kind[1]}{kind[0]}" if kind else "absent" for kind in (has, needs)]
            raise ConfigError(
                f"{where} does not fit this config: {item} {path} is {kinds[0]} there and {kinds[1]} here; use the settings in "
                "its config, or another --workdir (train.init_from begins a new run with what fits)"
            )


def _digest(about: dict) -> str:
    return digest(json.dumps({key: value for key, value in about.items() if key != "digest"}, sort_keys=True))


def _plain(tree) -> list:
    """A tree's arrays in order: the optimizer's nested containers are optax's business and change between versions."""
    return jax.tree.leaves(tree)


def _abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None)), tree)


def _like_state(like: PyTree, pure: dict) -> PyTree:
    return jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(pure))


def _reason(error: BaseException) -> str:
    text = str(error).strip()
    for known in DISK_FAULTS:
        if known in text:
            return known
    return f"{type(error).__name__}: {text.splitlines()[0][:200] if text else ''}".rstrip(": ")


def _all_processes(fine: bool) -> bool:
    """Whether all processes are fine: what one of them does not find, none goes on with."""
    if jax.process_count() == 1:
        return fine
    return bool(np.all(multihost_utils.process_allgather(np.array(fine))))
