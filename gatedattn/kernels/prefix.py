"""Keys and values that every query sees besides those of its own document: register tokens, the same for all sequences."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from gatedattn.sharding import map_shards

Prefix = tuple[Float[Array, "m K H"], Float[Array, "m K H"]]


def _scores(q: Float[Array, "B T N H"], keys: Float[Array, "m K H"], scale: float) -> Float[Array, "B T K G m"]:
    B, T, _, H = q.shape
    wide = jnp.promote_types(q.dtype, jnp.float32)
    return scale * jnp.einsum("btkgh,mkh->btkgm", q.reshape(B, T, keys.shape[1], -1, H), keys, preferred_element_type=wide)


def log_sum_exp(q: Float[Array, "B T N H"], keys: Float[Array, "m K H"], scale: float) -> Float[Array, "B N T"]:
    """Of the scores of the prefix alone. Each device computes its own tokens' and heads'."""

    def on_shard(q, keys):
        return (jax.nn.logsumexp(_scores(q, keys, scale), axis=-1).reshape(q.shape[:3]).swapaxes(1, 2),)

    return map_shards(on_shard, (q, keys), ("BTK.", ".K."), ("BKT",))[0]


def join(
    q: Float[Array, "B T N H"], out: Float[Array, "B T N C"], lse: Float[Array, "B N T"], prefix: Prefix, scale: float
) -> tuple[Float[Array, "B T N C"], Float[Array, "B N T"]]:
    """What attention, and its log-sum-exp, would be if the prefix had been among its keys: exact. `lse` needs a gradient."""
    keys, values = prefix
    s = _scores(q, keys, scale)
    own = jnp.einsum("btkgm,mkh->btkgh", jax.nn.softmax(s, axis=-1), values.astype(s.dtype)).reshape(out.shape)
    own_lse = jax.nn.logsumexp(s, axis=-1).reshape(q.shape[:3]).swapaxes(1, 2)
    share = jax.nn.sigmoid(lse - own_lse).swapaxes(1, 2)[..., None]
    return (share * out + (1 - share) * own).astype(out.dtype), jnp.logaddexp(lse, own_lse)
