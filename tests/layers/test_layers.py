"""Layers against NumPy in float64, and against their peers in Flax where there is one."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gatedattn import kernels
from gatedattn.config import RopeConfig, TransformerConfig
from gatedattn.layers import MLP, GatedAttention, GatedAttentionBlock, RMSNorm
from gatedattn.layers import rope as rope_lib
from gatedattn.layers.norm import GatedNorm
from gatedattn.transformer import abstract_parameters

B, T, D, N, K, H = 2, 9, 12, 4, 2, 6
F64 = dict(dtype=jnp.float64, param_dtype=jnp.float64)


def randomize(module, seed=0, std=0.5):
    """Every parameter random, so that no term hides behind a zero or a one."""
    rng = np.random.default_rng(seed)
    state = jax.tree.map(lambda p: jnp.asarray(rng.normal(0, std, p.shape), p.dtype), nnx.state(module, nnx.Param))
    nnx.update(module, state)
    return module


def run(module, *args):
    """The module's result, compiled as one program (op by op would compile each)."""
    return nnx.jit(lambda m, *a: m(*a))(module, *args)


def data(seed=1):
    rng = np.random.default_rng(seed)
    segments = np.sort(rng.integers(1, 4, (B, T)), axis=1).astype(np.int32)
    return jnp.asarray(rng.normal(size=(B, T, D))), segments


def rms(x, weight, eps=1e-6):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


@pytest.mark.parametrize("zero_centered", [False, True])
def test_rms_norm(x64, zero_centered):
    x, _ = data()
    norm = randomize(RMSNorm(D, zero_centered=zero_centered, param_dtype=jnp.float64))
    np.testing.assert_allclose(norm(x), rms(np.asarray(x), np.asarray(norm.weight[...]) + zero_centered), atol=1e-12)
    peer = nnx.RMSNorm(D, rngs=nnx.Rngs(0), param_dtype=jnp.float64, dtype=jnp.float64)
    np.testing.assert_allclose(RMSNorm(D)(x), peer(x), atol=1e-6)


def test_gated_norm(x64):
    """And where the model has it: before attention and MLP, after them with sandwich norm, and at the end."""
    x = np.asarray(data()[0])
    norm = randomize(GatedNorm(D, 3, **F64, rngs=nnx.Rngs(0)))
    y = rms(x, np.asarray(norm.weight[...]))
    a = y @ np.asarray(norm.down.kernel[...])
    np.testing.assert_allclose(norm(x), y * sigmoid((a * sigmoid(a)) @ np.asarray(norm.up.kernel[...])), atol=1e-12)
    config = TransformerConfig(vocab_size=9, d_model=16, num_layers=3, norm_gate=4, sandwich_norm=True)
    shapes = {path: leaf.shape for path, leaf in abstract_parameters(config).items() if "norm/down" in path}
    stacked = {f"layers/{name}_norm/down/kernel": (3, 16, 4) for name in ("attention", "attention_post", "mlp", "mlp_post")}
    assert shapes == stacked | {"final_norm/down/kernel": (16, 4)}


def test_mlp(x64):
    x, _ = data()
    mlp = randomize(MLP(D, 16, **F64, rngs=nnx.Rngs(0)))
    gate, up, down = (np.asarray(m.kernel[...]) for m in (mlp.gate, mlp.up, mlp.down))
    a = np.asarray(x) @ gate
    np.testing.assert_allclose(mlp(x), (a / (1 + np.exp(-a)) * (np.asarray(x) @ up)) @ down, atol=1e-12)


def test_rope_rotates_pairs_by_position(x64):
    config = RopeConfig(theta=100.0, fraction=0.5)
    q = np.random.default_rng(0).normal(size=(1, T, 1, 8))
    positions = np.array([[0, 3, 7, 1, 2, 5, 9, 4, 100]])
    out = np.asarray(rope_lib.apply(jnp.asarray(q), positions, config))
    np.testing.assert_array_equal(out[..., 4:], q[..., 4:])  # half of the dimensions pass through
    for t, position in enumerate(positions[0]):
        for i in range(2):  # as complex numbers: multiply by exp(i * position * theta^(-2i/R)), R = 4
            turned = (q[0, t, 0, i] + 1j * q[0, t, 0, i + 2]) * np.exp(1j * position * 100.0 ** (-2 * i / 4))
            np.testing.assert_allclose([out[0, t, 0, i], out[0, t, 0, i + 2]], [turned.real, turned.imag], atol=1e-12)


