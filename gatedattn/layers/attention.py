"""Grouped-query attention with gates."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from gatedattn import gates as gates_lib
from gatedattn import kernels
from gatedattn.config import NSAConfig, RopeConfig, SwitchConfig, TransformerConfig
from gatedattn.gates import GateSpec
from gatedattn.kernels.prefix import Prefix
from gatedattn.kernels.weights import Weights
from gatedattn.layers import rope as rope_lib
from gatedattn.layers.linear import Linear
from gatedattn.layers.norm import RMSNorm
from gatedattn.layers.nsa import SparseAttention
from gatedattn.layers.switch import Router, before_output, project_in
from gatedattn.sharding import constrain

Probe = Callable[..., dict[str, Array]]


class Cache(Protocol):
    """Keys and values of earlier tokens of one layer (see `gatedattn.inference.cache`)."""

    def attend(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        *,
        rope: RopeConfig | None,
        window: int,
        weights: Weights,
        prefix: Prefix | None,
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B N T"], Cache]:
        """What the attention kernel returns, over the tokens before and the T new ones, and the cache that holds both.

        q and k come without rotation; `window` and `weights` are the layer's own. `prefix`: see `gatedattn.kernels.attention`; its
        keys are rotated, and stand right before position 0."""

    def extend(
        self, k: Float[Array, "B T M H"], v: Float[Array, "B T M H"]
    ) -> tuple[Float[Array, "B S M H"], Float[Array, "B S M H"], Int[Array, "B T"], Cache]:
        """All keys and values by their position in the row, the new ones' positions, and the cache that holds both."""


