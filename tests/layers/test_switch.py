"""SwitchHead: with one expert it is a headwise gate, and otherwise what its definition says."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gatedattn import TransformerConfig
from gatedattn.config import ConfigError, SwitchConfig
from gatedattn.layers import GatedAttention
from gatedattn.transformer import count, flops_per_token
from tests.layers.test_layers import F64, B, D, H, K, N, T, data, randomize, run, sigmoid

SIZES = dict(num_heads=N, num_kv_heads=K, head_dim=H, d_model=D)


def parameters(layer):
    return {"/".join(map(str, path)): np.asarray(p[...]) for path, p in nnx.to_flat_state(nnx.state(layer))}


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("projections,gates", [("v", "g2:headwise"), ("o", "g1:headwise"), ("vo", "g2:headwise+g1:headwise")])
def test_one_expert_is_the_headwise_gate(projections, gates, split):
    """To the last bit: the paper's argument for comparing the two (appendix A.1). But for experts that share the input (`split`), whose
    product is another one, with a batch of experts: some processors round it otherwise."""
    x, segments = data()
    x = x.astype(jnp.float32)
    switch = randomize(GatedAttention(**SIZES, gates="none", switch=SwitchConfig(projections, split=split), rngs=nnx.Rngs(0)))
    gated = GatedAttention(**SIZES, gates=gates, rngs=nnx.Rngs(0))
    nnx.update(gated, {name: nnx.state(getattr(switch, name)) for name in ("query", "key", "value", "output")})
    routers = [getattr(switch, {"v": "value_router", "o": "output_router"}[letter]) for letter in projections]
    for gate, router in zip(gated.gates, routers, strict=True):
        gate.kernel[...] = router.kernel[...]
    gated.query_norm.weight[...], gated.key_norm.weight[...] = switch.query_norm.weight[...], switch.key_norm.weight[...]
    ours, expected = (run(layer, x, None, segments)[0] for layer in (switch, gated))
    if split:
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=3e-6)
    else:
        np.testing.assert_array_equal(ours, expected)


def chosen(logits, top_k):
    """Scores [M, E] of one token."""
    kept = np.zeros_like(logits)
    for m, row in enumerate(logits):
        for e in np.argsort(-row)[:top_k]:
            kept[m, e] = sigmoid(row[e])
    return kept


@pytest.mark.parametrize("split,query_routers", [(False, True), (True, False)])
def test_equals_the_definition(x64, split, query_routers):
    """Experts on key, value and output, two of three chosen, token by token and head by head."""
    E, x = 3, data()[0]
    config = SwitchConfig("kvo", num_experts=E, top_k=2, split=split, query_routers=query_routers)
    layer = GatedAttention(**SIZES, gates="none", qk_norm=False, rope=None, switch=config, **F64, rngs=nnx.Rngs(0))
    p, M = parameters(randomize(layer)), N if query_routers else K
    assert p["value_router/kernel"].shape == (D, M, E)
    q = np.einsum("btd,dnh->btnh", x, p["query/kernel"])
    k, v = np.zeros((2, B, T, M, H))
    for b, t in np.ndindex(B, T):
        token = np.asarray(x[b, t])
        scores = chosen(np.einsum("d,dme->me", token, p["value_router/kernel"]), 2)
        for out, w in ((k, p["key/kernel"]), (v, p["value/kernel"])):
            for m, e in np.ndindex(M, E):
                head, rows = m * K // M, slice(D // E * e, D // E * (e + 1)) if split else slice(None)
                columns = slice(None) if split else slice(H * e, H * (e + 1))
                out[b, t, m] += scores[m, e] * (token[rows] @ w[rows, head, columns])
    k, v = (np.repeat(z, N // M, axis=2) for z in (k, v))
    logits = np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(H)
    logits[..., ~np.tri(T, dtype=bool)] = -np.inf
    weights = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    y, expected = np.einsum("bnts,bsnh->btnh", weights, v), np.zeros((B, T, D))
    for b, t in np.ndindex(B, T):
        scores = chosen(np.einsum("d,dne->ne", x[b, t], p["output_router/kernel"]), 2)
        for n, e in np.ndindex(N, E):
            part = slice(H // E * e, H // E * (e + 1))
            inner, w = (
                (y[b, t, n, part], p["output/kernel"][n, part])
                if split
                else (y[b, t, n], p["output/kernel"][n, H * e : H * (e + 1)])
            )
            expected[b, t] += scores[n, e] * (inner @ w)
    np.testing.assert_allclose(run(layer, x)[0], expected, atol=2e-6)  # scores are float32


def test_only_the_chosen_learn():
    """An expert that no token chose has no gradient; a router's comes through the scores of the chosen."""
    config = SwitchConfig("v", num_experts=2)
    layer = randomize(GatedAttention(**SIZES, gates="none", switch=config, kernel="reference", rngs=nnx.Rngs(0)))
    layer.value_router.kernel[...] = (
        layer.value_router.kernel[...].at[:, :, 0].add(-jnp.abs(layer.value_router.kernel[...][:, :, 0]) - 9)
    )
    x = jnp.abs(data()[0].astype(jnp.float32))
    grads = nnx.jit(nnx.grad(lambda layer: jnp.sin(layer(x)[0]).sum()))(layer)
    by_expert = np.asarray(grads.value.kernel[...]).reshape(D, K, 2, H)
    assert not np.any(by_expert[:, :, 0]) and np.any(by_expert[:, :, 1])
    assert not np.any(grads.value_router.kernel[...][..., 0]) and np.any(grads.value_router.kernel[...][..., 1])


