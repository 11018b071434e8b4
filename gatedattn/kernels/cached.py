"""Attention of a few queries over keys that lie in a cache, with any mask."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from gatedattn.kernels.weights import HIDDEN, SOFTMAX, Weights

# Queries, keys, values and what may be seen; Z = B * K. The same queries may come rotated differently for different keys.
Part = tuple[Float[Array, "B T N H"], Float[Array, "Z S H"], Float[Array, "Z S H"], Bool[Array, "B T S"]]


def attention(
    parts: Sequence[Part], scale: float, weights: Weights = SOFTMAX
) -> tuple[Float[Array, "B T N H"], Float[Array, "B N T"]]:
    """One softmax (or other weights) over the visible keys of all parts; also its log-sum-exp, as `gatedattn.kernels.attention`
    returns it.

    Sequences and KV heads are folded together, and so are the queries of one KV head: every product is then a plain batched one on
    the cache as it lies in memory. A query that sees nothing (padding) gets a finite result without meaning.
    """
    B, T, N, H = parts[0][0].shape
    Z = len(parts[0][1])
    K = Z // B
    dtype = jnp.promote_types(parts[0][0].dtype, jnp.float32)

    def score(q, k, mask):
        rows = q.reshape(B, T, K, -1, H).transpose(0, 2, 3, 1, 4).reshape(Z, -1, H)
        s = scale * jnp.einsum("zrh,zsh->zrs", rows, k, preferred_element_type=dtype)
        return jnp.where(mask[:, None, None], s.reshape(B, K, N // K, T, -1), HIDDEN)

    scores = [score(q, k, mask) for q, k, _, mask in parts]
    top = jnp.stack([weights.top(s) for s in scores]).max(0)
    terms = [weights.terms(s, top) for s in scores]
    total = weights.divisor(sum(part.sum(-1) for _, part in terms))
    y = sum(
        jnp.einsum("zrs,zsh->zrh", w.astype(v.dtype).reshape(Z, -1, w.shape[-1]), v, preferred_element_type=dtype)
        for (w, _), (_, _, v, _) in zip(terms, parts, strict=True)
    )
    y = (y.reshape(B, K, N // K, T, H) / total[..., None]).transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)
    return y.astype(parts[0][0].dtype), (top + jnp.log(total)).reshape(B, N, T)
