"""The size of what flows through the model."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from gatedattn.probes.attention import mean


def largest(x: Float[Array, "B T D"], real: Bool[Array, "B T"]) -> dict[str, Array]:
    """max |x| over tokens that are not padding, and where it sits: row, token (its number in the row) and channel."""
    size = jnp.abs(jnp.where(real[..., None], x, 0)).astype(jnp.float32)
    at = jnp.argmax(size)
    row, token, channel = jnp.unravel_index(at, size.shape)
    return {"max": size.max(), "row": row, "token": token, "channel": channel}


def massive(x: Float[Array, "B T D"], real: Bool[Array, "B T"]) -> dict[str, Float[Array, ""]]:
    """Median |x| over tokens that are not padding and channels; share of tokens with |x| > 100 and > 1000 medians (arXiv 2402.17762)."""
    size = jnp.abs(jnp.where(real[..., None], x, jnp.nan)).astype(jnp.float32)
    median = jnp.nanmedian(size)
    return {
        "activation_median": median,
        "massive": mean(
            (jnp.max(size, -1, initial=0, where=real[..., None]) > jnp.maximum(100, 1000 * median)).astype(jnp.float32), real
        ),
    }


def kurtosis(x: Float[Array, "B T D"], real: Bool[Array, "B T"]) -> Float[Array, ""]:
    """E[(x - E x)^4] / E[(x - E x)^2]^2 over tokens that are not padding and channels; 3 for a Gaussian."""
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    x = x - mean(x.mean(-1), real)
    return mean((x**4).mean(-1), real) / mean((x**2).mean(-1), real) ** 2


def sizes(y: Float[Array, "B T N H"], real: Bool[Array, "B T"]) -> dict[str, Float[Array, " N"]]:
    """Mean |y| per head, and the shares of |y| below 0.01 and 0.001 (the paper's Figure 5)."""
    size = jnp.abs(y.astype(jnp.float32))
    small = {f"below_{limit}": mean((size < limit).mean(-1, dtype=jnp.float32), real) for limit in (0.01, 0.001)}
    return {"mean": mean(size.mean(-1), real)} | small