def test_rope_scores_depend_on_distance_only(x64):
    q, k = np.random.default_rng(0).normal(size=(2, 1, 1, 1, 8))

    def score(t, s):
        a, b = (np.asarray(rope_lib.apply(jnp.asarray(z), np.array([[p]]), RopeConfig())) for z, p in ((q, t), (k, s)))
        return (a * b).sum()

    np.testing.assert_allclose(score(107, 100), score(7, 0), atol=1e-12)


@pytest.mark.parametrize("theta,length,first,last", [(1e6, 32768, 23, 40), (1e4, 32768, 35, 60), (1e4, 4096, 20, 46)])
def test_yarn_ramp(theta, length, first, last):
    """Where the ramp begins and ends for head dim 128, and the temperature: values that follow from the YaRN authors' code."""
    config = RopeConfig(theta=theta, scaling="yarn", factor=4.0, original_max_len=length)
    plain, _ = rope_lib.inverse_frequencies(RopeConfig(theta=theta), 128)
    scaled, temperature = rope_lib.inverse_frequencies(config, 128)
    ratio = scaled / plain
    assert np.allclose(ratio[: first + 1], 1) and ratio[first + 1] < 1 - 1e-6
    assert np.allclose(ratio[last:], 0.25) and ratio[last - 1] > 0.25 + 1e-6
    assert np.isclose(temperature, 1.1386, atol=1e-4)


def test_linear_scaling_divides_positions(x64):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 4, 1, 8)))
    scaled = rope_lib.apply(x, np.array([[0, 4, 8, 12]]), RopeConfig(scaling="linear", factor=4.0))
    np.testing.assert_allclose(scaled, rope_lib.apply(x, np.array([[0, 1, 2, 3]]), RopeConfig()), atol=1e-12)


