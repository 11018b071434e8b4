"""Sigmoid attention and softpick: their definitions, what sets them apart from softmax, and blocks against dense maps in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gatedattn import kernels
from gatedattn.config import ConfigError, TransformerConfig
from gatedattn.kernels import Request, cached, chunked
from gatedattn.kernels.weights import KINDS, Weights
from gatedattn.model_config import ATTENTIONS
from tests.kernels.test_kernels import inputs

SIGMOID, SOFTPICK = Weights("sigmoid", -np.log(37)), Weights("softpick")
BOTH = pytest.mark.parametrize("weights", [SIGMOID, SOFTPICK], ids=["sigmoid", "softpick"])


def dense(q, k, v, segments, weights, window=0):
    """Each query by itself, with the formulas of the papers."""
    out = np.zeros((*q.shape[:3], v.shape[-1]))
    for b, t, n in np.ndindex(q.shape[:3]):
        keys = [s for s in range(t + 1) if segments[b, s] == segments[b, t] and (not window or t - s < window)]
        a = k[b, keys, n // 2] @ q[b, t, n] / np.sqrt(q.shape[-1])
        if weights.kind == "sigmoid":
            w = 1 / (1 + np.exp(-a - weights.bias))
        else:
            w = np.maximum(np.exp(a) - 1, 0) / (np.abs(np.exp(a) - 1).sum() + 1e-8 * max(1, np.exp(a.max())))
        out[b, t, n] = w @ v[b, keys, n // 2]
    return out


@BOTH
@pytest.mark.parametrize("kernel", ["reference", "chunked"])
def test_equals_the_definition(x64, kernel, weights):
    q, k, v, segments = inputs(T=20, H=16)
    for window in (0, 7):
        out, _ = kernels.attention(q, k, v, segment_ids=segments, window=window, weights=weights, kernel=kernel)
        np.testing.assert_allclose(out, dense(q, k, v, segments, weights, window), atol=1e-12)


@BOTH
@pytest.mark.parametrize("T,block,window", [(37, 8, 0), (32, 8, 9)])
def test_blocks_and_gradients(x64, weights, T, block, window):
    q, k, v, segments = inputs(T=T)
    options = dict(segment_ids=segments, window=window, scale=0.3, weights=weights)

    def value_and_gradients(call):
        def scalar(q, k, v):
            out, log_total = call(q, k, v)
            return jnp.sin(out).sum() + jnp.cos(log_total).sum()  # uneven cotangents for both results

        return jax.jit(jax.value_and_grad(scalar, (0, 1, 2)))(q, k, v)

    blocks = value_and_gradients(lambda q, k, v: chunked.attention(q, k, v, block=block, **options))
    whole = value_and_gradients(lambda q, k, v: kernels.attention(q, k, v, kernel="reference", **options))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), blocks, whole)


@BOTH
def test_large_scores_stay_finite(weights):
    """Scores of +-3000 in float32, whose exponentials overflow."""
    q, k, v, segments = inputs(T=16, dtype=np.float32)

    @jax.jit
    @jax.value_and_grad
    def f(q):
        return kernels.attention(q, k, v, segment_ids=segments, weights=weights, kernel="chunked")[0].sum()

    for factor in (1000, -1000):
        assert all(np.isfinite(x).all() for x in f(factor * q))


def test_a_query_that_likes_no_key_gets_nothing_from_softpick():
    """Every score below 0: all weights are exactly zero, where a softmax has to sum to 1."""
    q, k, v, _ = (np.abs(x) for x in inputs(dtype=np.float32))
    for kernel in ("reference", "chunked"):
        out, _ = kernels.attention(-q, k, v, weights=SOFTPICK, kernel=kernel)
        assert not np.any(out)
        assert np.all(kernels.attention(-q, k, v, kernel=kernel)[0] > 0)


def test_a_key_matters_to_no_other_in_sigmoid_attention(x64):
    """With the other keys' values at zero, changing those keys changes nothing; and n keys of score 0 weigh n / (n + 1) in all."""
    q, k, v, segments = inputs(documents=1)
    v[:, 1:] = 0
    other = k.copy()
    other[:, 1:] += 1
    outs = [kernels.attention(q, z, v, weights=SIGMOID, kernel="chunked")[0] for z in (k, other)]
    np.testing.assert_array_equal(*outs)
    mass, _ = kernels.attention(0 * q, k, np.ones_like(v[..., :1]), weights=SIGMOID, kernel="chunked")
    np.testing.assert_allclose(mass[:, -1], 37 / 38, atol=1e-12)


@BOTH
def test_keys_in_a_cache_in_two_parts(x64, weights):
    """The last three queries, the keys split in two."""
    q, k, v, segments = inputs(documents=1, C=8)
    T = q.shape[1]
    expected = dense(q, k, v, segments, weights)[:, -3:]
    keys, values = (x.swapaxes(1, 2).reshape(-1, T, x.shape[-1]) for x in (k, v))
    seen = np.broadcast_to(np.arange(T) <= np.arange(T - 3, T)[:, None], (2, 3, T))
    parts = [(q[:, -3:], keys[:, part], values[:, part], seen[..., part]) for part in (slice(0, 5), slice(5, None))]
    np.testing.assert_allclose(cached.attention(parts, q.shape[-1] ** -0.5, weights)[0], expected, atol=1e-12)


def test_memory_is_no_map():
    q, k = (jax.ShapeDtypeStruct((1, 4096, heads, 16), jnp.float32) for heads in (4, 2))

    def gradients(q, k, v):
        return jax.grad(lambda *x: kernels.attention(*x, weights=SOFTPICK, kernel="chunked")[0].sum(), (0, 1, 2))(q, k, v)

    assert jax.jit(gradients).lower(q, k, k).compile().memory_analysis().temp_size_in_bytes < 4096 * 4096 * 4


def test_who_can_and_who_says_not():
    assert ATTENTIONS == KINDS
    with pytest.raises(ValueError, match="kernel='splash' has no softpick attention: use auto"):
        kernels.choose("splash", Request(platform="tpu", weights="softpick"))
    with pytest.raises(ValueError, match="has no sink logits in sigmoid attention"):
        kernels.choose("chunked", Request(weights="sigmoid", sinks=True))
    chosen, passed = kernels.choose("auto", Request(platform="gpu", dtype="bfloat16", weights="sigmoid"))
    assert chosen == "chunked" and passed == ["cudnn has no sigmoid attention", "triton has no sigmoid attention"]


@pytest.mark.parametrize(
    "fields,message",
    [
        (dict(attention="sigmoid"), "sigmoid_length=0.*needs the n of its bias -ln n"),
        (dict(sigmoid_length=8), "attention=softmax with sigmoid_length=8"),
        (dict(attention="softpick", sink="learned"), "sink=learned with attention=softpick.*set sink=none"),
        (dict(attention="softpik"), "did you mean 'softpick'"),
    ],
)
def test_settings_that_make_no_sense(fields, message):
    with pytest.raises(ConfigError, match=message):
        TransformerConfig(**fields)
