"""Root-mean-square normalisation."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float


class RMSNorm(nnx.Module):
    """y = x / sqrt(mean(x^2) + eps) * w over the last dimension (arXiv 1910.07467), in at least float32.

    w starts at one; with `zero_centered` the factor is 1 + w and w starts at zero (Qwen3-Next), so that weight decay pulls
    towards the plain norm.
    """

    def __init__(self, dim: int, *, eps: float = 1e-6, zero_centered: bool = False, param_dtype=jnp.float32):
        self.eps, self.zero_centered = eps, zero_centered
        self.weight = nnx.Param((jnp.zeros if zero_centered else jnp.ones)((dim,), param_dtype))

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * (self.weight[...] + self.zero_centered)).astype(x.dtype)
