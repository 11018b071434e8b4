"""Mixture of experts."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from gatedattn.config import MoEConfig
from gatedattn.kernels.grouped import grouped_matmul
from gatedattn.layers.linear import Linear
from gatedattn.layers.mlp import MLP
from gatedattn.sharding import division, map_shards


class ExpertWeights(nnx.Module):
    """One matrix per expert, [E, I, O] ~ N(0, init_std^2)."""

    def __init__(self, num_experts: int, inputs: int, outputs: int, *, init_std, param_dtype, rngs: nnx.Rngs):
        shape = (num_experts, inputs, outputs)
        self.kernel = nnx.Param(init_std * jax.random.normal(rngs.params(), shape, param_dtype))


class MoE(nnx.Module):
    """y = sum over the top-k experts e of w_e SwiGLU_e(x) (+ a shared expert), p = softmax(x W_router) in float32.

    w are the top-k of p, divided by their sum if `renormalize`. Dropless by default: the token-expert pairs are sorted by expert and
    each expert multiplies its own contiguous rows (`gatedattn.kernels.grouped`). With `capacity` > 0 an expert takes at most
    ceil(capacity * k R / E) of the R tokens of each device, the first come, and the rest lose that expert's share (arXiv 2006.16668).

    Under a mesh each device works on its own tokens. `mesh.expert` divides the experts. Dropless, every device of that axis then
    gathers the others' tokens, applies its own experts, and the sums are scattered back: with k about as large as the axis
    this moves no more than sending each token to its experts would, and needs no room for a worst case on the way. With a capacity
    the rows of each expert have a fixed number and are sent there and back (all-to-all).

    aux, all float32, over the tokens of all devices that are not padding:

        load_balance    E sum_e f_e P_e, f_e the share of assignments to e and P_e the mean probability of e; 1 when uniform
                        (arXiv 2006.16668, 2101.03961; over the global batch: arXiv 2501.11873)
        router_z        mean of logsumexp(router logits)^2 (arXiv 2202.08906)
        router_load     [E], f_e
        router_entropy  mean entropy of p, nats
        router_dropped  share of assignments that no expert took

    Args:
        d_model: D.
        config, fields: a `MoEConfig`, or its fields as keywords: `MoE(512, num_experts=8, top_k=2, expert_dim=256, rngs=rngs)`.

    Raises:
        ValueError: no experts, or more to be chosen than there are.
    """

    def __init__(
        self,
        d_model: int,
        config: MoEConfig | None = None,
        *,
        init_std: float = 0.02,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
        rngs: nnx.Rngs,
        **fields: Any,
    ):
        config = dataclasses.replace(config or MoEConfig(), **fields)
        if not config.num_experts:
            raise ValueError("MoE: num_experts must be given and positive")
        self.config, self.dtype = config, dtype
        weights = dict(init_std=init_std, param_dtype=param_dtype, rngs=rngs)
        E, F = config.num_experts, config.expert_dim
        self.router = Linear(d_model, E, dtype=jnp.float32, **weights)
        self.gate = ExpertWeights(E, d_model, F, **weights)
        self.up = ExpertWeights(E, d_model, F, **weights)
        self.down = ExpertWeights(E, F, d_model, **weights)
        self.shared = MLP(d_model, config.shared_dim, dtype=dtype, **weights) if config.shared_dim else None
        self.score = Linear(d_model, 1, dtype=dtype, **weights) if config.shared_dim and config.shared_gate else None

    def __call__(
        self, x: Float[Array, "B T D"], valid: Bool[Array, "B T"] | None = None
    ) -> tuple[Float[Array, "B T D"], dict[str, Array]]:
        """`valid`: which tokens count in aux; all by default."""
        E, k = self.config.num_experts, self.config.top_k
        logits = self.router(x)
        probs = jax.nn.softmax(logits, axis=-1)
        weights, choices = lax.top_k(probs, k)
        if self.config.renormalize:
            weights = weights / weights.sum(-1, keepdims=True)
        y, taken = self._experts(x, weights, choices)

        if self.shared is not None:
            shared = self.shared(x)
            y = y + (shared if self.score is None else jax.nn.sigmoid(self.score(x)) * shared)

        counted = jnp.ones(x.shape[:2]) if valid is None else valid.astype(jnp.float32)
        total = jnp.maximum(counted.sum(), 1.0)

        def mean(z: Float[Array, "B T *M"]) -> Float[Array, "*M"]:
            return (z * counted.reshape(counted.shape + (1,) * (z.ndim - 2))).sum((0, 1)) / total

        load = mean((choices[..., None] == jnp.arange(E)).sum(2, dtype=jnp.float32)) / k
        aux = {
            "load_balance": E * jnp.sum(load * mean(probs)),
            "router_z": mean(jax.nn.logsumexp(logits, axis=-1) ** 2),
            "router_load": load,
            "router_entropy": mean(-(probs * jax.nn.log_softmax(logits, axis=-1)).sum(-1)),
            "router_dropped": 1 - mean(taken) / k,
        }
        return y, aux

    def _experts(self, x, weights, choices):
        """The weighted sum of the chosen experts, and how many of its choices took each token."""
        gate, up, down = (w.kernel[...].astype(self.dtype) for w in (self.gate, self.up, self.down))
        axes = {
            "tokens": "expert" if "expert" in division("B", len(x)) else None,
            "experts": next(iter(division("e", len(gate))), None),
            "width": next(iter(division("d", gate.shape[1])), None),
            "hidden": next(iter(division("f", gate.shape[2])), None),
        }

        def on_shard(x, weights, choices, gate, up, down):
            if axes["width"]:  # FSDP: the gradient is a reduce-scatter
                gate, up = (lax.all_gather(w, axes["width"], axis=1, tiled=True) for w in (gate, up))
                down = lax.all_gather(down, axes["width"], axis=2, tiled=True)
            rows, shape = x.reshape(-1, x.shape[-1]).astype(self.dtype), choices.shape
            weights, choices = (a.reshape(-1, shape[-1]) for a in (weights, choices))
            mix = _with_capacity if self.config.capacity else _dropless
            y, taken = mix(rows, weights, choices, (gate, up, down), axes, self.config)
            if axes["hidden"]:
                y = lax.psum(y, axes["hidden"])
            return y.reshape(x.shape), taken.reshape(shape[:2])

        letters = ("BT.", "BT.", "BT.", "edf", "edf", "efd")
        return map_shards(on_shard, (x, weights, choices, gate, up, down), letters, ("BT.", "BT"))


def _dropless(rows, weights, choices, matrices, axes, config):
    R, k = choices.shape
    E, axis = len(matrices[0]), axes["experts"]  # E: of this device
    devices = lax.axis_size(axis) if axis else 1
    if axis:
        if axes["tokens"]:
            rows, weights, choices = (lax.all_gather(a, axis, tiled=True) for a in (rows, weights, choices))
        choices = choices - lax.axis_index(axis) * E
        choices = jnp.where((choices >= 0) & (choices < E), choices, E)  # others' experts: sorted to the end
    assignments = choices.reshape(-1)  # token r's choices stand at r * k .. r * k + k - 1
    order = jnp.argsort(assignments, stable=True)
    place = jnp.argsort(order)  # order's inverse: where each assignment went
    sizes = _count(assignments, E)
    limit = len(assignments)
    if axis and config.expert_buffer:
        limit = min(limit, math.ceil(config.expert_buffer * len(assignments) / devices))
        ends = jnp.minimum(jnp.cumsum(sizes), limit)
        sizes = jnp.diff(ends, prepend=0)
    y = _apply(rows, weights, order[:limit], place, lambda x, w: grouped_matmul(x, w, sizes, config.kernel), matrices)
    taken = ((choices < E) & (place < limit).reshape(choices.shape)).sum(-1, dtype=jnp.float32)
    if axis and axes["tokens"]:
        y, taken = (lax.psum_scatter(a, axis, tiled=True) for a in (y, taken))
    elif axis:
        y, taken = lax.psum((y, taken), axis)
    return y, taken


def _count(assignments: Int[Array, " Rk"], E: int) -> Int[Array, " E"]:
    """How many go to each expert: a comparison, which fuses, where `bincount` would scatter."""
    return (assignments[:, None] == jnp.arange(E)).sum(0, dtype=jnp.int32)


def _with_capacity(rows, weights, choices, matrices, axes, config):
    R, k = choices.shape
    axis = axes["experts"]
    devices = lax.axis_size(axis) if axis else 1
    E = len(matrices[0]) * devices
    C = min(R, math.ceil(config.capacity * R * k / E))
    assignments = choices.reshape(-1)
    order = jnp.argsort(assignments, stable=True)
    sizes = _count(assignments, E)
    starts = jnp.cumsum(sizes) - sizes
    rank = jnp.argsort(order) - starts[assignments]  # how many assignments to the same expert come before
    place = jnp.where(rank < C, assignments * C + rank, E * C)
    c = jnp.arange(C)
    slots = jnp.where(c < sizes[:, None], order[jnp.minimum(starts[:, None] + c, R * k - 1)], R * k)  # [E, C]

    def matmul(x, w):
        return jnp.einsum("eci,eio->eco", x, w)

    def exchange(x, back=False):
        """[E, C, .] of all experts here <-> [E of this device, devices * C, .]."""
        x = x.reshape(E, C, -1) if not back else x
        if axis and axes["tokens"]:
            split, concat = (1, 0) if back else (0, 1)
            return lax.all_to_all(x, axis, split_axis=split, concat_axis=concat, tiled=True)
        if axis and not back:  # the same tokens everywhere
            return lax.dynamic_slice_in_dim(x, lax.axis_index(axis) * (E // devices), E // devices)
        return lax.all_gather(x, axis, tiled=True) if axis else x

    y = _apply(rows, weights, slots.reshape(-1), place, matmul, matrices, exchange)
    return y, (place < E * C).reshape(R, k).sum(-1, dtype=jnp.float32)


def _apply(rows, weights, order, place, matmul, matrices, exchange=lambda x, back=False: x):
    """sum_j weight[r, j] SwiGLU(rows[r]): slot s holds assignment order[s], assignment r * k + j lies in slot place[r * k + j].

    An assignment whose slot is out of range, or a slot whose assignment is, counts as zero.
    """
    gate, up, down = matrices
    x = exchange(_spread(rows, order, place))
    share = exchange(_spread(weights.reshape(-1, 1).astype(rows.dtype), order, place))
    inner = share * (jax.nn.silu(matmul(x, gate)) * matmul(x, up))  # weighted here, where rows are narrow
    return _collect(exchange(matmul(inner, down), back=True).reshape(len(order), -1), order, place, len(rows))


# Gathers both ways: of what XLA makes of a gather's transpose, one direction would be a scatter.


def _take(x, index):
    return x.at[index].get(mode="fill", fill_value=0)


@jax.custom_vjp
def _spread(rows: Float[Array, "R D"], order: Int[Array, " s"], place: Int[Array, " Rk"]) -> Float[Array, "s D"]:
    """To slot s row order[s] // k."""
    return _take(rows, order // (len(place) // len(rows)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _collect(slots: Float[Array, "s D"], order: Int[Array, " s"], place: Int[Array, " Rk"], R: int) -> Float[Array, "R D"]:
    """To row r the sum over j of slot place[r * k + j]."""
    dtype = jnp.promote_types(slots.dtype, jnp.float32)
    return sum(_take(slots, index).astype(dtype) for index in place.reshape(R, -1).T).astype(slots.dtype)


_spread.defvjp(
    lambda rows, order, place: (_spread(rows, order, place), (order, place, len(rows))),
    lambda saved, g: (_collect(g, *saved), None, None),
)
_collect.defvjp(
    lambda slots, order, place, R: (_collect(slots, order, place, R), (order, place)),
    lambda R, saved, g: (_spread(g, *saved), None, None),
)
