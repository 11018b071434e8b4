import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

from gatedattn import Transformer, TransformerConfig, probes
from gatedattn.config import MoEConfig
from gatedattn.transformer import abstract_parameters, count, flops_per_token, recomputed_flops_per_token

CONFIG = TransformerConfig(vocab_size=50, d_model=32, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, ffn_dim=48)
MOE = dataclasses.replace(CONFIG, moe=MoEConfig(num_experts=4, top_k=2, expert_dim=16))
ALL = [
    CONFIG,
    MOE,
    dataclasses.replace(CONFIG, position="learned", max_seq_len=16, tie_embeddings=False, embedding_scale=3.0, gates="none"),
    dataclasses.replace(CONFIG, position="none", gates="g1+g2:headwise", sandwich_norm=True, sink="learned", window=3),
]


def forward(model, *args):
    return nnx.jit(lambda m, *a: m(*a)[0])(model, *args)


TOKENS = np.random.default_rng(0).integers(0, 50, (2, 11))


@pytest.mark.parametrize("config", [*ALL[2:], *(pytest.param(c, marks=pytest.mark.slow) for c in ALL[:2])])
def test_scan_equals_a_loop_over_the_layers(config):
    model = Transformer(config, rngs=nnx.Rngs(0))
    positions = jnp.broadcast_to(jnp.arange(11), (2, 11))
    x = config.embedding_scale * model.embedding.table[...][TOKENS]
    if model.position is not None:
        x = x + model.position.table[...][positions]
    for i in range(config.num_layers):
        graphdef, layers = nnx.split(model.layers)
        x, _ = jax.jit(lambda layer, x: nnx.merge(graphdef, layer)(x, positions))(jax.tree.map(lambda p: p[i], layers), x)
    head = model.embedding.table[...].T if config.tie_embeddings else model.head.kernel[...]
    np.testing.assert_allclose(forward(model, TOKENS), model.final_norm(x) @ head, atol=2e-5)


@pytest.mark.parametrize("config", ALL, ids=range(len(ALL)))
def test_causal_and_isolated(config):
    """A token changes nothing before it, and nothing in another document of its row."""
    model = Transformer(config, rngs=nnx.Rngs(0))
    segments = np.where(np.arange(11) < 6, 1, 2) * np.ones((2, 1), int)
    positions = np.where(np.arange(11) < 6, np.arange(11), np.arange(11) - 6) * np.ones((2, 1), int)
    before, changed = forward(model, TOKENS, positions, segments), TOKENS.copy()
    changed[:, 3] = (changed[:, 3] + 1) % 50
    after = forward(model, changed, positions, segments)
    untouched = np.r_[0:3, 6:11]
    np.testing.assert_allclose(before[:, untouched], after[:, untouched], atol=1e-6)
    assert np.abs(before[:, 3:6] - after[:, 3:6]).max(axis=(0, 2)).min() > 1e-4


def test_packed_document_equals_it_alone():
    model = Transformer(CONFIG, rngs=nnx.Rngs(0))
    segments = np.where(np.arange(11) < 6, 1, 2) * np.ones((2, 1), int)
    positions = np.where(np.arange(11) < 6, np.arange(11), np.arange(11) - 6) * np.ones((2, 1), int)
    np.testing.assert_allclose(forward(model, TOKENS, positions, segments)[:, 6:], forward(model, TOKENS[:, 6:]), atol=1e-5)


def training_jaxpr(config, remat):
    """The backward pass of the layers as a jaxpr, for one row of 16 tokens."""
    graphdef, params = nnx.split(
        nnx.eval_shape(lambda: Transformer(dataclasses.replace(config, remat=remat), rngs=nnx.Rngs(0)))
    )
    tokens = jax.ShapeDtypeStruct((1, 16), jnp.int32)
    return jax.make_jaxpr(jax.grad(lambda p, t: jnp.sin(nnx.merge(graphdef, p).hidden(t)[0]).sum()))(params, tokens)


@pytest.mark.parametrize("config", [CONFIG, MOE], ids=["dense", "moe"])
@pytest.mark.slow
def test_remat_changes_no_gradient(config):
    def gradients(remat):
        model = Transformer(dataclasses.replace(config, remat=remat), rngs=nnx.Rngs(0))
        graphdef, params = nnx.split(model)
        return jax.jit(jax.grad(lambda p: jnp.sin(nnx.merge(graphdef, p)(TOKENS)[0]).sum()))(params)

    expected = gradients("none")
    for remat in ("attn", "mlp", "full", "offload"):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), expected, gradients(remat))


