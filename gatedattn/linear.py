"""Matrix products with parameters, for the whole project."""

import contextlib
import contextvars
import functools
import math

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from gatedattn.sharding import axis_names, explicit

PRODUCT = "product"  # what a rematerialisation policy may keep by name
_transposed = contextvars.ContextVar("transposed", default=False)
_for_cpu = contextvars.ContextVar("for_cpu", default=False)


@contextlib.contextmanager
def transposed_weights():
    """While tracing: the weights lie in memory as [outputs, inputs], and x has few rows (see `gatedattn.inference.weights`)."""
    token = _transposed.set(True)
    try:
        yield
    finally:
        _transposed.reset(token)


@contextlib.contextmanager
def for_cpu(yes: bool | None = None):
    """While tracing: bfloat16 products without a mesh take the form that XLA's CPU back end gives to its library, see `product`.
    They differentiate backwards only, and once. By default only where JAX's devices are CPUs."""
    token = _for_cpu.set(jax.default_backend() == "cpu" if yes is None else yes)
    try:
        yield
    finally:
        _for_cpu.reset(token)


def _library(dtype) -> bool:
    """In float32 it gains nothing: 0.95 of the plain form's speed on a processor with AVX-512."""
    return _for_cpu.get() and dtype == jnp.bfloat16 and jax.sharding.get_abstract_mesh().empty


def flipped(x: Float[Array, "R C"]) -> Float[Array, "C R"]:
    """x^T, in bfloat16 `for_cpu` in memory, too."""
    return _flip(x) if _library(x.dtype) else x.T


def _flip(x):  # XLA would change the layout alone
    return with_layout_constraint(x.T, Layout((0, 1)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def product(x: Float[Array, "R I"], w: Float[Array, "I O"], out_dtype) -> Float[Array, "R O"]:
    """x w for a CPU, where a bfloat16 product goes to a library (YNNPACK) if it is returned in float32 and contracts the last
    dimension of the left operand; operands of others are copied to float32 first. So this rounds last, and for the weights' gradient
    writes the smaller operand out transposed."""
    return jnp.dot(x, w, preferred_element_type=jnp.promote_types(x.dtype, jnp.float32)).astype(out_dtype)


def _product_forward(x, w, out_dtype):
    return product(x, w, out_dtype), (x, w)


def _product_backward(out_dtype, saved, dy):
    x, w = saved
    dy = dy.astype(x.dtype)
    dw = product(_flip(x), dy, w.dtype) if x.shape[1] <= dy.shape[1] else product(_flip(dy), x, w.dtype).T
    return rowwise(dy, w).astype(x.dtype), dw


def rowwise(x: Float[Array, "R O"], w: Float[Array, "I O"]) -> Float[Array, "R I"]:
    """x w^T in at least float32. Not by `w.T`: XLA takes that for another layout, which its CPU back end's library refuses."""
    return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.promote_types(x.dtype, jnp.float32))


product.defvjp(_product_forward, _product_backward)


def project(x: Float[Array, "..."], w: Float[Array, "..."], dtype=None, out_dtype=None, inputs: int = 1) -> Float[Array, "..."]:
    """y[..., o] = sum_i x[..., i] w[i, o], computed in `dtype` (x's by default) and returned in `out_dtype` (`dtype` by default).

    i runs over the last `inputs` dimensions of x, which are the first of w.

    Without a mesh the leading dimensions are flattened into rows and the trailing ones into columns, so that XLA sees a plain
    matrix product: its CPU back end computes the weight gradient over two batch dimensions at half speed. Under a mesh the
    dimensions stay apart, since each may be sharded on its own. Where shardings are part of the types, y is sharded like the rows
    of x and the columns of w; an axis that both have (FSDP) goes to the rows, and w is gathered over it. The result is named
    `PRODUCT`, for rematerialisation.
    """
    dtype = dtype or x.dtype
    x, w = x.astype(dtype), w.astype(dtype)
    if jax.sharding.get_abstract_mesh().empty:
        rows, out = x.shape[:-inputs], w.shape[inputs:]
        width = math.prod(w.shape[:inputs])
        x, w = x.reshape(-1, width), w.reshape(width, math.prod(out))
        if _transposed.get():  # y^T = W^T x^T. Without the barrier XLA makes it x W again: twice as slow for 2 to 16 rows
            y = jax.lax.optimization_barrier(jnp.dot(w.T, x.T, preferred_element_type=out_dtype)).T
        elif _library(dtype):
            y = product(x, w, out_dtype or dtype)
        else:
            y = jnp.dot(x, w, preferred_element_type=out_dtype)
        return checkpoint_name(y, PRODUCT).reshape(*rows, *out)
    out_sharding = None
    if explicit():
        rows = tuple(jax.typeof(x).sharding.spec)[: x.ndim - inputs]
        taken = {axis for entry in rows for axis in axis_names(entry)}
        columns = (tuple(a for a in axis_names(entry) if a not in taken) for entry in jax.typeof(w).sharding.spec[inputs:])
        out_sharding = PartitionSpec(*rows, *(entry or None for entry in columns))
    y = jnp.tensordot(x, w, axes=inputs, preferred_element_type=out_dtype, out_sharding=out_sharding)
    return checkpoint_name(y, PRODUCT)


def project_heads(x: Float[Array, "B T M H"], w: Float[Array, "M H C"]) -> Float[Array, "B T M C"]:
    """y[b, t, m, c] = sum_h x[b, t, m, h] w[m, h, c] in float32, of w rounded to x's type; sharded like x."""
    like = PartitionSpec(*jax.typeof(x).sharding.spec[:3], None) if explicit() else None
    # Rounded as everywhere, multiplied as float32: XLA's CPU back end lacks this product of bfloat16 into float32.
    w = w.astype(x.dtype).astype(jnp.float32)
    return jnp.einsum("btmh,mhc->btmc", x.astype(jnp.float32), w, out_sharding=like)
