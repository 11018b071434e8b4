"""Every grouped matrix product against a loop over groups."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gatedattn.config import GROUPED_KERNELS, ConfigError
from gatedattn.kernels import grouped
from gatedattn.kernels.grouped import CAPABILITIES, grouped_matmul

PALLAS = ("megablox", "triton")  # their programs also run step by step on a CPU


def here(name):
    row = CAPABILITIES[name]
    packages = not row.requires or importlib.util.find_spec(row.requires)
    return name in PALLAS or (packages and (not row.platforms or jax.default_backend() in row.platforms))


RUNNABLE = [name for name in CAPABILITIES if here(name)]


def loop(x, w, sizes):
    y, start = np.zeros((len(x), w.shape[2])), 0
    for e, size in enumerate(sizes):
        y[start : start + size] = x[start : start + size] @ w[e]
        start += size
    return y


def inputs(rows):
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, 24)), rng.normal(size=(4, 24, 40)) / 8, rng.normal(size=(rows, 40))


@pytest.mark.parametrize("kernel", RUNNABLE)
@pytest.mark.parametrize("sizes", [(30, 0, 41, 3), (0, 0, 0, 100), (25, 25, 25, 25), (0, 0, 0, 0)])
def test_equals_a_loop_over_groups(x64, kernel, sizes):
    """Value and both gradients, with empty groups and with rows after the last group, which may hold anything."""
    x, w, weight = inputs(100)
    dtype = np.float64 if "float64" in CAPABILITIES[kernel].dtypes else np.float32
    x[sum(sizes) :] = np.nan

    def scalar(x, w, weight, sizes):
        return (grouped_matmul(x, w, sizes, kernel, interpret=kernel in PALLAS) * weight).sum()

    with jax.enable_x64(dtype == np.float64):  # Pallas knows 32-bit indices only
        arrays = (a.astype(dtype) for a in (x, w, weight))
        value, (dx, dw) = jax.jit(jax.value_and_grad(scalar, (0, 1)))(*arrays, np.array(sizes, np.int32))
    x[sum(sizes) :] = 0
    ends = np.cumsum(sizes)
    per_row = loop(weight, w.swapaxes(1, 2), sizes)
    per_group = [x[end - size : end].T @ weight[end - size : end] for size, end in zip(sizes, ends)]
    atol = 1e-11 if dtype == np.float64 else 2e-5
    np.testing.assert_allclose(value, (loop(x, w, sizes) * weight).sum(), atol=atol * 100)
    np.testing.assert_allclose(dx, per_row, atol=atol)
    np.testing.assert_allclose(dw, np.array(per_group), atol=atol)


_product = jax.jit(lambda x, w, sizes: grouped_matmul(x, w, sizes, "loop"))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 70), min_size=4, max_size=4))
def test_any_sizes(sizes):
    x, w, _ = inputs(280)
    y = _product(jnp.asarray(x, jnp.float32), jnp.asarray(w, jnp.float32), jnp.array(sizes))
    np.testing.assert_allclose(y, loop(x, w, sizes), atol=1e-5)


_tiles = jax.jit(lambda sizes: grouped.tiles(sizes, 16, 280))


@settings(deadline=None)
@given(st.lists(st.integers(0, 70), min_size=4, max_size=4))
def test_tiles_cover_every_row_once(sizes):
    group, start, end, count = map(np.asarray, _tiles(np.array(sizes)))
    assert count <= len(group)
    seen = [(g, r) for g, s, e in zip(group, start, end) for r in range(s, min(s + 16, e))]
    assert seen == list(zip(np.repeat(np.arange(4), sizes), range(sum(sizes))))


@pytest.mark.parametrize("kernel", RUNNABLE)
def test_bfloat16(kernel):
    x, w, _ = inputs(100)
    sizes = jnp.array([30, 0, 41, 3])
    y = grouped_matmul(*(jnp.asarray(a, jnp.bfloat16) for a in (x, w)), sizes, kernel, interpret=kernel in PALLAS)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(y.astype(np.float32), loop(x, w, sizes), atol=0.1)


def test_memory_does_not_grow_with_rows_times_groups():
    """The dense way out, every row with every group's matrix, would hold rows x groups x columns."""
    rows, E, D, F = 4096, 64, 32, 48
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((rows, D), (E, D, F))] + [jax.ShapeDtypeStruct((E,), jnp.int32)]
    compiled = jax.jit(jax.grad(lambda *a: jnp.sin(grouped_matmul(*a)).sum(), (0, 1))).lower(*shapes).compile()
    arrays = 4 * (rows * (D + F) + E * D * F)
    assert compiled.memory_analysis().temp_size_in_bytes < 6 * arrays < 4 * rows * E * F


@pytest.mark.parametrize(
    "kernel,platform,dtype,message",
    [
        ("megablox", "cpu", "float32", "runs on tpu, not on cpu: use auto"),
        ("ragged_dot", "gpu", "bfloat16", "runs on tpu, not on gpu"),
        ("triton", "gpu", "float64", "computes in bfloat16, float32, not in float64"),
        ("gmm", "cpu", "float32", "must be auto or one of loop, ragged_dot"),
    ],
)
def test_what_a_kernel_cannot_do_is_refused(kernel, platform, dtype, message):
    with pytest.raises(ValueError, match=message):
        grouped.choose(kernel, platform, dtype)


def test_more_rows_than_triton_can_count_are_refused():
    shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((2**20, 2048), (2, 2048, 16))]
    with pytest.raises(ConfigError, match="1048576 rows of 2048 are too many; cut the batch into more parts"):
        jax.eval_shape(lambda *a: grouped_matmul(*a, jnp.array([1, 2]), "triton", interpret=True), *shapes)


def test_auto_takes_the_best_that_can():
    chosen = {p: grouped.choose("auto", p, "bfloat16") for p in ("cpu", "gpu", "tpu")}
    assert chosen == {"cpu": "loop", "gpu": "triton", "tpu": "megablox"}
    assert grouped.choose("auto", "tpu", "float64") == "loop"


def test_the_configuration_knows_every_kernel():
    assert GROUPED_KERNELS == ("auto", *CAPABILITIES)
