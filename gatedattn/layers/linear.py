"""Linear maps between named dimensions, and tables."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from gatedattn.linear import project
from gatedattn.sharding import explicit


class Linear(nnx.Module):
    """y = x W (+ b): contracts the last `inputs` dimensions of x, e.g. [..., D] -> [..., N, H] or [..., N, H] -> [..., D].

    `kernel` [*inputs, *outputs] ~ N(0, init_std^2); `bias` [*outputs] = 0. Computes in `dtype`; parameters stay `param_dtype`.
    """

    def __init__(
        self, inputs, outputs, *, bias=False, init_std=0.02, dtype=jnp.float32, param_dtype=jnp.float32, rngs: nnx.Rngs
    ):
        inputs, outputs = (((d,) if isinstance(d, int) else tuple(d)) for d in (inputs, outputs))
        self.num_inputs, self.dtype = len(inputs), dtype
        self.kernel = nnx.Param(init_std * jax.random.normal(rngs.params(), inputs + outputs, param_dtype))
        self.bias = nnx.Param(jnp.zeros(outputs, param_dtype)) if bias else None

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        y = project(x, self.kernel[...], self.dtype, inputs=self.num_inputs)
        return y if self.bias is None else y + self.bias[...].astype(self.dtype)


class Embedding(nnx.Module):
    """Rows of `table` [V, D] ~ N(0, init_std^2)."""

    def __init__(self, size: int, d_model: int, *, init_std=0.02, dtype=jnp.float32, param_dtype=jnp.float32, rngs: nnx.Rngs):
        self.dtype = dtype
        self.table = nnx.Param(init_std * jax.random.normal(rngs.params(), (size, d_model), param_dtype))

    def __call__(self, ids: Int[Array, "..."]) -> Float[Array, "... D"]:
        table = self.table[...]
        if explicit():  # rows are looked up where their ids are
            return table.at[ids].get(out_sharding=PartitionSpec(*jax.typeof(ids).sharding.spec, None)).astype(self.dtype)
        return jnp.take(table, ids, axis=0).astype(self.dtype)
