"""Native sparse attention against its equations, token by token in float64, and where it has to be ordinary attention."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gatedattn import Transformer, TransformerConfig, kernels, probes
from gatedattn.config import ConfigError, NSAConfig, RopeConfig
from gatedattn.inference import score
from gatedattn.kernels import Request
from gatedattn.layers import GatedAttention, nsa
from gatedattn.layers import rope as rope_lib
from gatedattn.transformer import count, flops_per_token
from tests.layers.test_layers import F64, randomize, run, sigmoid

B, T, D, N, K, H = 2, 29, 12, 4, 2, 6
SIZES = dict(num_heads=N, num_kv_heads=K, head_dim=H, d_model=D)
SMALL = NSAConfig(enabled=True, compress_block=4, compress_stride=2, select_block=4, select_count=4, window=3)
ONE = NSAConfig(enabled=True, gate="equal", separate=False, compression="mean", compress_block=1, compress_stride=1, select_block=1,
                select_count=64, window=64)  # fmt: skip
SEGMENTS = np.array([[1] * 18 + [2] * 11, [1] * 29])
POSITIONS = np.array([np.r_[0:18, 0:11], np.r_[0:29]])


def inputs(seed=1):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(B, T, D)))


def softmax_over(q, keys, values):
    if not len(keys):
        return np.zeros(H), np.zeros(0)
    weights = np.exp(np.array(keys) @ q / np.sqrt(H))
    weights /= weights.sum()
    return weights @ np.array(values), weights


def turned(x, position):
    return np.asarray(rope_lib.apply(jnp.asarray(x)[None, None, None], np.array([[position]]), RopeConfig()))[0, 0, 0]


def by_the_equations(layer, x, config):
    """Block by block and query by query; blocks are counted from 1 in the selection score, as the paper's equation 9 does."""
    p = {"/".join(map(str, path)): np.asarray(v[...]) for path, v in nnx.to_flat_state(nnx.state(layer))}
    L, d, size, n = config.compress_block, config.compress_stride, config.select_block, config.select_count
    x = np.asarray(x)
    q, k, v = (np.einsum("btd,dnh->btnh", x, p[f"{name}/kernel"]) for name in ("query", "key", "value"))
    k, v = (z.reshape(B, T, K, 3, H) for z in (k, v))
    gates = sigmoid(np.einsum("btd,dnc->btnc", x, p["sparse/gate/kernel"]))

    def compress(name, block):
        a = (block + p[f"sparse/compress_{name}/position/table"]).reshape(-1) @ p[f"sparse/compress_{name}/inner/kernel"]
        return (a * sigmoid(a)) @ p[f"sparse/compress_{name}/outer/kernel"]

    y, chosen = np.zeros((B, T, N, H)), {}
    for b in range(B):
        starts = range(0, T - L + 1, d)
        ck = [[turned(compress("key", k[b, s : s + L, h, 0]), POSITIONS[b, s]) for s in starts] for h in range(K)]
        cv = [[compress("value", v[b, s : s + L, h, 0]) for s in starts] for h in range(K)]
        rk = np.array([[[turned(k[b, s, h, c], POSITIONS[b, s]) for c in (1, 2)] for h in range(K)] for s in range(T)])
        for t in range(T):
            own = [s for s in range(t + 1) if SEGMENTS[b, s] == SEGMENTS[b, t]]
            for h in range(K):
                heads = range(h * N // K, (h + 1) * N // K)
                query = {m: turned(q[b, t, m], POSITIONS[b, t]) for m in heads}
                seen = [i for i, s in enumerate(starts) if s >= own[0] and s + L - 1 <= t]
                total = np.zeros(len(starts))
                for m in heads:
                    out, weights = softmax_over(query[m], [ck[h][i] for i in seen], [cv[h][i] for i in seen])
                    y[b, t, m] += gates[b, t, m, 0] * out
                    total[seen] += weights
                p_cmp = {i + 1: total[i] for i in range(len(starts))}
                importance = {
                    j: sum(p_cmp.get(size // d * j - i - g, 0) for i in range(size // d) for g in range(L // d))
                    for j in range(1, -(-T // size) + 1)
                }
                possible = sorted({s // size + 1 for s in own})
                forced = [j for j in (possible[0], t // size + 1, t // size) if j in possible]
                others = sorted((j for j in possible if j not in forced), key=lambda j: (-importance[j], j))
                picked = (list(dict.fromkeys(forced)) + others)[:n]
                chosen[b, t, h] = sorted(picked)
                for m in heads:
                    sel = [s for s in own if s // size + 1 in picked]
                    near = [s for s in own if t - s < config.window]
                    for c, tokens in ((1, sel), (2, near)):
                        out, _ = softmax_over(query[m], rk[tokens, h, c - 1], v[b, tokens, h, c])
                        y[b, t, m] += gates[b, t, m, c] * out
    return np.einsum("btnh,nhd->btd", y, p["output/kernel"]), chosen


@pytest.mark.parametrize("kernel", ["reference", "chunked"])
def test_equals_the_equations(x64, kernel):
    x = inputs()
    layer = GatedAttention(**SIZES, gates="none", qk_norm=False, nsa=SMALL, kernel=kernel, **F64, rngs=nnx.Rngs(0))
    randomize(layer)
    expected, chosen = by_the_equations(layer, x, SMALL)
    assert len({tuple(blocks) for blocks in chosen.values()}) > 15  # there was something to choose
    assert any(chosen[1, t, 0] != chosen[1, t, 1] for t in range(T))
    np.testing.assert_allclose(run(layer, x, POSITIONS, SEGMENTS)[0], expected, atol=2e-6)  # gates are float32


@pytest.mark.parametrize("length,d,size", [(32, 16, 64), (4, 2, 4), (4, 4, 4), (2, 1, 6)])
def test_the_selection_score_is_the_papers_with_blocks_from_one(length, d, size):
    config = NSAConfig(enabled=True, compress_block=length, compress_stride=d, select_block=size)
    weights = nsa.overlap(5 * size, config)
    expected = np.zeros_like(weights)
    for j in range(1, weights.shape[1] + 1):
        for m in range(size // d):
            for n in range(length // d):
                i = size // d * j - m - n
                if 1 <= i <= len(weights):
                    expected[i - 1, j - 1] += 1
    np.testing.assert_array_equal(weights, expected)
    if (length, d, size) == (32, 16, 64):
        assert weights[:, 1].nonzero()[0].tolist() == [3, 4, 5, 6, 7] and weights[3:8, 1].tolist() == [1, 2, 2, 2, 1]


DENSE = NSAConfig(enabled=True, gate="equal", sparse=False)


@pytest.mark.parametrize(
    "config", [ONE, dataclasses.replace(DENSE, separate=False), DENSE], ids=["blocks", "dense", "separate"]
)
def test_with_every_block_it_is_ordinary_attention(config):
    """Blocks of one token, all of them chosen, a window over everything and gates of 1/3; or branches that are not sparse. Branches
    that have their own keys and values are then three attentions."""
    x = inputs().astype(jnp.float32)
    plain = randomize(GatedAttention(**SIZES, kernel="reference", rngs=nnx.Rngs(0)))
    layer = GatedAttention(**SIZES, nsa=config, kernel="reference", rngs=nnx.Rngs(0))
    for name in ("query", "key", "value", "output"):
        kernel = getattr(plain, name).kernel[...]
        repeated = config.separate and name in ("key", "value")
        getattr(layer, name).kernel[...] = jnp.repeat(kernel, 3, axis=1) if repeated else kernel
    nnx.update(layer, {name: nnx.state(getattr(plain, name)) for name in ("query_norm", "key_norm", "gates")})
    expected = run(plain, x, POSITIONS, SEGMENTS)[0]
    np.testing.assert_allclose(run(layer, x, POSITIONS, SEGMENTS)[0], expected, atol=2e-5)


def test_blocks_begin_at_the_size_of_tokens():
    tokens = jax.random.normal(jax.random.key(1), (2, 128, 2, 64))
    config = NSAConfig(enabled=True)
    compress = nsa.Compression(config, 64, init_std=0.02, rngs=nnx.Rngs(0))
    assert 0.3 < jnp.std(compress(nsa.cut(tokens, config))) / jnp.std(tokens) < 1


@pytest.mark.slow
def test_gradients_in_parts_equal_those_of_the_whole(x64, monkeypatch):
    """Queries that look at the compressed blocks eight at a time, and the selected ones through the chunked kernel, against a whole."""
    x = inputs()

    def gradients(queries, kernel):
        monkeypatch.setattr(nsa, "QUERIES", queries)
        layer = randomize(GatedAttention(**SIZES, gates="none", nsa=SMALL, kernel=kernel, **F64, rngs=nnx.Rngs(0)))
        return nnx.jit(nnx.grad(lambda layer: jnp.sin(layer(x, POSITIONS, SEGMENTS)[0]).sum()))(layer)

    whole, parts = gradients(64, "reference"), gradients(8, "chunked")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), parts, whole)
    assert all(np.any(g) for g in jax.tree.leaves(whole))


def test_a_token_changes_nothing_before_it_nor_in_another_document():
    layer = randomize(GatedAttention(**SIZES, nsa=SMALL, kernel="reference", rngs=nnx.Rngs(0)))
    x = inputs().astype(jnp.float32)
    f = nnx.jit(lambda layer, x: layer(x, POSITIONS, SEGMENTS)[0])
    before, after = f(layer, x), f(layer, x.at[:, 6].add(1.0))
    np.testing.assert_array_equal(before[:, :6], after[:, :6])
    np.testing.assert_array_equal(before[0, 18:], after[0, 18:])
    assert np.all(np.any(before[1, 6:10] != after[1, 6:10], axis=-1))


CONFIG = TransformerConfig(vocab_size=40, d_model=24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=6, ffn_dim=32, gates="none",
                           init_std=0.3, kernel="reference", nsa=SMALL)  # fmt: skip
TOKENS = np.random.default_rng(0).integers(0, 40, (B, T))


@pytest.mark.slow
def test_probes_show_weights_as_they_are():
    """bos_share is the weight on token 0, gates included, as in the maps; what no probe can know is NaN. With blocks of one token and
    equal gates the map is that of ordinary attention."""
    model = Transformer(CONFIG, rngs=nnx.Rngs(0))
    one = Transformer(dataclasses.replace(CONFIG, nsa=ONE), rngs=nnx.Rngs(0))
    plain = Transformer(dataclasses.replace(CONFIG, nsa=NSAConfig()), rngs=nnx.Rngs(0))
    nnx.update(one, nnx.state(plain))

    @nnx.jit
    def everything(model, one, plain):
        return probes.inspect(model, TOKENS)[0], [probes.attention_maps(m, TOKENS) for m in (model, one, plain)]

    found, maps = everything(model, one, plain)
    np.testing.assert_allclose(maps[1], maps[2], atol=1e-5)
    np.testing.assert_allclose(found["bos_share"], maps[0][..., 1:, 0].mean((1, 3)), atol=1e-5)
    assert found["branch_gates"].shape == (2, 4, 3) and np.all((0 < found["branch_gates"]) & (found["branch_gates"] < 1))
    assert np.isnan(found["attention_self"]).all() and np.isnan(found["attention_entropy"]).all()
    assert np.isfinite(found["attention_distance"]).all()


def test_counts():
    plain = dataclasses.replace(CONFIG, nsa=NSAConfig())
    compression = 2 * (4 * 6 * 6 + 6 * 6 + 4 * 6)
    added = 2 * (24 * 6 * 2 * 2 * 2 + compression + 24 * 4 * 3)  # keys and values of two more branches, compression, gates
    assert count(CONFIG)["params_total"] - count(plain)["params_total"] == added
    T = 16
    blocks = np.mean([len(range(3, t + 1, 2)) for t in range(T)])
    keys = blocks + np.mean([min(t + 1, 16) for t in range(T)]) + np.mean([min(t + 1, 3) for t in range(T)])
    more = 4 * 2 * 4 * 6 * (keys - (T + 1) / 2) + 2 * 2 * (24 * 6 * 2 * 2 * 2 + 24 * 4 * 3)
    more += 2 * 2 * 2 * 2 * (4 * 6 * 6 + 6 * 6) / 2  # layers, FLOPs, key and value, KV heads; a block every two tokens
    assert flops_per_token(CONFIG, T) - flops_per_token(plain, T) == pytest.approx(3 * more, abs=3)


@pytest.mark.slow
def test_memory_is_no_map():
    config = NSAConfig(enabled=True)
    sizes = dict(num_heads=4, num_kv_heads=1, head_dim=16, d_model=32)
    graphdef, params = nnx.split(
        nnx.eval_shape(lambda: GatedAttention(**sizes, nsa=config, kernel="chunked", rngs=nnx.Rngs(0)))
    )
    x = jax.ShapeDtypeStruct((1, 8192, 32), jnp.float32)
    grads = jax.jit(jax.grad(lambda params, x: nnx.merge(graphdef, params)(x)[0].sum()))
    assert (
        grads.lower(params, x).compile().memory_analysis().temp_size_in_bytes < 8192 * 8192 * 4 / 2
    )  # one map of one head: 8192^2


@pytest.mark.parametrize(
    "nsa,fields,message",
    [
        (dict(gate="none"), {}, "gate='none': must be one of learned, equal"),
        (dict(compress_stride=3), {}, "nsa.compress_stride=3 must divide nsa.compress_block=32"),
        (dict(compress_block=128), {}, "of which the first may not be the larger"),
        (dict(select_count=2), {}, "at least 3, the first block and the last two"),
        ({}, dict(sink="learned"), "sink=learned with nsa.enabled"),
        ({}, dict(window=8), "window=8 with nsa.enabled.*nsa.window"),
        ({}, dict(registers=2), "registers=2 with nsa.enabled"),
    ],
)
def test_settings_that_make_no_sense(nsa, fields, message):
    with pytest.raises(ConfigError, match=message):
        TransformerConfig(nsa=NSAConfig(enabled=True, **nsa), **fields)


def test_what_nothing_would_read_is_told():
    with pytest.raises(ConfigError, match="nsa.gate=equal, nsa.window=8: nothing would read it without nsa.enabled=True"):
        NSAConfig(gate="equal", window=8)
    with pytest.raises(ConfigError, match="nsa.select_count=6, nsa.window=8: nothing would read it without nsa.sparse=True"):
        NSAConfig(enabled=True, sparse=False, gate="equal", select_count=6, window=8)


def test_a_prefix_is_refused():
    attention = GatedAttention(
        num_heads=2, num_kv_heads=1, head_dim=4, d_model=8, nsa=NSAConfig(enabled=True), rngs=nnx.Rngs(0)
    )
    for asked in (dict(prefix=(jnp.ones((2, 1, 4)), jnp.ones((2, 1, 4)))), dict(keep=True)):
        with pytest.raises(ValueError, match="prefix and keep .register tokens. with sparse attention"):
            attention(jnp.ones((1, 3, 8)), **asked)


def test_what_cannot_be_had_is_told():
    with pytest.raises(ValueError, match="kernel='splash' cannot give each query its own choice of blocks"):
        kernels.choose("splash", Request(platform="tpu", selected=True))
    with pytest.raises(
        ValueError, match="kernel='chunked' cannot spread a sequence over devices .mesh.context=2. where queries"
    ):
        kernels.choose("chunked", Request(selected=True, context=2, seq_len=8))
    with pytest.raises(ValueError, match="kernel='auto' finds none that can: chunked cannot spread a sequence"):
        kernels.choose("auto", Request(platform="cpu", selected=True, context=2, seq_len=8))
    with pytest.raises(ConfigError, match="cache=window:4: native sparse attention"):
        score(Transformer(CONFIG, rngs=nnx.Rngs(0)), TOKENS, "window:4")