@pytest.mark.parametrize(
    "sink,extra",
    [
        ("none", {}),
        ("learned", {}),
        ("off_by_one", {}),
        ("none", dict(sdpa_norm=True, use_bias=True)),
        ("learned", dict(sdpa_activation="silu", output_bias=True)),
    ],
)
def test_attention_without_gates(x64, sink, extra):
    """q, k, v, norms, sinks and output written out head by head, with the sink as an extra column of the softmax."""
    x, segments = data()
    attention = GatedAttention(
        num_heads=N, num_kv_heads=K, head_dim=H, d_model=D, gates="none", rope=None, sink=sink, **extra, **F64, rngs=nnx.Rngs(0)
    )
    randomize(attention)
    p = {path: np.asarray(v) for path, v in nnx.to_flat_state(nnx.as_pure(nnx.state(attention)))}

    def linear(name):
        return np.einsum("btd,dnh->btnh", np.asarray(x), p[name, "kernel"]) + p.get((name, "bias"), 0)

    q, k, v = rms(linear("query"), p["query_norm", "weight"]), rms(linear("key"), p["key_norm", "weight"]), linear("value")
    y = np.zeros((B, T, N, H))
    for b in range(B):
        for t in range(T):
            keys = [s for s in range(t + 1) if segments[b, s] == segments[b, t]]
            for n in range(N):
                weights = np.exp([q[b, t, n] @ k[b, s, n // 2] / np.sqrt(H) for s in keys])
                extra_mass = {"none": 0, "off_by_one": 1, "learned": np.exp(p["sink",][n]) if sink == "learned" else 0}[sink]
                y[b, t, n] = weights / (weights.sum() + extra_mass) @ v[b, keys, n // 2]
    if "sdpa_norm" in extra:
        y = rms(y, p["sdpa_norm", "weight"])
    if "sdpa_activation" in extra:
        y = y / (1 + np.exp(-y))
    expected = np.einsum("btnh,nhd->btd", y, p["output", "kernel"]) + p.get(("output", "bias"), 0)
    np.testing.assert_allclose(run(attention, x, None, segments)[0], expected, atol=1e-11)


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def test_gates_act_where_the_paper_says(x64):
    """All five positions at once, in an attention without norm or rotation, written out with dense maps."""
    x, segments = data()
    gates = "g1+g2:headwise+g3+g4:headwise+g5"
    layer = GatedAttention(
        num_heads=N, num_kv_heads=K, head_dim=H, d_model=D, gates=gates, qk_norm=False, rope=None, **F64, rngs=nnx.Rngs(0)
    )
    randomize(layer)
    p = {path: np.asarray(v) for path, v in nnx.to_flat_state(nnx.as_pure(nnx.state(layer)))}
    xs = np.asarray(x)
    g1, g2, g3, g4 = (sigmoid(np.einsum("btd,dnh->btnh", xs, p["gates", i, "kernel"])) for i in range(4))
    g5 = sigmoid(xs @ p["gates", 4, "kernel"])
    q, k, v = (np.einsum("btd,dnh->btnh", xs, p[name, "kernel"]) * g for name, g in (("query", g4), ("key", g3), ("value", g2)))
    k, v = np.repeat(k, N // K, 2), np.repeat(v, N // K, 2)
    scores = np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(H)
    hidden = ~((np.arange(T)[:, None] >= np.arange(T)) & (segments[:, :, None] == segments[:, None]))
    scores[np.broadcast_to(hidden[:, None], scores.shape)] = -np.inf
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    expected = np.einsum("btnh,nhd->btd", g1 * np.einsum("bnts,bsnh->btnh", weights, v), p["output", "kernel"]) * g5
    np.testing.assert_allclose(run(layer, x, None, segments)[0], expected, atol=2e-6)  # gates are float32 inside


def test_query_source_sees_the_query(x64):
    """gates='g1:query' is sigmoid(q W) with q after its norm and before rotation."""
    x, _ = data()
    layer = randomize(
        GatedAttention(num_heads=N, num_kv_heads=K, head_dim=H, d_model=D, gates="g1:query", **F64, rngs=nnx.Rngs(0))
    )

    def look(kind, **captured):
        return {name: captured[name] for name in ("scores", "sdpa", "gated")}

    seen = nnx.jit(lambda layer, x: layer(x, probe=look)[1]["probe"])(layer, x)
    q = rms(np.asarray(layer.query(x)), np.asarray(layer.query_norm.weight[...]))
    score = sigmoid(np.einsum("btnh,nhc->btnc", q, np.asarray(layer.gates[0].kernel[...])))
    np.testing.assert_allclose(seen["scores"]["g1:query"], score, atol=1e-6)  # scores are float32
    np.testing.assert_allclose(seen["gated"], np.asarray(seen["sdpa"]) * score, atol=1e-6)


@pytest.mark.parametrize("source", ["value", "slice"])
def test_where_rivals_gates_look(x64, source):
    """g1:headwise:value (arXiv 2510.09017) sees the token's own values of all KV heads, also in a layer that gates them;
    g1:headwise:slice (arXiv 2306.12929) the D / N hidden channels of the head's place."""
    x, _ = data()
    gates = f"g1:headwise:{source}+g2:headwise"
    layer = GatedAttention(num_heads=N, num_kv_heads=K, head_dim=H, d_model=D, gates=gates, **F64, rngs=nnx.Rngs(0))
    randomize(layer)
    seen = nnx.jit(lambda layer, x: layer(x, probe=lambda kind, **c: c["scores"])[1]["probe"])(layer, x)
    w, of_value = (np.asarray(gate.kernel[...]) for gate in layer.gates)
    if source == "value":
        values = np.einsum("btd,dkh->btkh", x, layer.value.kernel[...]) * sigmoid(np.einsum("btd,dkc->btkc", x, of_value))
        logits = values.reshape(B, T, -1) @ w[..., 0]
    else:
        logits = np.stack([np.asarray(x)[..., 3 * n : 3 * n + 3] @ w[n, :, 0] for n in range(N)], axis=-1)
    np.testing.assert_allclose(seen[f"g1:headwise:{source}"][..., 0], sigmoid(logits), atol=1e-6)  # scores are float32


def test_identity_start_changes_nothing():
    x, _ = data()
    x = x.astype(jnp.float32)
    options = dict(num_heads=N, num_kv_heads=K, head_dim=H, d_model=D)
    plain = GatedAttention(**options, gates="none", rngs=nnx.Rngs(0))
    gated = GatedAttention(**options, gates="g1:scale=2:zeros+g5:headwise:scale=2:zeros", rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(run(plain, x)[0], run(gated, x)[0])


@pytest.mark.slow
def test_activation_clip_and_sandwich_norm():
    x = 100 * data()[0].astype(jnp.float32)
    options = dict(d_model=D, num_heads=N, num_kv_heads=K, head_dim=H, ffn_dim=16)
    block = randomize(GatedAttentionBlock(TransformerConfig(**options, activation_clip=0.01), rngs=nnx.Rngs(0)))
    assert jnp.abs(run(block, x)[0] - x).max() <= 0.0201
    sandwich = randomize(GatedAttentionBlock(TransformerConfig(**options, sandwich_norm=True), rngs=nnx.Rngs(0)))
    middle = []
    sandwich(x, probe=lambda kind, **c: middle.append(c.get("middle")) or {})
    added = (middle[1] - x) / sandwich.attention_post_norm.weight[...]
    np.testing.assert_allclose((added**2).mean(-1), 1, rtol=1e-2)


def test_impossible_heads_are_refused():
    with pytest.raises(ValueError, match="num_heads=6 is not a multiple of num_kv_heads=4"):
        GatedAttention(num_heads=6, num_kv_heads=4, head_dim=8, d_model=D, rngs=nnx.Rngs(0))


@pytest.mark.slow
def test_parameters_stay_float32_under_bfloat16():
    layer = GatedAttention(num_heads=N, num_kv_heads=K, head_dim=H, d_model=D, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert {p.dtype for p in jax.tree.leaves(nnx.state(layer))} == {jnp.dtype("float32")}
    assert layer(data()[0].astype(jnp.bfloat16))[0].dtype == jnp.bfloat16


def test_kernel_choice_does_not_change_the_layer():
    x, segments = data()
    x = x.astype(jnp.float32)
    layers = [
        GatedAttention(num_heads=N, num_kv_heads=K, head_dim=H, d_model=D, window=3, kernel=name, rngs=nnx.Rngs(0))
        for name in ("reference", "chunked")
    ]
    np.testing.assert_allclose(run(layers[0], x, None, segments)[0], run(layers[1], x, None, segments)[0], atol=1e-6)
    assert set(kernels.CAPABILITIES) >= {"reference", "chunked"}


@pytest.mark.parametrize(
    "changes,message",
    [
        (dict(sink="foo"), "sink='foo': must be one of"),
        (dict(sdpa_activation="relu"), "sdpa_activation='relu'"),
        (dict(window=-1), "window=-1"),
        (dict(head_dim=7), "rotates 7 dimensions"),
        (dict(rope=RopeConfig(fraction=0.3)), "whole even number"),
        (dict(num_kv_heads=0), "num_kv_heads=0: must be positive"),
        (dict(num_kv_heads=3), "num_kv_heads may be 1, 2, 4"),
        (dict(gates="g1:in_dim=99"), "in_dim=99 exceeds d_model=16"),
        (dict(gates="g1:slice", d_model=18), "d_model=18 cannot be cut into a slice for each of 4 heads"),
        (dict(gates=5), "gates=5: must be a short form"),
        (dict(kernel="flash"), "kernel='flash'"),
    ],
)
def test_attention_refuses_what_it_cannot_compute(changes, message):
    settings = dict(num_heads=4, num_kv_heads=2, head_dim=8, d_model=16) | changes
    with pytest.raises(ValueError, match=re.escape(message)):
        GatedAttention(**settings, rngs=nnx.Rngs(0))


def test_attention_refuses_inputs_of_another_shape():
    attention = GatedAttention(num_heads=2, num_kv_heads=1, head_dim=4, d_model=8, rngs=nnx.Rngs(0))
    x = jnp.ones((2, 5, 8))
    ids = jnp.ones((2, 5), int)
    for args, message in (
        ((jnp.ones((2, 5, 7)),), "x of shape (2, 5, 7): must be [B, T, 8]"),
        ((jnp.ones((5, 8)),), "must be [B, T, 8]"),
        ((jnp.ones((0, 5, 8)),), "at least 1"),
        ((x, ids[:1]), "positions int32(1, 5): must be integers of shape (2, 5)"),
        ((x, None, ids[:, :4]), "segment_ids int32(2, 4)"),
        ((x, None, jnp.ones((2, 5))), "segment_ids float32(2, 5)"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            attention(*args)
