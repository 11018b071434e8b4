"""The pure functions of training: (state, batch) -> (state, metrics), and their read-only siblings for evaluation and probes.

Each factory closes over the model's graph and the configuration and returns a plain function of pytrees, for the caller to
`jax.jit` (never `nnx.jit`, which costs milliseconds a call), to compile ahead of time, or to differentiate.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Int, PyTree

from gatedattn import linear, sharding
from gatedattn.config import RunConfig, TransformerConfig
from gatedattn.training import guard as guard_lib
from gatedattn.training import optimizer
from gatedattn.training.loss import next_token_loss
from gatedattn.transformer import Transformer

Batch = dict[str, Array]


class TrainState(NamedTuple):
    params: PyTree  # nnx.State of plain arrays
    opt_state: PyTree
    step: Int[Array, ""]  # steps taken, skipped ones included: the next one reads batch number `step`
    guard: guard_lib.GuardState | tuple = ()  # what recognises bad steps


@functools.lru_cache(64)
def graph(config: TransformerConfig) -> nnx.GraphDef:
    """The static half of the model: `nnx.merge(graph(config), params)` is a `Transformer`. Allocates nothing."""
    return nnx.split(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))[0]


def make_init(config: RunConfig) -> Callable[[], TrainState]:
    """A function that makes the state at step 0: a function of `train.seed` alone, whatever the devices."""
    tx = optimizer.build(config.optimizer, config.train.steps)

    def init() -> TrainState:
        params = nnx.as_pure(nnx.state(Transformer(config.model, rngs=nnx.Rngs(config.train.seed)), nnx.Param))
        return TrainState(params, tx.init(params), jnp.zeros((), jnp.int32), guard_lib.init(config.guard))

    return init


def initialize(config: RunConfig, shardings: TrainState | None = None) -> TrainState:
    """The state at step 0, on the devices."""
    # Two thirds of a small run's compile time on CPUs would go into random number generators that run once: 12 s become 2 s.
    quick = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    return jax.jit(make_init(config), out_shardings=shardings, compiler_options=quick)()


def make_train_step(config: RunConfig) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, Array]]]:
    """One optimiser step over a batch [B, T], in `train.microbatches` parts.

    Losses, token counts and gradients are summed over the parts and divided once by the number of tokens in the whole batch, so
    the result does not depend on how unevenly the tokens fall. A mixture of experts adds its two losses per part, weighted
    by the part's tokens. The update of a bad step (see `guard`) is not applied: parameters and optimiser stay as they are, and
    only `step` advances. Metrics are on the device, scalars but for `*_layers` [L] and the guard's state:

        loss = ce + train.z_loss * z_loss + moe.load_balance * load_balance + moe.z_loss * router_z
        z_loss mean(lse^2), grad_norm before clipping, update_norm, param_norm, lr, tokens in the loss
        mixture of experts: load_balance, router_z, router_entropy, router_dropped (share of assignments), router_max_load (the
        busiest expert's share of its layer), and the last three as router_*_layers
        guard: the `GuardState` after the step
    """
    graphdef, microbatches, moe = graph(config.model), config.train.microbatches, config.model.moe
    tx = optimizer.build(config.optimizer, config.train.steps)
    rate = optimizer.schedule(config.optimizer, config.train.steps)

    def objective(params, batch):
        model = nnx.merge(graphdef, params)
        with linear.for_cpu():
            hidden, aux = model.hidden(batch["tokens"], batch["positions"], batch["segment_ids"])
            sums = _sums(model, hidden, batch, config)
        total, tokens = sums["loss_sum"], sums["count"]
        if config.model.is_moe:
            total += tokens * (moe.load_balance * aux["load_balance"] + moe.z_loss * aux["router_z"])
            sums |= {name: tokens * value for name, value in _router(aux).items()}
        return total, sums | {"total": total}

    def sum_gradients(params, batch):
        def gradient(params, batch):
            grads, sums = jax.grad(objective, has_aux=True)(params, batch)
            return sharding.pin(grads), sums

        if microbatches == 1:
            return gradient(params, batch)
        # Part i takes rows i, i + M, i + 2M, ...: a batch sharded over devices stays sharded in each part.
        parts = jax.tree.map(lambda x: x.reshape(-1, microbatches, *x.shape[1:]).swapaxes(0, 1), batch)

        def add(total, part):
            return jax.tree.map(jnp.add, total, gradient(params, part)), None

        shapes = jax.eval_shape(gradient, params, jax.tree.map(lambda x: x[0], parts))
        return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, shapes), parts)[0]

    def train_step(state, batch):
        grads, sums = sum_gradients(state.params, batch)
        count = jnp.maximum(sums.pop("count"), 1)
        grads = jax.tree.map(lambda g: (g / count).astype(g.dtype), grads)
        updates, opt_state = tx.update(grads, state.opt_state, state.params, step=state.step)
        mean = {name: value / count for name, value in sums.items()}
        loss, grad_norm = mean.pop("total"), optax.tree.norm(grads)
        apply, watch = guard_lib.judge(config.guard, state.guard, state.step, loss, grad_norm)
        params = guard_lib.select(apply, optax.apply_updates(state.params, updates), state.params)
        opt_state = guard_lib.select(apply, opt_state, state.opt_state)
        metrics = {
            "loss": loss,
            "ce": mean.pop("ce_sum"),
            "z_loss": mean.pop("z_sum"),
            "accuracy": mean.pop("correct"),
            "grad_norm": grad_norm,
            "update_norm": optax.tree.norm(updates),
            "param_norm": optax.tree.norm(params),
            "lr": rate(state.step),
            "tokens": count,
            "guard": watch,
        }
        mean.pop("loss_sum")
        return TrainState(params, opt_state, state.step + 1, watch), metrics | mean

    return train_step


def make_eval_step(config: RunConfig) -> Callable[[PyTree, Batch], dict[str, Array]]:
    """(params, batch) -> loss_sum, ce_sum, z_sum, count and correct (see `next_token_loss`), to be added up over batches."""
    graphdef = graph(config.model)

    def eval_step(params, batch):
        model = nnx.merge(graphdef, params)
        with linear.for_cpu():
            hidden, _ = model.hidden(batch["tokens"], batch["positions"], batch["segment_ids"])
            return _sums(model, hidden, batch, config)

    return eval_step


def _sums(model: Transformer, hidden: Array, batch: Batch, config: RunConfig) -> dict[str, Any]:
    return next_token_loss(
        hidden,
        model.unembedding(),
        batch["targets"],
        batch["loss_mask"],
        z_loss=config.train.z_loss,
        chunk=config.train.loss_chunk,
    )


def _router(aux: dict) -> dict[str, Array]:
    layers = {
        "router_entropy": aux["router_entropy"],
        "router_dropped": aux["router_dropped"],
        "router_max_load": aux["router_load"].max(-1),
    }
    return {
        "load_balance": aux["load_balance"],
        "router_z": aux["router_z"],
        "router_entropy": layers["router_entropy"].mean(),
        "router_dropped": layers["router_dropped"].mean(),
        "router_max_load": layers["router_max_load"].max(),
        **{f"{name}_layers": value for name, value in layers.items()},
    }
