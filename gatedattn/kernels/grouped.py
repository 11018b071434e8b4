"""Grouped matrix products: rows sorted by group, each group with a matrix of its own. Nothing grows with rows x groups."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from gatedattn.config import ConfigError
from gatedattn.sharding import platform


@dataclasses.dataclass(frozen=True)
class Capability:
    platforms: tuple[str, ...] = ()  # empty: any
    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    requires: str = ""  # a package


CAPABILITIES = {
    "loop": Capability(dtypes=("bfloat16", "float16", "float32", "float64")),
    "ragged_dot": Capability(("tpu",)),  # elsewhere XLA multiplies every row with every group's matrix
    "megablox": Capability(("tpu",)),
    "triton": Capability(("gpu",)),
    "tokamax": Capability(("gpu", "tpu"), requires="tokamax"),
}
PREFERRED = {"tpu": ("megablox", "loop"), "gpu": ("triton", "loop")}


def refusal(kernel: str, on: str, dtype: str) -> str:
    """Why `kernel` cannot run, or an empty string."""
    row = CAPABILITIES[kernel]
    if row.platforms and on not in ("", *row.platforms):
        return f"runs on {', '.join(row.platforms)}, not on {on}"
    if dtype not in row.dtypes:
        return f"computes in {', '.join(row.dtypes)}, not in {dtype}"
    if row.requires and not importlib.util.find_spec(row.requires):
        return f"needs the package {row.requires}, which is not installed"
    return ""


def choose(kernel: str, on: str, dtype: str) -> str:
    """The implementation that `kernel` means. Raises `ValueError` for an unknown name, or one that cannot run."""
    if kernel == "auto":
        return next(name for name in PREFERRED.get(on, ("loop",)) if not refusal(name, on, dtype))
    if kernel not in CAPABILITIES:
        raise ValueError(f"moe.kernel={kernel!r}: must be auto or one of {', '.join(CAPABILITIES)}")
    if reason := refusal(kernel, on, dtype):
        raise ValueError(f"moe.kernel={kernel!r} {reason}: use auto")
    return kernel


def grouped_matmul(
    x: Float[Array, "R I"], w: Float[Array, "E I O"], sizes: Int[Array, " E"], kernel: str = "auto", interpret: bool = False
) -> Float[Array, "R O"]:
    """y[r] = x[r] w[e] for the rows r of group e: the first sizes[0] rows, the next sizes[1] rows, ...

    Rows after the last group give zero, and get a zero gradient. `interpret`: run a Pallas kernel's program step by step on any
    platform, for tests.

    Raises:
        ConfigError: more rows than the Triton kernel can count.
        ValueError: a kernel that cannot run here.
    """
    name = choose(kernel, "" if interpret else platform(), str(x.dtype))
    if name == "triton" and max(x.size, w.size, len(x) * w.shape[2]) >= 2**31:
        raise ConfigError(f"moe.kernel=triton counts array elements in 32 bits: {len(x)} rows of {max(w.shape[1:])} are too many; "
                          "cut the batch into more parts (train.microbatches)")  # fmt: skip
    sizes = sizes.astype(jnp.int32)
    used = (jnp.arange(len(x)) < sizes.sum())[:, None]
    x = jnp.where(used, x, 0)  # and so its gradient: kernels leave the rows that they skip as they find them
    if name == "ragged_dot":
        y = lax.ragged_dot(x, w, sizes)
    elif name == "tokamax":
        from tokamax import ragged_dot

        y = ragged_dot(x, w, sizes)
    elif name == "megablox":
        y = _megablox(x, w, sizes, interpret)
    else:
        y = _tiled(x, w, sizes, name, interpret)
    return jnp.where(used, y, 0)


def _megablox(x, w, sizes, interpret):
    from jax.experimental.pallas.ops.tpu.megablox.ops import gmm

    rows, (_, inputs, outputs) = len(x), w.shape
    tiles = (min(512, -(-rows // 128) * 128), min(1024, inputs), min(1024, outputs))  # x rows, inputs, outputs
    x = jnp.pad(x, ((0, -rows % tiles[0]), (0, 0)))
    return gmm(x, w, sizes, x.dtype, tiles, interpret=interpret)[:rows]


# --- rows in tiles that lie within one group ---------------------------------------------------------------------------------


def _tile(rows: int, groups: int) -> int:
    """Rows of a tile: about as many as a group has, a power of two from 16 to 128 (all that a GPU's multiplier needs)."""
    return min(128, max(16, 1 << (max(rows // groups, 1) - 1).bit_length()))


def tiles(
    sizes: Int[Array, " E"], tile: int, rows: int
) -> tuple[Int[Array, " t"], Int[Array, " t"], Int[Array, " t"], Int[Array, ""]]:
    """Group, first row, and end of the group's rows, of every tile; how many there are. Room for the most there can be."""
    ends = jnp.cumsum(sizes)
    counts = -(-sizes // tile)
    last = jnp.cumsum(counts)
    t = jnp.arange(rows // tile + len(sizes))
    group = jnp.minimum(jnp.searchsorted(last, t, side="right"), len(sizes) - 1)
    start = (ends - sizes)[group] + (t - (last - counts)[group]) * tile
    end = jnp.where(t < last[-1], ends[group], start)
    return tuple(a.astype(jnp.int32) for a in (group, start, end, last[-1]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _tiled(x, w, sizes, name, interpret):
    return _product(x, w, sizes, name, interpret)


def _tiled_forward(x, w, sizes, name, interpret):
    return _product(x, w, sizes, name, interpret), (x, w, sizes)


def _tiled_backward(name, interpret, saved, dy):
    x, w, sizes = saved
    dy = jnp.where((jnp.arange(len(x)) < sizes.sum())[:, None], dy, 0)
    dx = _product(dy, w.swapaxes(1, 2), sizes, name, interpret)
    outer = _loop_outer if name == "loop" else functools.partial(_triton_outer, interpret=interpret)
    return dx, outer(x, dy, sizes), None


_tiled.defvjp(_tiled_forward, _tiled_backward)


def _product(x, w, sizes, name, interpret):
    if name == "loop":
        return _loop_product(x, w, sizes)
    return _triton_product(x, w, sizes, interpret)


def _accumulator(dtype):
    return jnp.promote_types(dtype, jnp.float32)


def _loop_product(x, w, sizes):
    rows, tile = len(x), _tile(len(x), len(w))
    group, start, _, count = tiles(sizes, tile, rows)
    x = jnp.pad(x, ((0, tile), (0, 0)))

    def one(t, y):  # a tile's surplus rows belong to the groups after it, which overwrite them in their turn
        part = lax.dynamic_slice_in_dim(x, start[t], tile)
        product = jnp.dot(part, w[group[t]], preferred_element_type=_accumulator(x.dtype)).astype(x.dtype)
        return lax.dynamic_update_slice_in_dim(y, product, start[t], 0)

    return lax.fori_loop(0, count, one, jnp.zeros((rows + tile, w.shape[2]), x.dtype))[:rows]


def _loop_outer(x, dy, sizes):
    rows, tile = len(x), _tile(len(x), len(sizes))
    group, start, end, count = tiles(sizes, tile, rows)
    x, dy = (jnp.pad(a, ((0, tile), (0, 0))) for a in (x, dy))
    dtype = _accumulator(x.dtype)

    def one(t, dw):
        part = lax.dynamic_slice_in_dim(x, start[t], tile)
        own = (start[t] + jnp.arange(tile) < end[t])[:, None]
        change = jnp.where(own, lax.dynamic_slice_in_dim(dy, start[t], tile), 0)
        return dw.at[group[t]].add(jnp.dot(part.T, change, preferred_element_type=dtype))

    zeros = jnp.zeros((len(sizes), x.shape[1], dy.shape[1]), dtype)
    return lax.fori_loop(0, count, one, zeros).astype(x.dtype)


# --- the same as Pallas-Triton kernels ---------------------------------------------------------------------------------------


def _block(size: int, most: int) -> int:
    return min(most, max(16, 1 << (size - 1).bit_length()))


def _triton_product(x, w, sizes, interpret):
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    (rows, inputs), outputs = x.shape, w.shape[2]
    tile, k, n = max(16, _tile(rows, len(w))), _block(inputs, 64), _block(outputs, 128)
    group, start, end, _ = tiles(sizes, tile, rows)

    def kernel(x_ref, w_ref, group_ref, start_ref, end_ref, y_ref):
        t, column = pl.program_id(0), pl.program_id(1) * n
        e, first, last = group_ref[t], start_ref[t], end_ref[t]
        own = first + jnp.arange(tile) < last
        columns = column + jnp.arange(n) < outputs

        def step(i, total):
            inside = i * k + jnp.arange(k) < inputs
            a = triton.load(x_ref.at[pl.ds(first, tile), pl.ds(i * k, k)], mask=own[:, None] & inside[None], other=0.0)
            b = triton.load(w_ref.at[e, pl.ds(i * k, k), pl.ds(column, n)], mask=inside[:, None] & columns[None], other=0.0)
            return total + triton.dot(a, b)

        # Not `where`: there Triton's lowering gives the two numbers the type of the condition.
        steps = (first < last).astype(jnp.int32) * pl.cdiv(inputs, k)
        total = lax.fori_loop(0, steps, step, jnp.zeros((tile, n), jnp.float32))
        y = y_ref.at[pl.ds(first, tile), pl.ds(column, n)]
        triton.store(y, total.astype(y_ref.dtype), mask=own[:, None] & columns[None])

    return pl.pallas_call(
        kernel,
        grid=(len(group), pl.cdiv(outputs, n)),
        out_shape=jax.ShapeDtypeStruct((rows, outputs), x.dtype),
        compiler_params=triton.CompilerParams(num_warps=8, num_stages=3),
        interpret=interpret,
        name="grouped_matmul",
    )(x, w, group, start, end)


def _triton_outer(x, dy, sizes, interpret):
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    inputs, outputs, tile = x.shape[1], dy.shape[1], 64
    m, n = _block(inputs, 128), _block(outputs, 128)
    ends = jnp.cumsum(sizes).astype(jnp.int32)

    def kernel(x_ref, dy_ref, start_ref, end_ref, dw_ref):
        e, row, column = (pl.program_id(0), pl.program_id(1) * m, pl.program_id(2) * n)
        start, end = start_ref[e], end_ref[e]
        rows, columns = row + jnp.arange(m) < inputs, column + jnp.arange(n) < outputs

        def step(i, total):
            first = start + i * tile
            own = first + jnp.arange(tile) < end
            a = triton.load(x_ref.at[pl.ds(first, tile), pl.ds(row, m)], mask=own[:, None] & rows[None], other=0.0)
            b = triton.load(dy_ref.at[pl.ds(first, tile), pl.ds(column, n)], mask=own[:, None] & columns[None], other=0.0)
            return total + triton.dot(a.T, b)

        steps = lax.div(end - start + tile - 1, tile)
        total = lax.fori_loop(0, steps, step, jnp.zeros((m, n), jnp.float32))
        dw = dw_ref.at[e, pl.ds(row, m), pl.ds(column, n)]
        triton.store(dw, total.astype(dw_ref.dtype), mask=rows[:, None] & columns[None])

    return pl.pallas_call(
        kernel,
        grid=(len(sizes), pl.cdiv(inputs, m), pl.cdiv(outputs, n)),
        out_shape=jax.ShapeDtypeStruct((len(sizes), inputs, outputs), x.dtype),
        compiler_params=triton.CompilerParams(num_warps=8, num_stages=3),
        interpret=interpret,
        name="grouped_outer",
    )(x, dy, ends - sizes.astype(jnp.int32), ends)
