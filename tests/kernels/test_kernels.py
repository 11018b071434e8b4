"""Every attention implementation against a loop in float64, against JAX's own attention, and for isolation of documents."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gatedattn import kernels
from gatedattn.kernels import CAPABILITIES, chunked

RUNNABLE = [name for name, row in CAPABILITIES.items() if not row.platforms or "cpu" in row.platforms]


def inputs(seed=0, B=2, T=37, N=4, K=2, H=8, C=5, documents=3, dtype=np.float64):
    rng = np.random.default_rng(seed)
    q, k, v = (rng.normal(size=shape).astype(dtype) for shape in ((B, T, N, H), (B, T, K, H), (B, T, K, C)))
    segments = np.sort(rng.integers(1, documents + 1, (B, T)), axis=1).astype(np.int32)
    return q, k, v, segments


def run(kernel, q, k, v, segments=None, window=0):
    return jax.jit(lambda *x: kernels.attention(*x, segment_ids=segments, window=window, kernel=kernel))(q, k, v)


def loop(q, k, v, segments, window, scale):
    """The definition, one query at a time."""
    B, T, N, _ = q.shape
    G = N // k.shape[2]
    out, lse = np.zeros((B, T, N, v.shape[-1])), np.zeros((B, N, T))
    for b in range(B):
        for t in range(T):
            keys = [s for s in range(t + 1) if segments[b, s] == segments[b, t] and (not window or t - s < window)]
            for n in range(N):
                scores = np.array([scale * q[b, t, n] @ k[b, s, n // G] for s in keys])
                weights = np.exp(scores - scores.max())
                lse[b, n, t] = np.log(weights.sum()) + scores.max()
                out[b, t, n] = weights / weights.sum() @ v[b, keys, n // G]
    return out, lse


@pytest.mark.parametrize("kernel", RUNNABLE)
@pytest.mark.parametrize("window", [0, 1, 7])
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (4, 1)])
def test_equals_the_definition(x64, kernel, window, heads):
    q, k, v, segments = inputs(N=heads[0], K=heads[1])
    out, lse = run(kernel, q, k, v, segments, window)
    expected_out, expected_lse = loop(q, k, v, segments, window, 8**-0.5)
    np.testing.assert_allclose(out, expected_out, atol=1e-12)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-12)


@pytest.mark.parametrize(
    "T,block,window", [(37, 8, 0), (37, 8, 1), (37, 8, 9), (32, 8, 0), (32, 8, 8), (32, 8, 30), (7, 16, 5), (9, 1, 3)]
)
def test_blocks_and_gradients(x64, T, block, window):
    q, k, v, segments = inputs(T=T)

    def value_and_gradients(call):
        def scalar(q, k, v):
            out, lse = call(q, k, v)
            return jnp.sin(out).sum() + jnp.cos(lse).sum()  # uneven cotangents for both results

        return jax.jit(jax.value_and_grad(scalar, (0, 1, 2)))(q, k, v)

    def dense(q, k, v):
        return kernels.attention(q, k, v, segment_ids=segments, window=window, scale=0.3, kernel="reference")

    def blocks(q, k, v):
        return chunked.attention(q, k, v, segment_ids=segments, window=window, scale=0.3, block=block)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-11), value_and_gradients(blocks), value_and_gradients(dense)
    )


@pytest.mark.parametrize("kernel", RUNNABLE)
@pytest.mark.parametrize("window", [0, 6])
def test_equals_jax_nn(kernel, window):
    q, k, v, _ = inputs(C=8, dtype=np.float32)
    peer = jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=(window - 1, 0) if window else None)
    out, _ = run(kernel, q, k, v, window=window)
    np.testing.assert_allclose(out, peer, atol=2e-6)


@pytest.mark.parametrize("kernel", RUNNABLE)
def test_documents_do_not_see_each_other(kernel):
    q, k, v, segments = inputs(dtype=np.float32)
    changed = k + (segments == 1)[..., None, None], v + (segments == 1)[..., None, None]
    before, _ = run(kernel, q, k, v, segments)
    after, _ = run(kernel, q, *changed, segments)
    others = segments != 1
    assert others.any() and not np.array_equal(before[~others], after[~others])
    np.testing.assert_array_equal(before[others], after[others])


@pytest.mark.parametrize("kernel", RUNNABLE)
def test_bfloat16_stays_close(kernel):
    q, k, v, segments = inputs(dtype=np.float32)
    exact, _ = run(kernel, q, k, v, segments)
    low, lse = run(kernel, *(jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)), segments)
    assert low.dtype == jnp.bfloat16 and lse.dtype == jnp.float32
    np.testing.assert_allclose(low.astype(np.float32), exact, atol=0.05)


def temporaries(T):
    q = jax.ShapeDtypeStruct((1, T, 4, 16), jnp.float32)
    k = jax.ShapeDtypeStruct((1, T, 2, 16), jnp.float32)

    def gradients(q, k, v):
        return jax.grad(lambda *x: kernels.attention(*x, kernel="chunked")[0].sum(), (0, 1, 2))(q, k, v)

    return jax.jit(gradients).lower(q, k, k).compile().memory_analysis().temp_size_in_bytes


def test_chunked_memory_is_linear_in_length():
    short, middle, long = (temporaries(T) for T in (1024, 2048, 4096))
    assert long - middle <= 2.2 * (middle - short) and long < 4096 * 4096 * 4


def test_unknown_kernel_is_refused():
    with pytest.raises(ValueError, match="must be auto or one of"):
        kernels.resolve("flash")
