"""Dense attention: the definition, for tests and for attention maps. Memory grows with T x S."""

import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from gatedattn.kernels.context import WHOLE, Shard
from gatedattn.kernels.weights import SOFTMAX, Weights


def visible(
    S: int, segment_ids: Int[Array, "B S"] | None, window: int, positions: Int[Array, " T"] | None = None
) -> Bool[Array, "B T S"]:
    """Which keys s each query t sees: s <= t, of the same document, and among the last `window` tokens (0: all).

    `positions`: the tokens that the queries are; all of them, in order, by default."""
    s = jnp.arange(S)
    t = s if positions is None else positions
    mask = (s <= t[:, None]) & ((t[:, None] - s < window) | (window == 0))
    if segment_ids is None:
        return mask[None]
    return mask & (jnp.take(segment_ids, t, axis=1)[..., None] == segment_ids[:, None])


def probabilities(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    *,
    segment_ids: Int[Array, "B S"] | None = None,
    window: int = 0,
    scale: float,
    shard: Shard = WHOLE,
    weights: Weights = SOFTMAX,
    selected: tuple[Bool[Array, "B K T J"], int] | None = None,
) -> tuple[Float[Array, "B N T S"], Float[Array, "B N T"]]:
    """softmax(scale q k^T) over the visible keys, and its log-sum-exp, in at least float32; or other weights, and their `log_total`."""
    B, T, N, H = q.shape
    S = k.shape[1]
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    q = q.reshape(B, T, k.shape[2], -1, H).astype(dtype)
    scores = scale * jnp.einsum("btkgh,bskh->bkgts", q, k.astype(dtype)).reshape(B, N, T, S)
    seen = visible(S, segment_ids, window, None if shard.count == 1 else shard.positions(T))
    seen = seen[:, None]
    if selected is not None:
        choice, size = selected
        seen = seen & jnp.repeat(jnp.repeat(choice, N // k.shape[2], axis=1), size, axis=-1)[..., :S]
    scores = jnp.where(seen, scores, -jnp.inf)
    return weights.dense(scores)


def attention(
    q, k, v, *, segment_ids=None, window=0, scale, shard: Shard = WHOLE, name=None, weights: Weights = SOFTMAX, selected=None
):  # fmt: skip
    """See `gatedattn.kernels.attention`."""
    B, T, N, _ = q.shape
    options = dict(segment_ids=segment_ids, window=window, scale=scale, shard=shard, weights=weights, selected=selected)
    probs, lse = probabilities(q, k, **options)
    probs = probs.reshape(B, v.shape[2], -1, T, v.shape[1])
    out = jnp.einsum("bkgts,bskh->btkgh", probs, v.astype(probs.dtype)).reshape(B, T, N, -1)
    out = out.astype(v.dtype)
    return (checkpoint_name(out, name), checkpoint_name(lse, name)) if name else (out, lse)
