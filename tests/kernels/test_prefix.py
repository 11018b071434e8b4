"""Keys that every query sees, whatever its document and window."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gatedattn import kernels
from gatedattn.config import ConfigError, TransformerConfig
from gatedattn.kernels import Request
from tests.kernels.test_kernels import inputs

SINKS = np.array([0.3, -1.0, 2.0, 0.0])


def one_softmax(q, k, v, segments, window, prefix):
    """Every query by itself: its visible keys, the prefix and the sink in one softmax."""
    out, kept = np.zeros(q.shape), np.zeros(q.shape[:3])
    for b, t, n in np.ndindex(q.shape[:3]):
        seen = [s for s in range(t + 1) if segments[b, s] == segments[b, t] and t - s < window]
        keys = np.concatenate([k[b, seen, n // 2], prefix[0][:, n // 2]])
        values = np.concatenate([v[b, seen, n // 2], prefix[1][:, n // 2]])
        weights = np.exp(keys @ q[b, t, n] / np.sqrt(q.shape[-1]))
        weights /= weights.sum() + np.exp(SINKS[n])
        out[b, t, n], kept[b, t, n] = weights @ values, weights[: len(seen)].sum()
    return out, kept


@pytest.mark.parametrize("kernel", [pytest.param("reference", marks=pytest.mark.slow), "chunked"])
def test_equals_one_softmax_over_both(x64, kernel):
    q, k, v, segments = inputs(T=13, C=8)
    prefix = tuple(np.random.default_rng(5).normal(size=(2, 3, 2, 8)))
    out, lse = kernels.attention(q, k, v, segment_ids=segments, window=5, sinks=SINKS, prefix=prefix, kernel=kernel)
    expected, kept = one_softmax(q, k, v, segments, 5, prefix)
    np.testing.assert_allclose(out, expected, atol=1e-12)
    left = kernels.kept(lse, kernels.taken(jnp.asarray(q), jnp.asarray(SINKS), prefix, 8**-0.5))
    np.testing.assert_allclose(left[..., 0], kept, atol=1e-12)


def test_gradients_equal_those_of_keys_in_front(x64):
    """One document: the prefix is the same as three more tokens at its beginning."""
    q, k, v, _ = inputs(T=7, C=8, B=1)
    prefix = tuple(np.random.default_rng(5).normal(size=(2, 3, 2, 8)))

    def joined(q, k, v, prefix):
        return jnp.sin(kernels.attention(q, k, v, prefix=prefix, kernel="chunked")[0]).sum()

    def in_front(q, k, v, prefix):
        q = jnp.pad(q, ((0, 0), (3, 0), (0, 0), (0, 0)))
        k, v = (jnp.concatenate([p[None], x], axis=1) for p, x in zip(prefix, (k, v)))
        return jnp.sin(kernels.attention(q, k, v, kernel="reference")[0][:, 3:]).sum()

    grads = [jax.jit(jax.value_and_grad(f, (0, 1, 2, 3)))(q, k, v, prefix) for f in (joined, in_front)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-11), *grads)


def test_who_says_not():
    with pytest.raises(ValueError, match="kernel='splash' has no gradient for the log-sum-exp by which register tokens join"):
        kernels.choose("splash", Request(platform="tpu", prefix=True))
    assert kernels.choose("auto", Request(platform="gpu", prefix=True))[0] == "chunked"
    with pytest.raises(ConfigError, match="registers=4 with attention=sigmoid: .*set registers=0"):
        TransformerConfig(registers=4, attention="sigmoid", sigmoid_length=8)
