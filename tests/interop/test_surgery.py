import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from gatedattn import GateSpec, Transformer, TransformerConfig
from gatedattn.gates import parse
from gatedattn.interop.surgery import add_gates, identity_start, is_identity, train_only, trainable_mask
from gatedattn.sharding import path_string

CONFIG = TransformerConfig(
    vocab_size=40, d_model=16, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, ffn_dim=24, gates="none"
)  # fmt: skip
TOKENS = np.random.default_rng(0).integers(0, 40, (2, 8))
IDENTITIES = [
    "g1:scale=2:zeros",
    "g2:headwise:scale=2:zeros+g5:scale=2:zeros",
    "g1:add:silu:zeros+g4:none:scale=2",
    "g3:add:tanh:zeros",
]


def model_of(config):
    """A model with random weights of NumPy's: compiling JAX's random number generators would take longer than the tests."""
    rng = np.random.default_rng(0)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))
    return nnx.merge(graphdef, jax.tree.map(lambda p: jnp.asarray(rng.normal(0, 0.1, p.shape), p.dtype), state))


@pytest.fixture(scope="module")
def pretrained():
    return model_of(CONFIG)


@pytest.fixture(scope="module")
def plain_logits(pretrained):
    return logits(pretrained)


def params_of(model):
    return nnx.as_pure(nnx.state(model, nnx.Param))


def logits(model):
    return nnx.jit(lambda m: m(TOKENS)[0])(model)


def changed(before, after):
    """Paths whose arrays differ."""
    pairs = zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True)
    return {path_string(path) for (path, a), b in pairs if not np.array_equal(a, b)}


@pytest.mark.parametrize("gates", IDENTITIES)
def test_new_gates_change_no_logit(pretrained, plain_logits, gates):
    gated = add_gates(pretrained, gates)
    assert gated.config.gate_specs == parse(gates) and pretrained.config.gates == "none"
    assert len(gated.layers.attention.gates) == gates.count("+") + 1
    np.testing.assert_allclose(logits(gated), plain_logits, atol=1e-6, rtol=0)


def test_gates_join_those_that_are_there():
    model = model_of(dataclasses.replace(CONFIG, gates="g1:headwise"))
    both = add_gates(model, GateSpec("g2", scale=2.0, init="zeros"))
    assert both.config.gates == "g1:headwise+g2:scale=2.0:zeros"
    np.testing.assert_array_equal(both.layers.attention.gates[0].kernel[...], model.layers.attention.gates[0].kernel[...])
    np.testing.assert_allclose(logits(both), logits(model), atol=1e-6, rtol=0)
    with pytest.raises(ValueError, match="given twice"):
        add_gates(both, "g2:scale=2:zeros")


@pytest.mark.parametrize(
    "gates,instead",
    [
        ("g1", "g1:scale=2.0:zeros"),
        ("g1:scale=2", "g1:scale=2.0:zeros"),
        ("g1:zeros", "g1:scale=2.0:zeros"),
        ("g2:headwise:bias=1", "g2:headwise:scale=2.0:zeros"),
        ("g1:ns_sigmoid:zeros", "g1:scale=2.0:zeros"),
        ("g1:add:silu", "g1:add:silu:zeros"),
        ("g1:add:zeros", "g1:add:silu:zeros"),
    ],
)
def test_gates_that_would_change_the_model_are_refused(pretrained, gates, instead):
    with pytest.raises(ValueError, match=f"not the identity at the start; '{instead}' is"):
        add_gates(pretrained, gates)
    assert is_identity(identity_start(GateSpec.parse(gates)))


def test_a_change_can_be_allowed(pretrained, plain_logits):
    gated = add_gates(pretrained, "g1", allow_change=True, rngs=nnx.Rngs(1))
    assert np.std(gated.layers.attention.gates[0].kernel[...]) == pytest.approx(0.02, rel=0.1)
    assert np.abs(logits(gated) - plain_logits).max() > 1e-3
    with pytest.raises(ValueError, match="layers outside"):
        add_gates(pretrained, "g1", layers=[0], allow_change=True)


def step(model, tx, params, state):
    graphdef, _ = nnx.split(model)

    def loss(params):
        out = nnx.merge(graphdef, params)(TOKENS)[0]
        return optax.softmax_cross_entropy_with_integer_labels(out[:, :-1], TOKENS[:, 1:]).mean()

    value, grads = jax.value_and_grad(loss)(params)
    updates, state = tx.update(grads, state, params)
    return value, optax.apply_updates(params, updates), state


@pytest.mark.parametrize("how", ["train_only", pytest.param("multi_transform", marks=pytest.mark.slow)])
def test_gate_only_training_changes_only_gates_and_lowers_the_loss(pretrained, how):
    model = add_gates(pretrained)
    params = params_of(model)
    mask = trainable_mask(params, "gates/")
    inner = optax.adamw(1e-1, weight_decay=0.1)
    if how == "train_only":
        tx = train_only(inner, mask)
    else:
        tx = optax.multi_transform({True: inner, False: optax.set_to_zero()}, mask)
    update = jax.jit(lambda params, state: step(model, tx, params, state))
    now, state, losses = params, tx.init(params), []
    for _ in range(4):
        loss, now, state = update(now, state)
        losses.append(loss)
    assert changed(params, now) == {"layers/attention/gates/0/kernel"}
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_gates_in_some_layers(pretrained):
    """Training leaves the gates of the other layers exactly where they were, at the identity."""
    model = add_gates(pretrained, layers=[0, -1])
    params = params_of(model)
    tx = train_only(optax.adamw(1e-1, weight_decay=0.1), trainable_mask(params, "gates/", layers=[0, -1]))
    _, after, _ = jax.jit(lambda params, state: step(model, tx, params, state))(params, tx.init(params))
    kernel = after["layers"]["attention"]["gates"][0]["kernel"]
    assert [bool(jnp.any(kernel[i] != 0)) for i in range(3)] == [True, False, True]
    assert changed(params, after) == {"layers/attention/gates/0/kernel"}
    for broken in (lambda: add_gates(pretrained, layers=[3]), lambda: trainable_mask(params, "gates/", layers=[3])):
        with pytest.raises(ValueError, match="layer 3 does not exist: the model has 3"):
            broken()


def test_a_mask_that_matches_nothing_is_refused(pretrained):
    with pytest.raises(ValueError, match="no parameter matches 'gates/'; there are embedding/table"):
        trainable_mask(params_of(pretrained), "gates/")


def test_a_sharded_model_stays_sharded(pretrained):
    from jax.sharding import AxisType, PartitionSpec

    from gatedattn.sharding import shardings

    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    graphdef, state = nnx.split(pretrained)
    with jax.set_mesh(mesh):
        gated = add_gates(nnx.merge(graphdef, jax.device_put(state, shardings(state, mesh))))
    kernel = gated.layers.attention.gates[0].kernel[...]
    assert kernel.sharding.spec == PartitionSpec(None, "fsdp", "tensor", None)
