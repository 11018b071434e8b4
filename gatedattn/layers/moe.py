"""Mixture of experts."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array, Bool, Float

from gatedattn.config import MoEConfig
from gatedattn.layers.linear import Linear
from gatedattn.layers.mlp import MLP
from gatedattn.sharding import explicit


class ExpertWeights(nnx.Module):
    """One matrix per expert, [E, I, O] ~ N(0, init_std^2)."""

    def __init__(self, num_experts: int, inputs: int, outputs: int, *, init_std, param_dtype, rngs: nnx.Rngs):
        shape = (num_experts, inputs, outputs)
        self.kernel = nnx.Param(init_std * jax.random.normal(rngs.params(), shape, param_dtype))


class MoE(nnx.Module):
    """y = sum over the top-k experts e of w_e SwiGLU_e(x) (+ a shared expert), p = softmax(x W_router) in float32.

    w are the top-k of p, divided by their sum if `renormalize`. Dropless: the token-expert pairs are sorted by expert and each
    expert multiplies its own contiguous rows (`jax.lax.ragged_dot`). aux, all float32, over tokens that are not padding:

        load_balance    E sum_e f_e P_e, f_e the share of assignments to e and P_e the mean probability of e; 1 when uniform
                        (arXiv 2006.16668, 2101.03961; over the global batch: arXiv 2501.11873)
        router_z        mean of logsumexp(router logits)^2 (arXiv 2202.08906)
        router_load     [E], f_e
        router_entropy  mean entropy of p, nats

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
        if not explicit():
            return self._mix(x, valid)
        # Sorting tokens by expert has no sharding that types could follow: here the compiler may choose.
        mesh = jax.sharding.get_abstract_mesh()
        axes = tuple(axis for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit)
        aux = dict.fromkeys(("load_balance", "router_z", "router_load", "router_entropy"), PartitionSpec())
        mix = jax.sharding.auto_axes(MoE._mix, axes=axes, out_sharding=(jax.typeof(x).sharding.spec, aux))
        return mix(self, x, valid)

    def _mix(self, x, valid):
        E, k = self.config.num_experts, self.config.top_k
        rows = x.reshape(-1, x.shape[-1])
        logits = self.router(rows)
        probs = jax.nn.softmax(logits, axis=-1)
        weights, experts = jax.lax.top_k(probs, k)
        if self.config.renormalize:
            weights = weights / weights.sum(-1, keepdims=True)

        assignments = experts.reshape(-1)  # token r's choices stand at r*k .. r*k + k-1
        order = jnp.argsort(assignments, stable=True)
        sizes = jnp.bincount(assignments, length=E).astype(jnp.int32)
        inputs = rows[order // k]
        gate, up, down = (w.kernel[...].astype(self.dtype) for w in (self.gate, self.up, self.down))
        inner = jax.nn.silu(jax.lax.ragged_dot(inputs, gate, sizes)) * jax.lax.ragged_dot(inputs, up, sizes)
        outputs = jax.lax.ragged_dot(inner, down, sizes)
        outputs = jnp.zeros_like(outputs).at[order].set(outputs).reshape(-1, k, x.shape[-1])
        y = jnp.einsum("rk,rkd->rd", weights.astype(self.dtype), outputs).reshape(x.shape)

        if self.shared is not None:
            shared = self.shared(x)
            y = y + (shared if self.score is None else jax.nn.sigmoid(self.score(x)) * shared)

        counted = jnp.ones(len(rows)) if valid is None else valid.reshape(-1).astype(jnp.float32)
        total = jnp.maximum(counted.sum(), 1.0)
        load = jnp.bincount(assignments, weights=jnp.repeat(counted, k), length=E) / (total * k)
        entropy = -(probs * jax.nn.log_softmax(logits, axis=-1)).sum(-1)
        aux = {
            "load_balance": E * jnp.sum(load * (counted @ probs) / total),
            "router_z": counted @ jax.nn.logsumexp(logits, axis=-1) ** 2 / total,
            "router_load": load,
            "router_entropy": counted @ entropy / total,
        }
        return y, aux