class Gate(nnx.Module):
    """One gate (see `gatedattn.gates.GateSpec`) with its parameters: `(y, source) -> (y', score)`.

    Args:
        d_model: D, the width of the hidden source and of the tensor that g5 gates.
        num_heads, head_dim: of the gated tensor (K heads for g2 and g3); unused by g5.
        value_dim: the width of all value heads, K H, for the value source; num_heads * head_dim by default.
    """

    def __init__(
        self,
        spec: str | GateSpec,
        *,
        d_model: int,
        num_heads: int,
        head_dim: int,
        value_dim: int = 0,
        param_dtype=jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.spec = spec if isinstance(spec, GateSpec) else GateSpec.parse(spec)
        params = gates_lib.init(rngs.params(), self.spec, d_model, num_heads, head_dim, param_dtype, value_dim)
        self.kernel, self.table, self.bias = (
            nnx.Param(params[n]) if n in params else None for n in ("kernel", "table", "bias")
        )

    def __call__(
        self, y: Float[Array, "..."], source: Float[Array, "B T ..."] | None
    ) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
        params = {n: p[...] for n in ("kernel", "table", "bias") if (p := getattr(self, n)) is not None}
        score = gates_lib.scores(self.spec, params, source)
        return gates_lib.apply(self.spec, y, score), score


class GatedAttention(nnx.Module):
    """Causal grouped-query attention with a gate at any of the paper's positions (arXiv 2505.06708, section 2.2).

        q, k, v = x W_q, x W_k, x W_v;   q, k = RMSNorm(q), RMSNorm(k) per head;   g4 on q, g3 on k, g2 on v;   RoPE on q, k
        y = softmax(q k^T / sqrt(H)) v;   g1 on y;   y W_o;   g5 on the result

    Args:
        num_heads, num_kv_heads: N and K; N is a multiple of K.
        head_dim: H.
        d_model: D.
        gates: what `gatedattn.gates.parse` reads: "g1", "g1:headwise+g2", a `GateSpec`, a list of them, "none".
        qk_norm: RMSNorm with a learned weight [H] on every query and key head (arXiv 2302.05442).
        rope: rotary settings; None for no rotation.
        window: attend to the last `window` tokens, the query's own included; 0 for all.
        sink: "learned": a logit per head joins the softmax and its probability is dropped (gpt-oss); "off_by_one": that logit is
            fixed at 0 (softmax-off-by-one, evanmiller.org/attention-is-off-by-one.html). y * sigmoid(lse - logit) is the same.
        attention: "softmax", "sigmoid" or "softpick", see `gatedattn.kernels.weights.Weights`; sigmoid attention needs
            sigmoid_length, the n of its bias -ln n.
        sdpa_norm: RMSNorm on each head's y; sdpa_activation: "silu" on y. The paper's parameter-poor controls (Table 3).
        switch: experts in place of the key, value and output projections (SwitchHead), see `gatedattn.layers.switch`.
        nsa: compressed, selected and sliding branches in place of attention to all tokens, see `gatedattn.layers.nsa`.
        use_bias, output_bias: biases of the q, k, v projections and of the output projection.
        dtype, param_dtype: of the computation and of the parameters. Scores, norms and gates are float32 inside.
        kernel: attention implementation, see `gatedattn.kernels`. All differentiate backwards only, but "reference", which JAX
            can differentiate forwards (`jax.jvp`) too.

    Raises:
        ValueError: a setting that `TransformerConfig` would refuse (sizes, heads, rope, gates, ...).
    """

    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        d_model: int,
        gates: str | GateSpec | tuple = "g1",
        qk_norm: bool = True,
        rope: RopeConfig | None = RopeConfig(),
        window: int = 0,
        sink: str = "none",
        attention: str = "softmax",
        sigmoid_length: int = 0,
        sdpa_norm: bool = False,
        sdpa_activation: str = "none",
        switch: SwitchConfig = SwitchConfig(),
        nsa: NSAConfig = NSAConfig(),
        use_bias: bool = False,
        output_bias: bool = False,
        norm_eps: float = 1e-6,
        norm_zero_centered: bool = False,
        init_std: float = 0.02,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
        kernel: str = "auto",
        rngs: nnx.Rngs,
    ):
        specs = gates_lib.parse(gates)
        TransformerConfig(  # one place says what can be
            vocab_size=1, ffn_dim=1, num_layers=1, d_model=d_model, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim,
            gates=gates_lib.format(specs), window=window, sink=sink, sdpa_activation=sdpa_activation, norm_eps=norm_eps,
            init_std=init_std, kernel=kernel, position="none" if rope is None else "rope", rope=rope or RopeConfig(),
            attention=attention, sigmoid_length=sigmoid_length, switch=switch, nsa=nsa, attention_bias=use_bias,
        )  # fmt: skip
        self.switch = switch
        projected = num_kv_heads * nsa.branches
        kv_heads = num_heads if switch.query_routers else projected
        self.weights = Weights(attention, -math.log(sigmoid_length) if sigmoid_length else 0.0)
        self.head_dim, self.rope, self.window, self.sink_kind = head_dim, rope, window, sink
        self.sdpa_activation, self.kernel = sdpa_activation, kernel

        weights = dict(init_std=init_std, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        linear = functools.partial(Linear, **weights)
        self.query = linear(d_model, (num_heads, head_dim), bias=use_bias)
        self.key = linear(d_model, (projected, switch.widths("k") * head_dim), bias=use_bias)
        self.value = linear(d_model, (projected, switch.widths("v") * head_dim), bias=use_bias)
        self.output = linear((num_heads, switch.widths("o") * head_dim), d_model, bias=output_bias)
        router = functools.partial(Router, d_model, config=switch, param_dtype=param_dtype, rngs=rngs)
        self.value_router = router(kv_heads) if "v" in switch.projections else None
        self.output_router = router(num_heads) if "o" in switch.projections else None

        sizes = dict(d_model=d_model, num_heads=num_heads, head_dim=head_dim)
        self.sparse = SparseAttention(nsa, **sizes, **weights) if nsa.enabled else None

        norm = functools.partial(RMSNorm, head_dim, eps=norm_eps, zero_centered=norm_zero_centered, param_dtype=param_dtype)
        self.query_norm, self.key_norm = (norm(), norm()) if qk_norm else (None, None)
        self.sdpa_norm = norm() if sdpa_norm else None
        self.sink = nnx.Param(jnp.zeros((num_heads,), param_dtype)) if sink == "learned" else None
        self.gates = nnx.List(
            Gate(
                spec,
                d_model=d_model,
                num_heads=kv_heads if spec.position in ("g2", "g3") else num_heads,
                head_dim=head_dim,
                value_dim=kv_heads * head_dim,
                param_dtype=param_dtype,
                rngs=rngs,
            )
            for spec in specs
        )

    def __call__(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        *,
        probe: Probe | None = None,
        cache: Cache | None = None,
        prefix: Prefix | None = None,
        keep: bool = False,
    ) -> tuple[Float[Array, "B T D"], dict]:
        """Attend within each row, or within each segment of it; with a cache, to the tokens before as well.

        Args:
            x: the layer's input after its norm; also the gates' hidden source.
            positions: for RoPE; 0 .. T-1 by default.
            segment_ids: documents packed into a row do not see each other; one document by default.
            probe: called as `probe("attention", ...)` with what happened inside; its result is returned as aux["probe"].
            cache: keys and values of the tokens before x; then `positions` and `segment_ids` are the cache's business. The cache
                with x's own keys and values added is returned as aux["cache"].
            prefix: keys and values, [m, K, H] each, that all queries see as well (register tokens; see `Transformer.prefix`).
            keep: return the first row's own keys and values as aux["prefix"]; not with a cache.
        """
        D = self.query.kernel.shape[0]
        if x.ndim != 3 or x.shape[-1] != D or 0 in x.shape:
            raise ValueError(f"x of shape {x.shape}: must be [B, T, {D}], with B and T of at least 1")
        for name, ids in (("positions", positions), ("segment_ids", segment_ids)):
            if ids is None or isinstance(ids, rope_lib.Turns):
                continue
            if ids.shape != x.shape[:2] or not jnp.issubdtype(ids.dtype, jnp.integer):
                raise ValueError(f"{name} {ids.dtype}{ids.shape}: must be integers of shape {x.shape[:2]}, as x is {x.shape}")
        if self.sparse is not None and (prefix is not None or keep):
            raise ValueError(
                "prefix and keep (register tokens) with sparse attention: its branches read the row's own tokens only"
            )
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
        scores: dict[str, Array] = {}
        sources: dict[str, Array | None] = {}

        def gate(position: str, y, query=None):
            for g in self.gates:
                if g.spec.position == position:
                    match g.spec.source:
                        case "hidden":
                            source = x
                        case "value":
                            source = constrain(v, "BT..").reshape(*v.shape[:2], -1)
                        case "slice":
                            source = constrain(x, "BT.").reshape(*y.shape[:3], -1)
                        case other:
                            source = {"query": query, "self": y, "none": None}[other]
                    sources[str(g.spec)] = source
                    y, scores[str(g.spec)] = g(y, source)
            return y

        with jax.named_scope("qkv"):
            q = constrain(self.query(x), "BTNH")
            chosen = None if self.value_router is None else self.value_router(x)

            def project(linear, letter):
                if letter in self.switch.projections:
                    return constrain(project_in(linear, x, chosen, self.switch), "BTKH")
                y = constrain(linear(x), "BTKH")
                if not self.switch.query_routers:
                    return y
                shape = (*y.shape[:3], q.shape[2] // y.shape[2], y.shape[3])
                return constrain(jnp.broadcast_to(y[..., None, :], shape).reshape(q.shape), "BTNH")

            k, v = project(self.key, "k"), project(self.value, "v")
            if self.query_norm is not None:
                q, k = self.query_norm(q), self.key_norm(k)
        with jax.named_scope("gate"):
            query = q  # normalised, not yet rotated: the "query" source
            q, k, v = gate("g4", q, query), gate("g3", k), gate("g2", v)
        if self.rope is not None and cache is None and self.sparse is None:
            q, k = (rope_lib.apply(z, positions, self.rope) for z in (q, k))

        with jax.named_scope("sdpa"):
            if self.sparse is None:
                y, updated, seen = self._attend(q, k, v, segment_ids, cache, prefix)
            else:
                y, updated, seen = self._attend_sparsely(x, q, k, v, positions, segment_ids, cache)
            y = constrain(y, "BTNH")
            if self.sdpa_norm is not None:
                y = self.sdpa_norm(y)
            if self.sdpa_activation == "silu":
                y = jax.nn.silu(y)
        with jax.named_scope("gate"):
            gated = constrain(gate("g1", y, query), "BTNH")
        with jax.named_scope("output"):
            inner = gated if self.output_router is None else before_output(gated, self.output_router(x), self.switch)
            out = gate("g5", constrain(self.output(inner), "BTD"))

        aux = {} if updated is None else {"cache": updated}
        aux |= {"prefix": (k[0], v[0])} if keep else {}
        if probe is not None:
            aux["probe"] = probe(
                "attention",
                **seen,
                q=q,
                k=k,
                v=v,
                window=self.window,
                weights=self.weights,
                sdpa=y,
                gated=gated,
                scores=scores,
                out=out,
                gates=self.gates,
                sources=sources,
            )
        return out, aux

    def _attend(self, q, k, v, segment_ids, cache, prefix):
        """The SDPA output, the grown cache, and what a probe may see of it."""
        scale, updated = q.shape[-1] ** -0.5, None
        sinks = {"learned": self.sink, "off_by_one": jnp.zeros(q.shape[2], jnp.float32)}.get(self.sink_kind)
        sinks = None if sinks is None else sinks[...]
        attend = functools.partial(
            kernels.attention, segment_ids=segment_ids, window=self.window, weights=self.weights, kernel=self.kernel
        )
        if cache is None:
            y, lse = attend(q, k, v, sinks=sinks, prefix=prefix)
            other = kernels.taken(q, sinks, prefix, scale)
        else:  # rotates by itself: where a key stands may depend on what was evicted
            attend = functools.partial(cache.attend, rope=self.rope, window=self.window, weights=self.weights, prefix=prefix)
            y, lse, updated = attend(q, k, v)
            y = y if sinks is None else kernels.add_sinks(y, lse, sinks)
            other = None if sinks is None else sinks[:, None]
        kept = None if other is None else kernels.kept(lse, other)
        return y, updated, {"attend": attend, "lse": lse, "kept": kept, "mass": None, "branches": None}

    def _attend_sparsely(self, x, q, k, v, positions, segment_ids, cache):
        nothing = {"attend": None, "lse": None, "kept": None}
        if cache is None:
            y, mass, branches = self.sparse(x, q, k, v, positions, segment_ids, rope=self.rope, kernel=self.kernel)
            return y, None, nothing | {"mass": mass, "branches": branches}
        keys, values, t, updated = cache.extend(k, v)
        y = self.sparse.cached(x, q, keys, values, t, rope=self.rope)
        return y, updated, nothing | {"mass": None, "branches": None}
