"""Where attention goes, without a T x T map: the layer's own attention kernel runs again on values that are indicators."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from gatedattn.kernels import reference
from gatedattn.kernels.weights import SOFTMAX
from gatedattn.transformer import Transformer

FIRST = 4  # tokens at the beginning of a document that are watched one by one


def documents_start(segment_ids: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """Where a document (a segment of a packed row) begins."""
    return jnp.concatenate([jnp.ones_like(segment_ids[:, :1], bool), segment_ids[:, 1:] != segment_ids[:, :-1]], axis=1)


def places(first: Bool[Array, "B T"]) -> Int[Array, "B T"]:
    """Each token's number within its document, from 0."""
    at = jnp.arange(first.shape[1])
    return at - jax.lax.cummax(jnp.where(first, at, 0), axis=1)


def mean(x: Float[Array, "B T *M"], weight: Bool[Array, "B T"]) -> Float[Array, "*M"]:
    """Mean over the tokens where `weight` is true; 0 if there are none."""
    return jnp.einsum("bt...,bt->...", x, weight.astype(x.dtype)) / jnp.maximum(weight.sum(), 1)


class Attention:
    """One layer's attention probabilities p[t, s], summed up over s in several ways, each [B, T, N] in at least float32.

    q, k, lse, kept, weights, attend, mass: what `GatedAttention` hands to a probe. Probability that a learned sink or a softmax-off-by-one
    takes belongs to no token: it lowers `on_first`, `on_self` and `on_previous`. `entropy` and `distance` are of the rest. Sigmoid
    attention and softpick have weights that need not sum to 1: the first three show them as they are, distance is that of the weights
    divided by their sum, and the entropy is NaN (it is no sum over the keys of what the kernel can be asked for). So are those of
    sparse attention, gates included (see `gatedattn.layers.nsa`); there `on_self` and `on_previous` are NaN, too.
    """

    def __init__(self, place: Int[Array, "B T"], *, q, k, lse, kept, weights, attend, mass):
        # float32 indicators would be multiplied by probabilities rounded to the values' dtype: float32 throughout.
        wide = jnp.promote_types(q.dtype, jnp.float32)
        self.q, self.k, self.attend, self.place, self.weights = q.astype(wide), k.astype(wide), attend, place, weights
        self.mass, self.normalized = mass, weights == SOFTMAX and mass is None
        self.lse = jnp.full(q.shape[:3], jnp.nan) if lse is None else lse.swapaxes(1, 2)  # [B, T, N]
        self.kept = jnp.ones(q.shape[:3]) if kept is None else kept[..., 0]

    def _indicated(self, values: Float[Array, "B S C"]) -> Float[Array, "B T N C"]:
        """sum_s p[t, s] values[s], by the kernel."""
        if self.mass is not None:
            return self.mass(values)
        B, T, C = values.shape
        v = jnp.broadcast_to(values[:, :, None].astype(self.q.dtype), (B, T, self.k.shape[2], C))
        return self.attend(self.q, self.k, v)[0]

    def on_first(self, count: int = 1) -> Float[Array, "B T N count"]:
        """Probability on each of the first tokens of the query's document."""
        return self._indicated(self.place[..., None] == jnp.arange(count)) * self.kept[..., None]

    def _on(self, key: Float[Array, "B T K H"]) -> Float[Array, "B T N"]:
        """Probability on one key per query: exp(score - lse) in a softmax."""
        if self.mass is not None:
            return self.lse
        key = jnp.repeat(key, self.q.shape[2] // key.shape[2], axis=2)
        score = self.q.shape[-1] ** -0.5 * jnp.einsum("btnh,btnh->btn", self.q, key)
        return self.weights.of(score[..., None], self.lse)[..., 0] * self.kept

    def on_self(self) -> Float[Array, "B T N"]:
        return self._on(self.k)

    def on_previous(self) -> Float[Array, "B T N"]:
        """Without meaning at the first token of a document."""
        return self._on(jnp.pad(self.k, ((0, 0), (1, 0), (0, 0), (0, 0)))[:, :-1])

    def entropy(self) -> Float[Array, "B T N"]:
        """-sum_s p ln p = lse - sum_s p[t, s] (score[t, s]), nats: the second term is the query times the mean key."""
        if not self.normalized:
            return jnp.full_like(self.lse, jnp.nan)
        mean_key = self.attend(self.q, self.k, self.k)[0]
        return self.lse - self.q.shape[-1] ** -0.5 * jnp.einsum("btnh,btnh->btn", self.q, mean_key)

    def distance(self) -> Float[Array, "B T N"]:
        """How many tokens back attention lies on average: t - sum_s p[t, s] s; 0 where it lies on nothing."""
        place = self.place[..., None].astype(self.q.dtype)
        if self.normalized:
            return place - self._indicated(place)[..., 0]
        total, mean = jnp.moveaxis(self._indicated(jnp.concatenate([jnp.ones_like(place), place], axis=-1)), -1, 0)
        return jnp.where(total > 0, place - mean / jnp.where(total > 0, total, 1), 0)


def attention_maps(
    model: Transformer,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
) -> Float[Array, "L B N T S"]:
    """Whole attention maps, for a short text: memory grows with L N T^2. What a sink logit takes is missing in the rows' sums."""

    def probe(kind, **captured):
        if kind == "block":
            return {}
        if captured["mass"] is not None:
            every = jnp.broadcast_to(jnp.eye(tokens.shape[1]), (*tokens.shape, tokens.shape[1]))
            return {"map": captured["mass"](every).swapaxes(1, 2)}
        q, k, kept = (captured[name] for name in ("q", "k", "kept"))
        options = {name: captured[name] for name in ("window", "weights")}
        probs = reference.probabilities(q, k, segment_ids=segment_ids, scale=q.shape[-1] ** -0.5, **options)[0]
        return {"map": probs if kept is None else probs * kept[..., 0].swapaxes(1, 2)[..., None]}

    return model.hidden(tokens, positions, segment_ids, probe=probe)[1]["probe"]["map"]
