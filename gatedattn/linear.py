"""One matrix product for the whole project."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def project(x: Float[Array, "*rows I"], w: Float[Array, "I *out"], dtype=None, out_dtype=None) -> Float[Array, "..."]:
    """y[..., o] = sum_i x[..., i] w[i, o], computed in `dtype` (x's by default) and returned in `out_dtype` (`dtype` by default).

    Without a mesh the leading dimensions are flattened into rows and the trailing ones into columns, so that XLA sees a plain
    matrix product: its CPU back end computes the weight gradient over two batch dimensions at half speed. Under a mesh the
    dimensions stay apart, since each may be sharded on its own.
    """
    dtype = dtype or x.dtype
    x, w = x.astype(dtype), w.astype(dtype)
    if jax.sharding.get_abstract_mesh().empty:
        rows, out = x.shape[:-1], w.shape[1:]
        y = jnp.dot(x.reshape(-1, x.shape[-1]), w.reshape(w.shape[0], math.prod(out)), preferred_element_type=out_dtype)
        return y.reshape(*rows, *out)
    return jnp.tensordot(x, w, axes=1, preferred_element_type=out_dtype)
