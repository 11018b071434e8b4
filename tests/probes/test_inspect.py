"""The detailed probes against whole maps and whole tensors in numpy float64, and on models built to have a known answer."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from gatedattn import Transformer, probes, sharding
from gatedattn.config import MoEConfig, TransformerConfig
from gatedattn.gates import GateSpec
from gatedattn.kernels import reference
from gatedattn.probes import activations
from gatedattn.probes import gates as gate_probes

B, T = 3, 13
CONFIG = TransformerConfig(
    vocab_size=40, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, ffn_dim=48, init_std=0.3, dtype="float64",
    gates="g1+g2:headwise+g5+g1:none+g1:mean+g1:query+g3:self:tanh+g1:shared:silu:scale=0.5",
)  # fmt: skip
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, 40, (B, T))
SEGMENTS = np.array([[1] * 6 + [2] * 7, [1] * 13, [1] * 4 + [2] * 5 + [0] * 4])
POSITIONS = np.array([np.r_[0:6, 0:7], np.r_[0:13], np.r_[0:4, 0:5, 0:4]])
PLACE = np.array([np.r_[0:6, 0:7], np.r_[0:13], np.r_[0:4, 0:5, 0:4]])
REAL = SEGMENTS != 0


def captured(model):
    """Everything that a probe sees, layer by layer, in numpy."""

    def keep(kind, **captured):
        return {name: x for name, x in captured.items() if name not in ("attend", "gates", "weights", "mass") and x is not None}

    stacked = jax.jit(lambda: model.hidden(TOKENS, POSITIONS, SEGMENTS, probe=keep)[1]["probe"])()
    return [jax.tree.map(lambda x: np.asarray(x[i]), stacked) for i in range(model.config.num_layers)]


def inspected(model):
    found, hidden = jax.jit(lambda: probes.inspect(model, TOKENS, POSITIONS, SEGMENTS))()
    return jax.tree.map(np.asarray, found), hidden


@pytest.fixture(scope="module", params=["plain", pytest.param("learned sink, window", marks=pytest.mark.slow)])
def both(request):
    """An inspected model, and what its probe could see."""
    extra = {} if request.param == "plain" else {"sink": "learned", "window": 4, "kernel": "reference"}
    with jax.enable_x64(True):
        model = Transformer(dataclasses.replace(CONFIG, **extra), param_dtype=jnp.float64, rngs=nnx.Rngs(0))
        if extra:
            model.layers.attention.sink[...] = jnp.asarray(RNG.normal(size=(2, 4)))
        return model, inspected(model)[0], captured(model)


def test_attention_equals_whole_maps(both):
    model, found, layers = both
    queries = REAL & (PLACE > 0)
    for layer, c in enumerate(layers):
        with jax.enable_x64(True):
            probs = reference.probabilities(c["q"], c["k"], segment_ids=SEGMENTS, window=model.config.window, scale=8**-0.5)[0]
        probs = np.asarray(probs)
        kept = c["kept"][..., 0].swapaxes(1, 2)[..., None] if "kept" in c else 1.0
        start = np.arange(T) - PLACE
        for i in range(4):
            on = np.take_along_axis(probs * kept, (start + i).clip(max=T - 1)[:, None, :, None], -1)[..., 0].swapaxes(1, 2)
            seeing = queries & (PLACE > i)
            np.testing.assert_allclose(found["first_tokens"][layer, :, i], on[seeing].mean(0), atol=1e-6)
            if i == 0:
                np.testing.assert_allclose(found["bos_share"][layer], on[queries].mean(0), atol=1e-6)
                for t in range(1, T):
                    expected = on[queries & (PLACE == t)].mean(0)
                    np.testing.assert_allclose(found["bos_by_position"][layer, t], expected, atol=1e-6)
        assert np.isnan(found["bos_by_position"][layer, 0]).all()
        entropy = -np.sum(np.where(probs > 0, probs * np.log(np.maximum(probs, 1e-300)), 0), -1).swapaxes(1, 2)
        np.testing.assert_allclose(found["attention_entropy"][layer], entropy[queries].mean(0), atol=1e-6)
        back = np.arange(T)[:, None] - np.arange(T)
        np.testing.assert_allclose(
            found["attention_distance"][layer], (probs * back).sum(-1).swapaxes(1, 2)[queries].mean(0), atol=1e-5
        )


def test_gates_equal_whole_scores(both):
    model, found, layers = both
    for layer, c in enumerate(layers):
        assert set(c["scores"]) == set(found["gates"]) == set(map(str, model.config.gate_specs))
        for number, spec in enumerate(model.config.gate_specs):
            score, got = c["scores"][str(spec)].astype(np.float64), jax.tree.map(lambda x: x[layer], found["gates"][str(spec)])
            if spec.source == "none":
                score, real = score[None, None], np.ones((1, 1), bool)
            else:
                score, real = score.reshape(B, T, -1, score.shape[-1]), REAL
            assert np.allclose(got["openness"], score.mean(-1), atol=1e-6)
            s = score[real].swapaxes(0, 1).reshape(score.shape[2], -1)  # [M, tokens * C]
            np.testing.assert_allclose(got["deciles"], np.quantile(s, np.arange(1, 10) / 10, axis=1).T, atol=1e-6)
            edges = gate_probes.edges(spec)
            outer = np.concatenate([[-np.inf], edges[1:-1].astype(np.float32), [np.inf]])
            expected = [np.histogram(row.astype(np.float32), outer)[0] / row.size for row in s]
            np.testing.assert_allclose(got["histogram"], expected, atol=1e-6)
            if spec.activation == "sigmoid":
                np.testing.assert_allclose(got["entropy"], (-(s * np.log(s) + (1 - s) * np.log(1 - s))).mean(1), atol=1e-6)
            params = jax.tree.map(
                lambda x: np.asarray(x)[layer], nnx.to_pure_dict(nnx.state(model.layers.attention.gates[number]))
            )
            weight = params.get("kernel", params.get("table"))
            heads = {"hidden": 1, "none": 0, "query": 0, "self": 0}[spec.source]
            flat = np.moveaxis(weight, heads, 0) if spec.per_head and spec.sharing != "shared" else weight[None]
            np.testing.assert_allclose(got["weight_norm"], np.linalg.norm(flat.reshape(len(flat), -1), axis=1), rtol=1e-5)


def test_logits_are_what_the_activation_saw(both):
    """The range of the logits, passed through the activation, is the range of the scores; heads that are averaged have their own."""
    model, found, layers = both
    for layer, c in enumerate(layers):
        for spec in model.config.gate_specs:
            score, got = c["scores"][str(spec)], found["gates"][str(spec)]
            low, high = got["logit_min"][layer], got["logit_max"][layer]
            if spec.sharing == "mean":
                assert low.shape == (4,) and (score[REAL] > 1 / (1 + np.exp(-low.min()))).all()
                continue
            score = score[None] if spec.source == "none" else score.reshape(B, T, -1, score.shape[-1])[REAL]
            if spec.activation == "silu":  # not monotone
                continue
            forward = {"sigmoid": lambda z: 1 / (1 + np.exp(-z)), "tanh": np.tanh}[spec.activation]
            np.testing.assert_allclose(forward(low), score.min((0, 2)), atol=1e-5)
            np.testing.assert_allclose(forward(high), score.max((0, 2)), atol=1e-5)


def test_activations_equal_whole_tensors(both):
    _, found, layers = both
    names = {"input": "start", "attention": "attention", "middle": "middle", "mlp": "mlp", "block": "x"}
    for layer, c in enumerate(layers):
        for place, key in names.items():
            x = np.abs(np.where(REAL[..., None], c[key], 0))
            got = {name: value[layer] for name, value in found["activations"][place].items()}
            assert got["max"] == pytest.approx(x.max(), rel=1e-6)
            assert x[got["row"], got["token"], got["channel"]] == x.max()
        np.testing.assert_allclose(c["start"] + c["attention"] + c["mlp"], c["x"], atol=1e-12)
        x = c["x"][REAL]
        centred = x - x.mean()
        assert found["kurtosis"][layer] == pytest.approx((centred**4).mean() / (centred**2).mean() ** 2, rel=1e-5)
        assert found["activation_max"][layer] == found["activations"]["block"]["max"][layer]
        assert found["activation_median"][layer] == pytest.approx(np.median(np.abs(x)), rel=1e-6)
        assert found["massive"][layer] == 0
        for name, key in (("sdpa", "sdpa"), ("sdpa_gated", "gated")):
            y = np.abs(c[key][REAL])
            np.testing.assert_allclose(found[name]["mean"][layer], y.mean((0, 2)), rtol=1e-5)
            np.testing.assert_allclose(found[name]["below_0.01"][layer], (y < 0.01).mean((0, 2)), atol=1e-6)


def test_a_planted_sink_and_a_planted_outlier():
    """Keys of the first token aligned with every query: everything looks at it. One huge embedding channel sits where it was put."""
    config = dataclasses.replace(CONFIG, gates="g1", qk_norm=False, dtype="float32", position="none", init_std=1e-3)
    model = Transformer(config, rngs=nnx.Rngs(0))
    attention, table = model.layers.attention, jnp.zeros((40, 32)).at[1:, 1].set(1.0).at[0, 0].set(500.0)  # token 0 is BOS
    model.embedding.table[...] = table
    # After the norm token 0 is (sqrt 32, 0, ...), others (0, sqrt 32, ...): queries read channel 1, keys channel 0.
    attention.query.kernel[...] = jnp.zeros((2, 32, 4, 8)).at[:, 1, :, 0].set(2.0)
    attention.key.kernel[...] = jnp.zeros((2, 32, 2, 8)).at[:, 0, :, 0].set(2.0)
    tokens = np.concatenate([np.zeros((2, 1), int), RNG.integers(1, 40, (2, 11))], axis=1)
    found, _ = nnx.jit(probes.inspect)(model, tokens)
    np.testing.assert_allclose(found["bos_share"], 1, atol=1e-4)
    np.testing.assert_allclose(found["first_tokens"][..., 1:], 0, atol=1e-4)
    np.testing.assert_allclose(found["attention_entropy"], 0, atol=1e-3)
    np.testing.assert_allclose(found["attention_distance"], np.full((2, 4), np.mean(np.arange(1, 12))), rtol=1e-3)
    assert probes.sink_rate(found["bos_share"]) == probes.sink_rate(found["bos_share"], 0.8) == 1
    for place in ("input", "middle", "block"):
        at = found["activations"][place]
        assert at["channel"].tolist() == [0, 0] and at["token"].tolist() == [0, 0]
        np.testing.assert_allclose(at["max"], 500, rtol=1e-3)
    assert (found["activations"]["mlp"]["max"] < 1).all()
    np.testing.assert_allclose(found["massive"], 2 / 24, rtol=1e-6)
    # 24 tokens of 32 channels: 2 entries of 500 and 22 of 1.
    x = np.zeros(24 * 32)
    x[:2], x[2:24] = 500, 1
    np.testing.assert_allclose(found["kurtosis"], np.mean((x - x.mean()) ** 4) / x.var() ** 2, rtol=0.01)
    maps = nnx.jit(probes.attention_maps)(model, tokens)
    assert maps.shape == (2, 2, 4, 12, 12)
    np.testing.assert_allclose(maps[..., 0], 1, atol=1e-4)


def test_massive_is_large_and_rare():
    """By the median of the tokens that are not padding: one channel that is as large everywhere is massive too, one of 999 medians is not."""
    x = np.ones((1, 8, 64), np.float32)
    real = np.arange(8)[None] < 6
    x[0, 0, 3], x[0, 1, 3], x[0, 7, 3] = 1001, -1001, 1e6
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6)
    close(activations.massive(x, real)["massive"], 2 / 6)
    close(activations.massive(x, real)["activation_median"], 1)
    close(activations.massive(x * 0.09, real)["massive"], 0)  # 90.09: not above 100
    close(activations.massive(np.where(x == 1001, 999, x), real)["massive"], 1 / 6)
    x[..., 3] = 1001
    close(activations.massive(x, real)["massive"], 1)


def test_maps_are_what_the_shares_sum_up(both):
    model, found, _ = both
    with jax.enable_x64(True):
        maps = np.asarray(jax.jit(lambda: probes.attention_maps(model, TOKENS, POSITIONS, SEGMENTS))())
    own = np.diagonal(maps, axis1=-2, axis2=-1)  # [L, B, N, T]
    queries = REAL & (PLACE > 0)
    np.testing.assert_allclose(found["attention_self"], own.swapaxes(2, 3)[:, queries].mean(1), atol=1e-6)


@pytest.mark.slow
def test_router_load_and_bfloat16():
    moe = MoEConfig(num_experts=4, top_k=2, expert_dim=16)
    config = dataclasses.replace(CONFIG, gates="g1", dtype="bfloat16", moe=moe, init_std=0.02)
    found, hidden = nnx.jit(probes.inspect)(Transformer(config, rngs=nnx.Rngs(0)), TOKENS, POSITIONS, SEGMENTS)
    assert hidden.dtype == jnp.bfloat16 and found["router_load"].shape == (2, 4) and found["router_entropy"].shape == (2,)
    np.testing.assert_allclose(found["router_load"].sum(1), 1, rtol=1e-5)
    assert all(
        jnp.isfinite(x).all()
        for name, x in found.items()
        if name not in ("gates", "activations", "bos_by_position", "sdpa", "sdpa_gated")
    )


@pytest.mark.slow
def test_the_same_on_a_mesh():
    config = dataclasses.replace(CONFIG, gates="g1+g2:headwise", dtype="float32")
    model = Transformer(config, rngs=nnx.Rngs(0))
    tokens = RNG.integers(0, 40, (4, T))
    alone, _ = nnx.jit(probes.inspect)(model, tokens)
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    graphdef, params = nnx.split(model)
    with jax.set_mesh(mesh):
        params = jax.device_put(params, sharding.shardings(params, mesh))
        rows = jax.device_put(tokens, NamedSharding(mesh, PartitionSpec(("data", "fsdp"))))
        sharded, _ = jax.jit(lambda p, t: probes.inspect(nnx.merge(graphdef, p), t))(params, rows)
    flat = jax.tree_util.tree_leaves_with_path
    for (path, a), (_, b) in zip(flat(alone), flat(sharded), strict=True):
        if a.dtype == jnp.float32:
            np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-4, err_msg=jax.tree_util.keystr(path))


@pytest.mark.slow
def test_memory_grows_with_length_not_its_square():
    """A tenfold T x T float map of one head alone would be 40 MB at the longer length."""
    config = dataclasses.replace(CONFIG, gates="g1", dtype="float32", num_layers=1)
    graphdef, params = nnx.split(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))

    def temporaries(length):
        tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
        compiled = jax.jit(lambda p, t: probes.inspect(nnx.merge(graphdef, p), t)).lower(params, tokens).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    short, long = temporaries(2048), temporaries(8192)
    assert long < 4.5 * short, (short, long)


def test_histogram_edges():
    assert gate_probes.edges("g1")[[0, -1]].tolist() == [0, 1] and gate_probes.edges("g1:scale=2:zeros")[-1] == 2
    assert gate_probes.edges(GateSpec(activation="tanh"))[0] == -1 and gate_probes.edges("g1:add:silu")[0] == -4
