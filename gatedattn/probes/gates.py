"""How open the gates are."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from gatedattn import gates as gates_lib
from gatedattn.gates import GateSpec
from gatedattn.layers.attention import Gate
from gatedattn.probes.attention import mean

BINS = 50
RANGES = {"sigmoid": (0.0, 1.0), "ns_sigmoid": (0.0, 1.0), "tanh": (-1.0, 1.0)}  # of an activation; others have no end


def edges(spec: str | GateSpec) -> Float[np.ndarray, "BINS+1"]:
    """The bin edges of a gate's histogram: its range in even steps, -4 .. 4 if it has none; the outer bins take what lies beyond."""
    spec = GateSpec.parse(spec) if isinstance(spec, str) else spec
    return spec.scale * np.linspace(*RANGES.get(spec.activation, (-4.0, 4.0)), BINS + 1)


def by_head(score: Float[Array, "..."], real: Bool[Array, "B T"]) -> tuple[Float[Array, "B T M C"], Bool[Array, "B T"]]:
    """Scores with all their dimensions, and which tokens count: g5 is one head, an input-independent table one token."""
    if score.ndim <= 2:
        score, real = score[None, None], jnp.ones((1, 1), bool)
    return (score[:, :, None] if score.ndim == 3 else score), real


def shares(score: Float[Array, "..."], real: Bool[Array, "B T"]) -> dict[str, Float[Array, " M"]]:
    """mean, below_0.1 and above_0.9 of a gate's scores, per head, over tokens that are not padding and channels."""
    score, real = by_head(score, real)
    return {
        "mean": mean(score.mean(-1), real),
        "below_0.1": mean((score < 0.1).mean(-1, dtype=jnp.float32), real),
        "above_0.9": mean((score > 0.9).mean(-1, dtype=jnp.float32), real),
    }


def details(gate: Gate, score: Float[Array, "..."], source: Array | None, real: Bool[Array, "B T"]) -> dict[str, Array]:
    """What `shares` does not tell about a gate; see `gatedattn.probes.inspect`."""
    spec = gate.spec
    # A layer where scores are averaged over heads still has the heads' own logits.
    raw = dataclasses.replace(
        spec, activation="identity", scale=1.0, sharing="specific" if spec.sharing == "mean" else spec.sharing
    )
    params = {name: p[...] for name in ("kernel", "table", "bias") if (p := getattr(gate, name)) is not None}
    logits = by_head(gates_lib.scores(raw, params, source), real)[0]
    score, real = by_head(score, real)
    keep = real[:, :, None, None]
    result = {
        "deciles": _deciles(score, keep),
        "histogram": _histogram(score, keep, edges(spec)),
        "openness": score.mean(-1),
        "weight_norm": _weight_norm(gate),
        "logit_min": jnp.where(keep, logits, jnp.inf).min((0, 1, 3)),
        "logit_max": jnp.where(keep, logits, -jnp.inf).max((0, 1, 3)),
    }
    if spec.activation in ("sigmoid", "ns_sigmoid"):
        p = score / spec.scale
        uncertainty = -(jax.scipy.special.xlogy(p, p) + jax.scipy.special.xlog1py(1 - p, -p))
        result["entropy"] = mean(uncertainty.mean(-1), real)
    return result


def _deciles(score: Float[Array, "B T M C"], keep: Bool[Array, "B T 1 1"]) -> Float[Array, "M 9"]:
    """The 10 %, 20 %, ... 90 % quantiles per head, interpolated between neighbours as numpy does."""
    M, C = score.shape[2:]
    ordered = jnp.sort(jnp.where(keep, score, jnp.inf).swapaxes(0, 2).reshape(M, -1), axis=-1)
    at = jnp.arange(1, 10) / 10 * (keep.sum() * C - 1)
    low = jnp.floor(at).astype(jnp.int32)
    high = jnp.minimum(low + 1, keep.sum() * C - 1)
    return ordered[:, low] + (at - low) * (ordered[:, high] - ordered[:, low])


def _histogram(score: Float[Array, "B T M C"], keep: Bool[Array, "B T 1 1"], edges: np.ndarray) -> Float[Array, "M BINS"]:
    """The share of scores in each bin, by counting how many lie below each edge: nothing as large as the scores is made."""

    def below(edge):
        return (keep & (score < edge)).sum((0, 1, 3), dtype=jnp.int32)

    inner = jax.lax.map(below, jnp.asarray(edges[1:-1], score.dtype))
    total = jnp.full_like(inner[:1], keep.sum() * score.shape[-1])
    counts = jnp.diff(jnp.concatenate([jnp.zeros_like(total), inner, total]), axis=0)
    return (counts / jnp.maximum(total, 1)).T


def _weight_norm(gate: Gate) -> Float[Array, " M"]:
    """Frobenius norm of each head's part of the projection (or of the table)."""
    spec, weight = gate.spec, gate.table if gate.kernel is None else gate.kernel
    w = weight[...].astype(jnp.float32)
    if not spec.per_head or spec.sharing == "shared":
        return jnp.sqrt((w**2).sum())[None]
    heads = 1 if spec.source in ("hidden", "value") else 0
    return jnp.sqrt((w**2).sum([axis for axis in range(w.ndim) if axis != heads]))
