"""Root-mean-square normalisation."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from gatedattn.layers.linear import Linear
from gatedattn.model_config import TransformerConfig


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


class GatedNorm(RMSNorm):
    """RMSNorm(x) * sigmoid(W_up silu(W_down RMSNorm(x))), W_down of [D, r], W_up of [r, D] (arXiv 2601.22966, there r = 16)."""

    def __init__(
        self, dim: int, rank: int, *, eps=1e-6, zero_centered=False, init_std=0.02, dtype=jnp.float32, param_dtype=jnp.float32,
        rngs: nnx.Rngs,
    ):  # fmt: skip
        super().__init__(dim, eps=eps, zero_centered=zero_centered, param_dtype=param_dtype)
        weights = dict(init_std=init_std, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.down, self.up = Linear(dim, rank, **weights), Linear(rank, dim, **weights)

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        y = super().__call__(x)
        score = jax.nn.sigmoid(self.up(jax.nn.silu(self.down(y))).astype(jnp.promote_types(x.dtype, jnp.float32)))
        return (y * score).astype(x.dtype)


def residual_norm(config: TransformerConfig, *, dtype=None, param_dtype=jnp.float32, rngs: nnx.Rngs) -> RMSNorm:
    """A norm of the residual stream's width, as the config has them."""
    options = dict(eps=config.norm_eps, zero_centered=config.norm_zero_centered, param_dtype=param_dtype)
    if not config.norm_gate:
        return RMSNorm(config.d_model, **options)
    dtype = jnp.dtype(dtype or config.dtype)
    return GatedNorm(config.d_model, config.norm_gate, init_std=config.init_std, dtype=dtype, rngs=rngs, **options)
