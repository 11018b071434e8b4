"""The dense feed-forward layer."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from gatedattn.layers.linear import Linear
from gatedattn.sharding import constrain


class MLP(nnx.Module):
    """SwiGLU: y = (silu(x W_gate) * (x W_up)) W_down (arXiv 2002.05202)."""

    def __init__(
        self, d_model: int, ffn_dim: int, *, init_std=0.02, dtype=jnp.float32, param_dtype=jnp.float32, rngs: nnx.Rngs
    ):
        options = dict(init_std=init_std, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.gate = Linear(d_model, ffn_dim, **options)
        self.up = Linear(d_model, ffn_dim, **options)
        self.down = Linear(ffn_dim, d_model, **options)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return self.down(constrain(jax.nn.silu(self.gate(x)) * self.up(x), "BTF"))
