"""Layers that repeat in a pattern: what each computes is what a block with its own settings computes."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gatedattn import GatedAttentionBlock, Transformer, TransformerConfig, probes, sharding
from gatedattn.analysis import analyze
from gatedattn.config import ConfigError, MoEConfig, RunConfig
from gatedattn.data import tokenizers
from gatedattn.inference import Generator
from gatedattn.interop.build import flat_parameters
from gatedattn.interop.hf_export import config_to_hf
from gatedattn.interop.surgery import add_gates
from gatedattn.report import build as report
from gatedattn.report.runs import Run
from gatedattn.training import initial, recorder
from gatedattn.transformer import abstract_parameters, count, flops_per_token, in_layer_order, recomputed_flops_per_token
from tests.command_line import run, write_recipe

PLAIN = TransformerConfig(
    vocab_size=50, d_model=16, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=8, ffn_dim=24, kernel="reference"
)
PATTERN = "window=3, gates=g1:headwise+g2|position=none,gates=none,sink=learned"
CONFIG = dataclasses.replace(PLAIN, pattern=PATTERN)
MOE = MoEConfig(num_experts=4, top_k=2, expert_dim=8)
TOKENS = np.random.default_rng(0).integers(0, 50, (2, 11))


def build(config):
    """Every parameter random, made by NumPy, which compiles nothing."""
    graphdef, shapes = nnx.split(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(0)
    return nnx.merge(graphdef, jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.3, x.shape), x.dtype), shapes))


def loop_over_layers(config, params, tokens):
    """The model in plain Python: layer i is a block with the settings that the pattern writes for it."""
    local = dataclasses.replace(config, pattern="", window=3, gates="g1:headwise+g2")
    distant = dataclasses.replace(config, pattern="", position="none", gates="none", sink="learned")
    x = params["embedding"]["table"][tokens]
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    for i in range(config.num_layers):
        block = nnx.eval_shape(lambda i=i: GatedAttentionBlock((local, distant)[i % 2], rngs=nnx.Rngs(0)))
        weights = jax.tree.map(lambda p, i=i: p[i // 2], params["layers"][i % 2])
        x, _ = nnx.merge(nnx.graphdef(block), weights)(x, positions)
    final = x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + config.norm_eps) * params["final_norm"]["weight"]
    return final @ params["embedding"]["table"].T


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "full", "attn"])
def test_a_scan_over_periods_equals_a_loop_over_the_layers(remat):
    config = dataclasses.replace(CONFIG, remat=remat)
    graphdef, params = nnx.split(build(config))
    params = nnx.as_pure(params)

    def through(logits):
        return jax.jit(jax.value_and_grad(lambda p: (logits(p) ** 2).mean()))(params)

    loss, grads = through(lambda p: nnx.merge(graphdef, p)(TOKENS)[0])
    expected, expected_grads = through(lambda p: loop_over_layers(config, p, TOKENS))
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * np.abs(b).max()), grads, expected_grads)


def test_the_program_does_not_grow_with_depth():
    def size(layers):
        config = dataclasses.replace(CONFIG, num_layers=layers, remat="full")
        graphdef, params = nnx.split(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))
        loss = jax.grad(lambda p: nnx.merge(graphdef, p)(TOKENS)[0].sum())
        return len(jax.jit(loss).lower(params).as_text().splitlines())

    assert size(8) == size(2)


@pytest.mark.slow
def test_layer_i_starts_as_it_does_without_a_pattern():
    def start(config):
        return jax.jit(lambda: nnx.state(Transformer(config, rngs=nnx.Rngs(1)), nnx.Param))()

    plain, mixed = flat_parameters(start(PLAIN)), flat_parameters(start(dataclasses.replace(PLAIN, pattern="|")))
    for path, found in plain.items():
        for i in (0, 1) if path.startswith("layers/") else ():
            np.testing.assert_array_equal(mixed.pop(path.replace("layers/", f"layers/{i}/")), found[i::2])
    assert mixed.keys() == {path for path in plain if not path.startswith("layers/")}


@pytest.mark.parametrize("look", ["measure", pytest.param("inspect", marks=pytest.mark.slow)])
def test_what_a_layer_lacks_is_nan(look):
    graphdef, params = nnx.split(build(CONFIG))

    @jax.jit
    def both(params, tokens):
        model = nnx.merge(graphdef, params)
        return getattr(probes, look)(model, tokens), probes.attention_maps(model, tokens)

    measured, maps = jax.device_get(both(params, TOKENS))
    measured = measured[0] if look == "inspect" else measured
    assert list(measured["gates"]) == ["g1:headwise", "g2"]
    for statistics in measured["gates"].values():
        for name, value in statistics.items():
            assert np.isfinite(value[0::2]).all() and np.isnan(value[1::2]).all(), name
    assert measured["bos_share"].shape == (4, 4) and np.isfinite(measured["bos_share"]).all()
    far = np.tril(np.ones((11, 11), bool), -3)
    assert (maps[0::2][..., far] == 0).all() and (maps[1::2][..., far] > 0).all()
    np.testing.assert_allclose(measured["bos_share"], maps[..., 1:, 0].mean((1, 3)), atol=1e-6)


def test_experts_of_every_layer_are_told_of():
    """What the step records of a mixture of experts, by layer."""
    aux = jax.eval_shape(lambda: Transformer(dataclasses.replace(CONFIG, moe=MOE), rngs=nnx.Rngs(0))(TOKENS)[1])
    assert aux["router_load"].shape == (4, 4) and aux["router_entropy"].shape == (4,) and aux["router_z"].shape == ()


def test_in_layer_order():
    found = [{"a": jnp.array([0, 2]), "b": {"c": jnp.array([[5.0], [7.0]])}}, {"a": jnp.array([1, 3])}]
    both = in_layer_order(found)
    np.testing.assert_array_equal(both["a"], [0, 1, 2, 3])
    np.testing.assert_array_equal(both["b"]["c"], [[5], [np.nan], [7], [np.nan]])


def test_a_mesh_gives_what_one_device_gives():
    """Gradients, experts and other meshes: tests/test_sharding.py."""
    graphdef, params = nnx.split(build(CONFIG))
    forward = jax.jit(lambda params, tokens: nnx.merge(graphdef, params)(tokens)[0])
    mesh = jax.make_mesh((2, 2), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    divided = jax.device_put(params, sharding.shardings(params, mesh))
    kernel = divided["layers"][1]["attention"]["query"]["kernel"][...]
    assert kernel.sharding.spec == jax.P(None, "fsdp", "tensor", None)
    alone = forward(params, TOKENS)
    with jax.set_mesh(mesh):
        np.testing.assert_allclose(forward(divided, TOKENS), alone, atol=1e-4)


def test_counts():
    paths = abstract_parameters(CONFIG)
    assert paths["layers/0/attention/gates/1/kernel"].shape == (2, 16, 2, 8) and paths["layers/1/attention/sink"].shape == (
        2,
        4,
    )
    sizes = count(CONFIG)
    layer = 16 * 8 * (4 + 2 + 2 + 4) + 3 * 16 * 24 + 2 * 16 + 2 * 8
    assert sizes["params_gate"] == 2 * (16 * 4 + 16 * 2 * 8)
    assert sizes["params_total"] == 50 * 16 + 4 * layer + 16 + sizes["params_gate"] + 2 * 4
    alike = [dataclasses.replace(PLAIN, window=w, gates="none", remat="full", moe=MOE) for w in (4, 0)]
    mixed = dataclasses.replace(alike[1], pattern="window=4|window=0")
    for cost in (flops_per_token, recomputed_flops_per_token):
        assert cost(mixed, 16) == pytest.approx(np.mean([cost(config, 16) for config in alike]), abs=1)
    assert count(mixed) == count(alike[0])


@pytest.mark.parametrize(
    "pattern, message",
    [
        ("window=4|window=0|window=4", "num_layers=4 is not a multiple of the 3 layers of pattern=.*: the nearest is 3 or 6"),
        ("|||||", "num_layers=4 is not a multiple of the 6 layers of pattern=.*: the nearest is 6"),
        ("window=4", "is of one layer"),
        ("windw=4|", r"'windw=4': layers may differ in window, position, gates, sink \(did you mean 'window'\?\)"),
        ("remat=full|", "'remat=full': layers may differ in"),
        ("window=-1|", "'window=-1': must be a number of tokens, or 0 for all"),
        ("window|", "'window': each setting of a layer is given once, with a value"),
        ("window=1,window=2|", "'window=2': each setting of a layer is given once"),
        ("position=learned|", "'position=learned': learned positions"),
        ("position=nope|", "must be one of rope, learned, none"),
        ("gates=g1:headwize|", r"did you mean 'headwise'\?"),
        ("sink=lerned|", "did you mean 'learned'"),
    ],
)
def test_what_makes_no_pattern_is_told_in_a_line(pattern, message):
    with pytest.raises(ConfigError, match=message) as error:
        dataclasses.replace(PLAIN, pattern=pattern)
    assert len(str(error.value).splitlines()) == 1


def test_what_knows_no_patterns_says_so():
    with pytest.raises(ConfigError, match=r"no Hugging Face class computes this model: pattern=window=4\|"):
        config_to_hf(dataclasses.replace(PLAIN, gates="none", pattern="window=4|"))
    with pytest.raises(ValueError, match="add_gates takes models whose layers are all alike"):
        add_gates(nnx.eval_shape(lambda: Transformer(CONFIG, rngs=nnx.Rngs(0))), "g1:scale=2:zeros")


@pytest.mark.parametrize("unroll", [False, True])
@pytest.mark.slow
def test_generation_honours_each_layer(unroll):
    """Each new token is the most likely one of a pass without a cache over the whole row."""
    model = build(CONFIG)
    prompts = [TOKENS[0, :9].tolist(), TOKENS[1, :4].tolist()]
    pieces = np.concatenate(list(Generator(model, unroll=unroll).stream(prompts, max_tokens=5)), axis=1)
    graphdef, params = nnx.split(model)
    logits = jax.jit(lambda params, rows: nnx.merge(graphdef, params)(rows)[0])
    for prompt, new in zip(prompts, pieces.tolist(), strict=True):
        at = np.asarray(logits(params, np.array([prompt + new + [0] * (9 - len(prompt))])))[0, len(prompt) - 1 :]
        np.testing.assert_allclose([at[i][token] for i, token in enumerate(new)], at[: len(new)].max(-1), atol=1e-4)


def test_a_run_with_a_pattern_begins_with_a_model_without(capsys):
    plain, mixed = build(dataclasses.replace(PLAIN, gates="g2+g1:headwise")), build(CONFIG)
    params = nnx.as_pure(nnx.state(mixed, nnx.Param))
    theirs = flat_parameters(plain)
    origin = initial.Origin("there", plain.config, {path: np.asarray(p) for path, p in theirs.items()})
    ours = flat_parameters(initial.begin(CONFIG, params, origin, tokenizers.Bytes()))
    for i in (0, 1):
        np.testing.assert_array_equal(ours[f"layers/{i}/mlp/up/kernel"], theirs["layers/mlp/up/kernel"][i::2])
    gate = "attention/gates/{}/kernel".format
    np.testing.assert_array_equal(ours[f"layers/0/{gate(0)}"], theirs[f"layers/{gate(1)}"][0::2])
    np.testing.assert_array_equal(ours[f"layers/0/{gate(1)}"], theirs[f"layers/{gate(0)}"][0::2])
    out = capsys.readouterr().out
    assert "1 new, 0 left" in out and "new  layers/1/attention/sink" in out and "model.pattern was '' there" in out
    back = initial.Origin("there", CONFIG, flat_parameters(mixed))
    same = flat_parameters(initial.begin(CONFIG, params, back, tokenizers.Bytes()))
    jax.tree.map(np.testing.assert_array_equal, same, back.params)
    with pytest.raises(ConfigError, match="its pattern is of 2 layers, this model's of 1"):
        initial.match(PLAIN, {path: leaf.shape for path, leaf in theirs.items()}, back)


def test_a_line_of_heads_and_its_reader_know_which_layers_have_the_gate(tmp_path):
    share, gate = np.full((4, 4), 0.5), np.array([[0.25], [np.nan]] * 2)
    probe = {name: share for name in ("bos_share", "attention_self", "attention_previous")} | {"activation_max": share[0]}
    probe["gates"] = {"g1:headwise": dict.fromkeys(("mean", "below_0.1", "above_0.9"), gate)}
    config = RunConfig(model=dataclasses.replace(PLAIN, gates="g5", pattern="gates=g1:headwise|gates=none"))
    writer = recorder.Recorder(tmp_path, config, {})
    writer.metrics({"step": 1, "loss": 2.0})
    writer.heads(recorder.heads_line(1, probe))
    writer.close()
    assert recorder.read_lines(tmp_path / "heads.jsonl")[0]["gate_mean"] == {"g1:headwise": [[0.25], [None]] * 2}
    read = Run.read(tmp_path, "mixed")
    np.testing.assert_array_equal(read.gate("mean")["g1:headwise"][0][1], gate)
    assert read.summary()["mean gate"] == "0.250" and read.summary()["gates"] == "g1:headwise|none"


@pytest.mark.slow
def test_a_run_with_its_probe_evaluation_report_and_analysis_and_going_on(tmp_path):
    settings = ["--config.model.pattern=window=4,gates=g1|gates=none,position=none", "--config.optimizer.schedule=constant",
                "--config.probe.every=2", "--config.eval.every=2", "--config.eval.batches=1", "--workdir=mixed"]  # fmt: skip
    recipe = write_recipe(tmp_path)
    first, longer, other, counted = run(
        tmp_path,
        [recipe, *settings, "--config.train.steps=3"],
        [recipe, *settings, "--config.train.steps=5"],
        [recipe, *settings, "--config.model.pattern=window=4|window=0"],
        [recipe, *settings, "--mode=count"],
    )
    assert first.code == 0, first.err
    assert longer.code == 0 and "from step 3" in longer.out, longer.err
    assert other.code == 2 and "model.pattern was 'window=4,gates=g1|gates=none,position=none'" in other.err
    assert json.loads(counted.out)["params_gate"] == 32 * 4 * 8
    metrics, heads = (recorder.read_lines(tmp_path / f"mixed/{name}.jsonl") for name in ("metrics", "heads"))
    assert metrics[-1]["step"] == 5 and [line["step"] for line in heads] == [2, 3, 4, 5]
    for line in heads:
        assert np.shape(line["bos_share"]) == (2, 4) and line["gate_mean"]["g1"][1] == [None] * 4
    (tmp_path / "text.txt").write_text("The gates open, and sinks close. " * 20)
    analyze([tmp_path / "mixed"], tmp_path / "text.txt", tmp_path / "analysis", length=16, window=8)
    (about,) = json.loads((tmp_path / "analysis/analysis.json").read_text())["models"]
    assert 0 < about["mean gate"]["g1"] < 1 and about["gates"]["g1"]["mean"][1] == [None] * 4
    assert "layer 0" in (page := (tmp_path / "analysis/text.html").read_text()) and "layer 1" not in page
    report([tmp_path / "mixed"], tmp_path / "report.html")
    assert "gate_mean: g1" in (tmp_path / "report.html").read_text()