def matmul_flops(jaxpr) -> int:
    """FLOPs of all matrix products of a jaxpr, scans as long as they are."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contract, _), _ = eqn.params["dimension_numbers"]
            total += 2 * eqn.outvars[0].aval.size * math.prod(eqn.invars[0].aval.shape[i] for i in contract)
        elif eqn.primitive.name == "ragged_dot_general":
            rows, width = eqn.invars[0].aval.shape
            out = eqn.outvars[0].aval.shape  # [rows, n], or [experts, width, n] for a gradient of the weights
            total += 2 * rows * width * out[-1]
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        total += times * sum(matmul_flops(inner) for inner in jaxprs_in_params(eqn.params))
    return total


def test_recomputation_is_counted():
    """What each remat policy adds to the products of a training step is what the formula says. (Of a mixture of experts it cannot be
    read off the program: its products by tiles are a loop whose length is not known.)"""
    config = CONFIG
    T = 16
    plain = matmul_flops(training_jaxpr(config, "none").jaxpr)
    masked = (
        4 * config.num_layers * config.num_heads * config.head_dim * (T - 1) / 2
    )  # computed, then hidden by the causal mask
    for remat in ("attn", "mlp", "full", "offload"):
        added = (matmul_flops(training_jaxpr(config, remat).jaxpr) - plain) / T
        wanted = [recomputed_flops_per_token(dataclasses.replace(config, remat=name), T) for name in (remat, "none")]
        expected = wanted[0] - wanted[1] + (masked if remat in ("full", "offload") else 0)
        assert math.isclose(added, expected, rel_tol=0.03), (remat, added, expected)


@pytest.mark.parametrize(
    "change", [{}, {"gates": "g2+g5:headwise", "sandwich_norm": True}, {"kernel": "reference", "gates": "none"}]
)
def test_no_product_of_a_projection_is_computed_twice(change):
    """With remat=none the projections are multiplied three times in a training step, scores and values seven times: one
    of them to compute the scores again."""
    config, T = dataclasses.replace(CONFIG, **change), 16
    sizes = {path: math.prod(leaf.shape) for path, leaf in abstract_parameters(config).items() if path.startswith("layers/")}
    projections = 3 * 2 * T * sum(size for path, size in sizes.items() if path.endswith("kernel"))
    scores = matmul_flops(training_jaxpr(config, "none").jaxpr) - projections
    one = 2 * config.num_layers * config.num_heads * config.head_dim * T * T
    assert scores == 7 * one + (config.kernel == "auto") * one // T  # in the chunked kernel the sum of dy * y, for every query


def test_offload_keeps_the_residual_stream_on_the_host():
    text = str(training_jaxpr(CONFIG, "offload"))
    assert "f32<host>[3,1,16,32]" in text or "TransferToMemoryKind" in text or "pinned_host" in text


def test_bfloat16_stays_close_to_float32():
    exact = forward(Transformer(CONFIG, rngs=nnx.Rngs(0)), TOKENS)
    low = forward(Transformer(dataclasses.replace(CONFIG, dtype="bfloat16"), rngs=nnx.Rngs(0)), TOKENS)
    assert low.dtype == jnp.float32
    np.testing.assert_allclose(low, exact, atol=0.02 * np.abs(exact).max())


def test_counts_follow_from_the_shapes():
    """The paper's architectures (Table 7) with the Qwen vocabulary, written out."""
    V, D, L, N, K, H, F = 151_936, 2048, 28, 16, 8, 128, 6144
    dense = TransformerConfig(
        vocab_size=V, d_model=D, num_layers=L, num_heads=N, num_kv_heads=K, head_dim=H, ffn_dim=F, gates="none"
    )  # fmt: skip
    layer = D * H * (2 * N + 2 * K) + 3 * D * F + 2 * D + 2 * H
    assert count(dense)["params_total"] == V * D + L * layer + D == 1_720_574_976
    gated = dataclasses.replace(dense, gates="g1")
    assert count(gated)["params_gate"] == L * D * N * H == count(gated)["params_total"] - count(dense)["params_total"]

    moe = dataclasses.replace(
        dense, num_layers=24, num_heads=32, num_kv_heads=4, tie_embeddings=False, moe=MoEConfig(num_experts=128, top_k=8, expert_dim=768)
    )  # fmt: skip
    layer = D * H * (2 * 32 + 2 * 4) + 3 * D * 768 * 128 + D * 128 + 2 * D + 2 * H
    counts = count(moe)
    assert counts["params_total"] == 2 * V * D + 24 * layer + D
    assert counts["params_active"] == counts["params_total"] - 24 * 3 * D * 768 * 120