def test_counts():
    """What a token passes through: top_k of the experts of each projection that has them, and the routers."""
    plain = TransformerConfig(
        vocab_size=50, d_model=32, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, ffn_dim=48, gates="none"
    )
    sizes = {name: count(dataclasses.replace(plain, switch=config)) for name, config in {
        "plain": SwitchConfig(),
        "full": SwitchConfig("kvo", num_experts=4, top_k=2),
        "split": SwitchConfig("vo", num_experts=4, top_k=2, split=True, query_routers=True),
    }.items()}  # fmt: skip
    added = {
        name: [size[key] - sizes["plain"][key] for key in ("params_total", "params_active")] for name, size in sizes.items()
    }
    k = v = 32 * 2 * 8
    o = 32 * 4 * 8
    assert added["full"] == [3 * (3 * (k + v + o) + 32 * (2 + 4) * 4), 3 * ((k + v + o) + 32 * (2 + 4) * 4)]
    assert added["split"] == [3 * (32 * (4 + 4) * 4), 3 * (32 * (4 + 4) * 4 - (v + o) // 2)]
    full = dataclasses.replace(plain, switch=SwitchConfig("kvo", num_experts=4, top_k=2))
    assert flops_per_token(full, 16) - flops_per_token(plain, 16) == 6 * added["full"][1]


@pytest.mark.parametrize(
    "switch,fields,message",
    [
        (dict(projections="k"), {}, "projections='k': must be one of"),
        (dict(projections="v", top_k=2), {}, "switch.top_k=2 exceeds switch.num_experts=1"),
        (dict(num_experts=2), {}, "without switch.projections: say which"),
        (dict(split=True), {}, "switch.split without switch.projections: say which"),
        (dict(projections="o", query_routers=True), {}, "only keys and values have a choice of routers"),
        (
            dict(projections="vo", num_experts=5, split=True),
            {},
            "switch.split cuts d_model=192 into switch.num_experts=5 parts",
        ),
        (dict(projections="v", num_experts=2), dict(attention_bias=True), "experts have no biases"),
    ],
)
def test_settings_that_make_no_sense(switch, fields, message):
    with pytest.raises(ConfigError, match=message):
        TransformerConfig(switch=SwitchConfig(**switch), **fields)
