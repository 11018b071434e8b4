"""One matrix product for the whole project."""

import contextlib
import contextvars
import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from gatedattn.sharding import axis_names, explicit

_transposed = contextvars.ContextVar("transposed", default=False)


@contextlib.contextmanager
def transposed_weights():
    """While tracing: the weights lie in memory as [outputs, inputs], and x has few rows (see `gatedattn.inference.weights`)."""
    token = _transposed.set(True)
    try:
        yield
    finally:
        _transposed.reset(token)


def project(x: Float[Array, "..."], w: Float[Array, "..."], dtype=None, out_dtype=None, inputs: int = 1) -> Float[Array, "..."]:
    """y[..., o] = sum_i x[..., i] w[i, o], computed in `dtype` (x's by default) and returned in `out_dtype` (`dtype` by default).

    i runs over the last `inputs` dimensions of x, which are the first of w.

    Without a mesh the leading dimensions are flattened into rows and the trailing ones into columns, so that XLA sees a plain
    matrix product: its CPU back end computes the weight gradient over two batch dimensions at half speed. Under a mesh the
    dimensions stay apart, since each may be sharded on its own. Where shardings are part of the types, y is sharded like the rows
    of x and the columns of w; an axis that both have (FSDP) goes to the rows, and w is gathered over it.
    """
    dtype = dtype or x.dtype
    x, w = x.astype(dtype), w.astype(dtype)
    if jax.sharding.get_abstract_mesh().empty:
        rows, out = x.shape[:-inputs], w.shape[inputs:]
        width = math.prod(w.shape[:inputs])
        x, w = x.reshape(-1, width), w.reshape(width, math.prod(out))
        if _transposed.get():  # y^T = W^T x^T. Without the barrier XLA makes it x W again: twice as slow for 2 to 16 rows
            y = jax.lax.optimization_barrier(jnp.dot(w.T, x.T, preferred_element_type=out_dtype)).T
        else:
            y = jnp.dot(x, w, preferred_element_type=out_dtype)
        return y.reshape(*rows, *out)
    out_sharding = None
    if explicit():
        rows = tuple(jax.typeof(x).sharding.spec)[: x.ndim - inputs]
        taken = {axis for entry in rows for axis in axis_names(entry)}
        columns = (tuple(a for a in axis_names(entry) if a not in taken) for entry in jax.typeof(w).sharding.spec[inputs:])
        out_sharding = PartitionSpec(*rows, *(entry or None for entry in columns))
    return jnp.tensordot(x, w, axes=inputs, preferred_element_type=out_dtype, out_sharding=out_sharding)
