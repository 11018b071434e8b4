"""Checkpoints of a run: Orbax, asynchronous, the newest few kept.

Layout: `checkpoints/STEP/{params,optimizer,config}`. Parameters are an item of their own, under their plain paths, so that
tools read them without knowing the optimizer. Data needs no state: the batch of a step is a function of the seed and the step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Self

import jax
import orbax.checkpoint as ocp
from flax import nnx
from jaxtyping import PyTree

from gatedattn.config import ConfigError, RunConfig, to_mapping
from gatedattn.training.step import TrainState


class Checkpoints:
    """The checkpoints under `workdir`. Use as a context manager: leaving it waits for the last save to be on disk."""

    def __init__(self, workdir: str | Path, keep: int = 2):
        self.directory = Path(workdir).absolute() / "checkpoints"
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, step_prefix=None, create=True)
        self.manager = ocp.CheckpointManager(self.directory, options=options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.manager.wait_until_finished()
        self.manager.close()

    def latest(self) -> int | None:
        """Step of the newest complete checkpoint, None if there is none."""
        return self.manager.latest_step()

    def save(self, state: TrainState, config: RunConfig) -> None:
        """Copy the state to the host, then write it in the background while training goes on.

        Waits for the save before, and raises what went wrong with it. A step that is saved already is left alone.
        """
        step = int(state.step)
        if step == self.latest():
            return
        self.manager.wait_until_finished()
        self.manager.save(
            step,
            args=ocp.args.Composite(
                params=ocp.args.StandardSave(nnx.to_pure_dict(state.params)),
                optimizer=ocp.args.StandardSave(_plain(state.opt_state)),
                config=ocp.args.JsonSave(to_mapping(config)),
            ),
        )

    def restore(self, like: TrainState, step: int | None = None) -> TrainState:
        """The state at `step` (the newest by default) in the shapes, dtypes and shardings of `like`, a tree of arrays or
        `jax.ShapeDtypeStruct`s made by today's program: what was true of devices when it was saved does not matter.

        Raises `ConfigError` if the saved arrays do not fit.
        """
        step = self.latest() if step is None else step
        params, optimizer = _abstract(nnx.to_pure_dict(like.params)), _abstract(_plain(like.opt_state))
        found = self._restore(step, params=ocp.args.StandardRestore(params), optimizer=ocp.args.StandardRestore(optimizer))
        leaves = jax.tree.leaves(found["optimizer"])
        opt_state = jax.tree.unflatten(jax.tree.structure(like.opt_state), leaves)
        return TrainState(_like_state(like.params, found["params"]), opt_state, jax.numpy.asarray(step, like.step.dtype))

    def restore_params(self, like: PyTree, step: int | None = None) -> PyTree:
        """Only the parameters; `like` as in `restore`."""
        step = self.latest() if step is None else step
        found = self._restore(step, params=ocp.args.StandardRestore(_abstract(nnx.to_pure_dict(like))))
        return _like_state(like, found["params"])

    def _restore(self, step: int, **items):
        try:
            return self.manager.restore(step, args=ocp.args.Composite(**items))
        except (ValueError, KeyError) as error:
            reason = str(error).strip().splitlines()[0][:300]
            raise ConfigError(
                f"{self.directory}/{step} does not fit this config: its model or optimizer settings differ from today's "
                f"(see config.json there); use them, or another --workdir. Orbax says: {reason}"
            ) from error


def _plain(opt_state) -> list:
    """The optimizer's arrays in order: its nested containers are optax's business and change between versions."""
    return jax.tree.leaves(opt_state)


def _abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None)), tree)


def _like_state(like: PyTree, pure: dict) -> PyTree:
    return jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(pure))
