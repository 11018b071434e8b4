"""Probes against dense attention maps in float64, and on a model built to have a known answer."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gatedattn import Transformer, TransformerConfig, probes
from gatedattn.kernels import reference

B, T = 3, 13
CONFIG = TransformerConfig(
    vocab_size=40, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, ffn_dim=48, gates="g1+g2:headwise+g5+g1:none",
    init_std=0.3, dtype="float64",
)  # fmt: skip
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, 40, (B, T))
SEGMENTS = np.array([[1] * 6 + [2] * 7, [1] * 13, [1] * 4 + [2] * 5 + [0] * 4])
POSITIONS = np.array([np.r_[0:6, 0:7], np.r_[0:13], np.r_[0:4, 0:5, 0:4]])


def dense(model, query_mask):
    """The same statistics from whole attention maps and whole score tensors."""

    def keep(kind, **captured):  # whatever the probe returns comes back stacked over the layers
        names = ("q", "k", "kept", "scores") if kind == "attention" else ("x",)
        return {name: captured[name] for name in names}

    stacked = jax.jit(lambda: model.hidden(TOKENS, POSITIONS, SEGMENTS, probe=keep)[1]["probe"])()
    captured = [jax.tree.map(lambda x: x[i], stacked) for i in range(model.config.num_layers)]
    first = np.concatenate([np.ones((B, 1), bool), SEGMENTS[:, 1:] != SEGMENTS[:, :-1]], axis=1)
    start = np.maximum.accumulate(np.where(first, np.arange(T), 0), axis=1)
    queries = (SEGMENTS != 0) & ~first & query_mask
    result = {"bos_share": [], "attention_self": [], "attention_previous": [], "activation_max": [], "gates": []}
    options = dict(window=model.config.window, weights=model.layers.attention.weights)
    for c in captured:
        result["activation_max"].append(np.abs(np.asarray(c["x"])[SEGMENTS != 0]).max())
        q, k = c["q"], c["k"]
        probs, _ = reference.probabilities(q, k, segment_ids=SEGMENTS, scale=8**-0.5, **options)
        probs = np.asarray(probs)  # [B, N, T, S]
        if c["kept"] is not None:
            probs = probs * np.asarray(c["kept"])[..., 0].swapaxes(1, 2)[..., None]
        own = np.arange(T) + np.zeros_like(start)
        for name, key in (("bos_share", start), ("attention_self", own), ("attention_previous", own - 1)):
            mass = np.take_along_axis(probs, key[:, None, :, None], axis=-1)[..., 0].swapaxes(1, 2)  # [B, T, N]
            result[name].append(mass[queries].mean(0))
        result["gates"].append(c["scores"])
    return result


@pytest.mark.parametrize(
    "extra",
    [
        {},
        *(
            pytest.param(extra, marks=pytest.mark.slow)
            for extra in (
                {"sink": "learned"},
                {"window": 4, "kernel": "reference"},
                {"sink": "off_by_one", "qk_norm": False},
                {"attention": "sigmoid", "sigmoid_length": T},
                {"attention": "softpick"},
            )
        ),
    ],
)
def test_equals_dense_maps(x64, extra):
    model = Transformer(dataclasses.replace(CONFIG, **extra), param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    mask = RNG.random((B, T)) < 0.7
    measured = jax.jit(lambda: probes.measure(model, TOKENS, POSITIONS, SEGMENTS, query_mask=mask))()
    expected = dense(model, mask)
    for name in ("bos_share", "attention_self", "attention_previous", "activation_max"):
        np.testing.assert_allclose(measured[name], np.array(expected[name]), atol=1e-6, err_msg=name)
    real = SEGMENTS != 0
    for layer, scores in enumerate(expected["gates"]):
        assert set(scores) == set(measured["gates"]) == {"g1", "g2:headwise", "g5", "g1:none"}
        for spec, score in scores.items():
            score = np.asarray(score)
            if spec == "g1:none":
                score = np.broadcast_to(score, (B, T, *score.shape))
            score = score.reshape(B, T, -1, score.shape[-1])[real]  # [tokens, M, C]
            stats = {name: np.asarray(value)[layer] for name, value in measured["gates"][spec].items()}
            np.testing.assert_allclose(stats["mean"], score.mean((0, 2)), atol=1e-5)
            np.testing.assert_allclose(stats["below_0.1"], (score < 0.1).mean((0, 2)), atol=1e-6)
            np.testing.assert_allclose(stats["above_0.9"], (score > 0.9).mean((0, 2)), atol=1e-6)


def test_model_with_a_known_answer():
    """Queries and keys of zero attend evenly: bos_share is the mean of 1/(t+1) over t = 1 .. T-1. A zero gate kernel scores 1/2."""
    config = dataclasses.replace(CONFIG, gates="g1", qk_norm=False, dtype="float32")
    model = Transformer(config, rngs=nnx.Rngs(0))
    for kernel in (model.layers.attention.query.kernel, model.layers.attention.gates[0].kernel):
        kernel[...] = jnp.zeros_like(kernel[...])
    measured = nnx.jit(probes.measure)(model, TOKENS)
    floor = np.mean(1 / np.arange(2, T + 1))
    for name in ("bos_share", "attention_self", "attention_previous"):
        np.testing.assert_allclose(measured[name], np.full((2, 4), floor), rtol=1e-5)
    np.testing.assert_allclose(measured["gates"]["g1"]["mean"], 0.5)
    np.testing.assert_allclose(measured["gates"]["g1"]["below_0.1"], 0)


@pytest.mark.slow
def test_bfloat16_probe_is_close():
    config = dataclasses.replace(CONFIG, gates="g1", dtype="bfloat16")
    low, high = (Transformer(c, rngs=nnx.Rngs(0)) for c in (config, dataclasses.replace(config, dtype="float32")))
    a, b = (nnx.jit(probes.measure)(m, TOKENS, POSITIONS, SEGMENTS)["bos_share"] for m in (low, high))
    np.testing.assert_allclose(a, b, atol=0.02)
