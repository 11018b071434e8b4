"""Dense attention: the definition, for tests and for attention maps. Memory grows with T x S."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def visible(T: int, segment_ids: Int[Array, "B T"] | None, window: int) -> Bool[Array, "B T T"]:
    """Which keys s each query t sees: s <= t, of the same document, and among the last `window` tokens (0: all)."""
    t, s = jnp.arange(T)[:, None], jnp.arange(T)[None, :]
    mask = (s <= t) & ((t - s < window) | (window == 0))
    if segment_ids is None:
        return mask[None]
    return mask & (segment_ids[:, :, None] == segment_ids[:, None, :])


def probabilities(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    window: int = 0,
    scale: float,
) -> tuple[Float[Array, "B N T T"], Float[Array, "B N T"]]:
    """softmax(scale q k^T) over the visible keys, and its log-sum-exp, in at least float32."""
    B, T, N, H = q.shape
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    q = q.reshape(B, T, k.shape[2], -1, H).astype(dtype)
    scores = scale * jnp.einsum("btkgh,bskh->bkgts", q, k.astype(dtype)).reshape(B, N, T, T)
    scores = jnp.where(visible(T, segment_ids, window)[:, None], scores, -jnp.inf)
    return jax.nn.softmax(scores, axis=-1), jax.nn.logsumexp(scores, axis=-1)


def attention(q, k, v, *, segment_ids=None, window=0, scale):
    """See `gatedattn.kernels.attention`."""
    B, T, N, _ = q.shape
    probs, lse = probabilities(q, k, segment_ids=segment_ids, window=window, scale=scale)
    probs = probs.reshape(B, v.shape[2], -1, T, T)
    out = jnp.einsum("bkgts,bskh->btkgh", probs, v.astype(probs.dtype)).reshape(B, T, N, -1)
    return out.astype(v.dtype), lse