def test_flops_match_the_compiler():
    """XLA counts one scanned layer once, so compare a single layer; elementwise work is a few per cent here."""
    config = dataclasses.replace(
        CONFIG, num_layers=1, d_model=128, head_dim=32, ffn_dim=256, vocab_size=512, kernel="reference"
    )
    T = 64
    model = Transformer(config, rngs=nnx.Rngs(0))
    compiled = jax.jit(lambda tokens: model(tokens)[0]).lower(jnp.zeros((4, T), int)).compile()
    measured = compiled.cost_analysis()["flops"] / (4 * T)
    half_attention = 4 * config.num_heads * config.head_dim * (T - 1) / 2  # XLA computes the masked half too
    assert math.isclose(flops_per_token(config, T) / 3 + half_attention, measured, rel_tol=0.1)


def test_window_lowers_flops():
    assert flops_per_token(dataclasses.replace(CONFIG, window=4), 64) < flops_per_token(CONFIG, 64)
    assert flops_per_token(dataclasses.replace(CONFIG, window=64), 64) == flops_per_token(CONFIG, 64)


def test_compiled_program_does_not_grow_with_depth():
    def size(L):
        config = dataclasses.replace(CONFIG, num_layers=L)
        graphdef, _ = nnx.split(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))
        params = nnx.split(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))[1]
        return len(jax.jit(jax.grad(lambda p: nnx.merge(graphdef, p)(TOKENS)[0].sum())).lower(params).as_text().splitlines())

    assert size(12) == size(3)


def test_every_parameter_has_a_path_once():
    paths = abstract_parameters(dataclasses.replace(MOE, gates="g1+g5+g1:none", sink="learned", attention_bias=True))
    assert {"layers/attention/value/kernel", "layers/attention/value/bias", "layers/attention/gates/2/table"} <= set(paths)
    assert paths["layers/attention/value/kernel"].shape == (3, 32, 2, 8)


REGISTERS = dataclasses.replace(
    CONFIG,
    num_layers=2,
    registers=3,
    init_std=0.3,
    sink="learned",
    gates="g1:headwise",
    embedding_scale=2.0,
    kernel="reference",
)


def test_registers_are_embeddings_in_front_of_every_document():
    """The logits of a model without registers whose text begins with three tokens that embed to them; documents packed or not."""
    model = Transformer(REGISTERS, rngs=nnx.Rngs(0))
    plain = dataclasses.replace(REGISTERS, registers=0, vocab_size=53)
    graphdef, params = nnx.split(nnx.eval_shape(lambda: Transformer(plain, rngs=nnx.Rngs(0))))
    ours = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    ours["embedding", "table"] = jnp.concatenate([ours["embedding", "table"][...], ours.pop(("registers", "table"))[...]])
    peer = nnx.merge(graphdef, nnx.from_flat_state(ours.items()))
    assert {path: jnp.shape(p[...]) for path, p in ours.items()} == {path: p.shape for path, p in nnx.to_flat_state(params)}
    first, second = TOKENS[:1, :5], TOKENS[1:, :6]
    packed = np.concatenate([first, second], axis=1), np.r_[0:5, 0:6][None], np.r_[[1] * 5, [2] * 6][None]
    extended = [np.concatenate([[[50, 51, 52]], document], axis=1) for document in (first, second)]

    @nnx.jit
    def everything(model, peer):
        maps = probes.attention_maps(model, *packed), probes.attention_maps(peer, extended[0])
        return model(*packed)[0], [peer(tokens)[0] for tokens in extended], maps

    logits, expected, maps = everything(model, peer)
    np.testing.assert_allclose(logits[0], np.concatenate([z[0, 3:, :50] for z in expected]), atol=2e-5)
    np.testing.assert_allclose(maps[0][..., :5, :5], maps[1][..., 3:, 3:], atol=1e-5)  # what registers take is no token's


@pytest.mark.slow
def test_registers_learn_and_are_counted():
    params = nnx.state(Transformer(REGISTERS, rngs=nnx.Rngs(0)), nnx.Param)
    config = dataclasses.replace(REGISTERS, remat="full")
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))
    grads = jax.jit(jax.grad(lambda p: nnx.merge(graphdef, p)(TOKENS)[0][0, 0, 0]))(params)
    assert np.all(np.any(np.asarray(grads["registers"]["table"][...]) != 0, axis=1))
    plain = dataclasses.replace(REGISTERS, registers=0)
    assert count(REGISTERS)["params_total"] - count(plain)["params_total"] == 3 * 32
    assert flops_per_token(REGISTERS, 16) - flops_per_token(plain, 16) == 3 * (4 * 2 * 4 * 8 * 3)
