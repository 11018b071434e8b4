"""Optimizers and learning-rate schedules, with parameter groups chosen by path."""

import math
import re

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from gatedattn.config import OptimizerConfig
from gatedattn.sharding import path_string

# The weight matrices that Muon orthogonalises, each as the linear map it is: (input axes, output axes) of the stacked array.
# Axes in neither (layers, experts) are batch axes: every layer's and every expert's matrix is orthogonalised on its own.
MUON_MATRICES = (
    (r"attention/(query|key|value)/kernel$", ((1,), (2, 3))),  # [L, D, N, H]
    (r"attention/output/kernel$", ((1, 2), (3,))),  # [L, N, H, D]
    (r"moe/(gate|up|down)/kernel$", ((2,), (3,))),  # [L, E, in, out]
    (r"(mlp|moe/shared)/(gate|up|down)/kernel$", ((1,), (2,))),  # [L, in, out]
)


def schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """The learning rate at step 0, 1, ..., steps - 1: linear warm-up from lr / warmup_steps to lr, then

    cosine    half a cosine from lr to end_learning_rate, reached at the last step
    wsd       lr, and a linear decay to end_learning_rate over the last `decay_fraction` of the steps
    constant  lr
    """
    peak, end, last = config.learning_rate, config.end_learning_rate, steps - 1
    warmup = min(config.warmup_steps, steps // 2)
    start = {"cosine": warmup, "wsd": max(warmup, steps - round(config.decay_fraction * steps)), "constant": last}[
        config.schedule
    ]

    def rate(step):
        step = jnp.asarray(step, jnp.float32)
        progress = jnp.clip((step - start) / max(last - start, 1), 0, 1)
        match config.schedule:
            case "cosine":
                after = end + (peak - end) * 0.5 * (1 + jnp.cos(jnp.pi * progress))
            case "wsd":
                after = peak + (end - peak) * progress
            case _:
                after = jnp.full_like(progress, peak)
        return jnp.where(step < warmup, peak * (step + 1) / max(warmup, 1), after)

    return rate


def decay_mask(config: OptimizerConfig):
    """params -> tree of bools: True where weight decay applies, i.e. where the path does not match `no_decay`."""
    return lambda params: jax.tree_util.tree_map_with_path(lambda p, _: not re.search(config.no_decay, path_string(p)), params)


def _muon_dimensions(params):
    """params -> tree of `MuonDimensionNumbers` for the matrices of `MUON_MATRICES`, None for everything else."""

    def dimensions(path, _):
        name = path_string(path)
        return next((MuonDimensionNumbers(*axes) for rule, axes in MUON_MATRICES if re.search(rule, name)), None)

    return jax.tree_util.tree_map_with_path(dimensions, params)


def _scale_by_shape(update, dimensions: MuonDimensionNumbers):
    fan_in, fan_out = (math.prod(update.shape[axis] for axis in axes) for axes in dimensions)
    return update * max(1, fan_out / fan_in) ** 0.5


def scale_by_rate(rate: optax.Schedule, factor: float = 1.0) -> optax.GradientTransformationExtraArgs:
    """Multiply by -factor * rate(step), the step given to `update(..., step=)`: a schedule with a counter of its own would fall
    behind the run whenever a step's update is not applied."""

    def update(updates, state, params=None, *, step, **_):
        return jax.tree.map(lambda u: (-factor * rate(step) * u).astype(u.dtype), updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def _muon(config: OptimizerConfig, rate: optax.Schedule) -> optax.GradientTransformation:
    """Orthogonalised momentum (Jordan et al., 2024), scaled by sqrt(max(1, out / in)) as in the authors' code."""
    ratio = config.muon_learning_rate / config.learning_rate
    return optax.chain(
        # Not `contrib.muon`, the whole recipe: it decays Adam's parameters without a mask and gives them Nesterov momentum.
        scale_by_muon(beta=config.muon_momentum, weight_dimension_numbers=_muon_dimensions),
        optax.stateless(lambda updates, _: jax.tree.map(_scale_by_shape, updates, _muon_dimensions(updates))),
        optax.add_decayed_weights(config.weight_decay, decay_mask(config)),
        scale_by_rate(rate, ratio),
    )


def build(config: OptimizerConfig, steps: int) -> optax.GradientTransformationExtraArgs:
    """Clip by global norm, then AdamW, or Muon for the matrices of attention and MLPs and AdamW for everything else.

    Weight decay multiplies the learning rate and skips parameters whose path matches `config.no_decay`. Its `update` takes the
    step (from 0), at which the schedule is read: `tx.update(grads, state, params, step=step)`.
    """
    rate = schedule(config, steps)
    update = optax.chain(  # optax.adamw, but for the step
        optax.scale_by_adam(config.b1, config.b2, config.eps),
        optax.add_decayed_weights(config.weight_decay, decay_mask(config)),
        scale_by_rate(rate),
    )
    if config.name == "muon":

        def labels(params):
            dimensions = _muon_dimensions(params)
            return jax.tree.map(lambda _, d: "muon" if d else "adamw", params, dimensions)

        update = optax.partition({"muon": _muon(config, rate), "adamw": update}, labels)
    clip = [optax.clip_by_global_norm(config.clip_norm)] if config.clip_norm else []
    return optax.chain(*clip, update)
