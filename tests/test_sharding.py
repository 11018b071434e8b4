"""Every parameter has a place, activations go where the letters say, and a divided model computes what one device computes."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, PartitionSpec

from gatedattn import RunConfig, Transformer, TransformerConfig
from gatedattn.config import MeshConfig, MoEConfig, NSAConfig, OptimizerConfig, SwitchConfig, TrainConfig
from gatedattn.gates import CHOICES, GateSpec, format
from gatedattn.sharding import AXES, constrain, map_shards, partition_spec, pin, shardings
from gatedattn.training.placement import AXES as MESH_AXES
from gatedattn.training.placement import Placement
from gatedattn.training.step import initialize, make_init, make_train_step
from gatedattn.transformer import abstract_parameters

P = PartitionSpec


# --- the table of path rules -------------------------------------------------------------------------------------------------


@st.composite
def gate_specs(draw):
    fields = {name: draw(st.sampled_from(allowed)) for name, allowed in CHOICES.items()}
    if fields["position"] == "g5":
        fields["sharing"] = "specific"
    if fields["source"] == "query" and fields["position"] not in ("g1", "g4"):
        fields["source"] = "hidden"
    if fields["source"] == "value" and fields["position"] != "g1" or (fields["source"], fields["position"]) == ("slice", "g5"):
        fields["source"] = "self"
    return GateSpec(**fields)


@st.composite
def models(draw):
    boolean, experts = st.booleans(), draw(st.sampled_from([0, 4]))
    gates = draw(st.lists(gate_specs(), max_size=3, unique=True))
    return TransformerConfig(
        vocab_size=48, d_model=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, ffn_dim=24, gates=format(gates),
        qk_norm=draw(boolean), output_bias=draw(boolean), sdpa_norm=draw(boolean),
        sink=draw(st.sampled_from(["none", "learned", "off_by_one"])), position=draw(st.sampled_from(["rope", "learned", "none"])),
        moe=MoEConfig(num_experts=experts, top_k=2, expert_dim=8, shared_dim=draw(st.sampled_from([0, 8])), shared_gate=draw(boolean)),
        sandwich_norm=draw(boolean), norm_gate=draw(st.sampled_from([0, 4])), tie_embeddings=draw(boolean),
        registers=draw(st.sampled_from([0, 2])),
        switch=draw(st.sampled_from([SwitchConfig(), SwitchConfig("kvo", num_experts=2), SwitchConfig("v", query_routers=True)])),
    )  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(models())
def test_every_parameter_of_every_model_has_a_place(config):
    mesh = jax.make_mesh((1, 2, 2, 2, 1), ("data", "fsdp", "tensor", "expert", "context"), axis_types=(AxisType.Auto,) * 5)
    for path, leaf in abstract_parameters(config).items():
        spec = partition_spec(path, leaf.ndim)
        assert len(spec) == leaf.ndim
        if path.endswith("kernel") and "score" not in path or path.endswith("embedding/table"):
            assert "fsdp" in spec, f"{path} is not divided by fsdp"
        shardings({path: leaf}, mesh)[path].shard_shape(leaf.shape)  # raises if a size does not divide


def test_known_places():
    assert partition_spec("layers/attention/key/kernel", 4) == P(None, "fsdp", "tensor", None)
    assert partition_spec("layers/attention/gates/0/kernel", 4) == P(None, "fsdp", "tensor", None)
    assert partition_spec("layers/attention/value_router/kernel", 4) == P(None, "fsdp", "tensor", None)
    assert partition_spec("layers/attention/sparse/gate/kernel", 4) == P(None, "fsdp", "tensor", None)
    assert partition_spec("layers/attention/sparse/compress_key/inner/kernel", 3) == P(None, "fsdp", None)
    assert partition_spec("layers/moe/down/kernel", 4) == P(None, "expert", "tensor", "fsdp")
    assert partition_spec("layers/attention/query_norm/weight", 2) == P(None, None)
    assert partition_spec("attention/output/kernel", 3) == P("tensor", None, "fsdp")  # a layer by itself
    with pytest.raises(KeyError, match="no sharding rule for parameter 'layers/new/thing'"):
        partition_spec("layers/new/thing", 2)


def test_a_whole_train_state_has_a_place():
    run = RunConfig(
        model=TransformerConfig(vocab_size=48, d_model=16, num_layers=2, moe=MoEConfig(num_experts=4, top_k=2, expert_dim=8))
    )
    abstract = jax.eval_shape(make_init(run))
    placed = Placement(MeshConfig(fsdp=4, tensor=2), 8, jax.devices()).shardings(abstract)
    assert jax.tree.structure(placed) == jax.tree.structure(abstract)
    specs = [str(s.spec) for s in jax.tree.leaves(placed)]
    assert specs.count(str(P(None, "expert", "fsdp", "tensor"))) == 6  # gate and up, each with its two moments


def test_axes_that_are_missing_or_do_not_divide_are_left_out():
    mesh = jax.make_mesh((2, 4), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    tree = {
        "attention/key/kernel": jax.ShapeDtypeStruct((16, 2, 8), "float32"),
        "moe/up/kernel": jax.ShapeDtypeStruct((4, 7, 8), "float32"),
    }
    placed = shardings(tree, mesh)
    assert placed["attention/key/kernel"].spec == P("fsdp", None, None)
    assert placed["moe/up/kernel"].spec == P(None, None, "tensor")


# --- constrain ---------------------------------------------------------------------------------------------------------------


def spec_of(x):
    return x.sharding.spec


def mesh_of(kind, **axes):
    kinds = (kind,) * len(axes) if isinstance(kind, AxisType) else kind
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=kinds)


@pytest.mark.parametrize(
    "kind", [AxisType.Auto, AxisType.Explicit, (AxisType.Explicit, AxisType.Auto)], ids=["auto", "explicit", "mixed"]
)
def test_constrain_divides(kind):
    x = np.arange(8 * 2 * 4 * 2, dtype=np.float32).reshape(8, 2, 4, 2)
    with jax.set_mesh(mesh_of(kind, fsdp=4, tensor=2)):
        y = jax.jit(lambda x: constrain(2 * x, "BTNH"))(jnp.asarray(x))
    np.testing.assert_array_equal(y, 2 * x)
    assert y.addressable_shards[0].data.shape == (2, 2, 2, 2)


def test_constrain_without_a_mesh_does_nothing():
    x = jnp.ones((2, 3))
    assert constrain(x, "BT") is x


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    "axes,shape,letters,shard",
    [
        (dict(data=2, fsdp=4), (8, 3), "BT", (1, 3)),
        (dict(data=2, fsdp=4), (6, 3), "BT", (3, 3)),  # 6 is divided by data, not by fsdp
        (dict(context=2, tensor=4), (1, 4, 3), "BTK", (1, 2, 3)),  # 3 heads over 4 devices
        (dict(context=8), (4, 8), "BT", (4, 1)),
    ],
)
def test_constrain_leaves_out_what_does_not_fit(kind, axes, shape, letters, shard):
    with jax.set_mesh(mesh_of(kind, **axes)):
        y = jax.jit(lambda x: constrain(2 * x, letters))(jnp.ones(shape))
    assert y.addressable_shards[0].data.shape == shard


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_constrain_leaves_a_strangers_axes_alone(kind):
    with jax.set_mesh(mesh_of(kind, dp=4, model=2)):
        x = jax.device_put(jnp.ones((8, 2, 6)), P("dp", None, "model"))
        y = jax.jit(lambda x: constrain(2 * x, "BTD"))(x)
    assert y.sharding.spec == P("dp", None, "model")


def test_map_shards_cuts_kv_heads_and_their_queries_alike():
    q, k = jnp.arange(8.0 * 4 * 1).reshape(2, 4, 4, 1), jnp.ones((2, 4, 2, 1))
    seen = []

    def f(q, k, nothing):
        seen.append((q.shape, k.shape))
        assert nothing is None
        return (q * jnp.repeat(k, q.shape[2] // k.shape[2], 2),)

    for kind in (AxisType.Auto, AxisType.Explicit):
        with jax.set_mesh(mesh_of(kind, fsdp=2, tensor=4)):  # four devices, two KV heads: heads stay whole
            (y,) = jax.jit(lambda q, k: map_shards(f, (q, k, None), ("B.K.", "B.K.", "B."), ("B.K.",)))(q, k)
        with jax.set_mesh(mesh_of(kind, fsdp=2, tensor=2, data=2)):
            (z,) = jax.jit(lambda q, k: map_shards(f, (q, k, None), ("B.K.", "B.K.", "B."), ("B.K.",)))(q, k)
        np.testing.assert_array_equal(y, q)
        np.testing.assert_array_equal(z, q)
    assert seen == [((1, 4, 4, 1), (1, 4, 2, 1)), ((1, 4, 2, 1), (1, 4, 1, 1))] * 2


# --- a divided model ---------------------------------------------------------------------------------------------------------

CONFIG = TransformerConfig(
    vocab_size=64, d_model=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, ffn_dim=24, gates="g1+g2:headwise+g5"
)  # fmt: skip
MOE = dataclasses.replace(CONFIG, moe=MoEConfig(num_experts=4, top_k=2, expert_dim=8))
MIXED = dataclasses.replace(
    CONFIG, num_layers=4, gates="g1", kernel="reference", pattern="window=5,gates=none|position=none,sink=learned"
)
RIVALS = {
    "registers": dataclasses.replace(CONFIG, gates="g1:headwise:value+g2:slice", registers=3, sink="learned"),
    "switch": dataclasses.replace(CONFIG, gates="none", switch=SwitchConfig("kvo", num_experts=4, top_k=2)),
    "switch, split": dataclasses.replace(CONFIG, switch=SwitchConfig("vo", num_experts=2, split=True, query_routers=True)),
    "nsa": dataclasses.replace(
        CONFIG, nsa=NSAConfig(True, compress_block=4, compress_stride=2, select_block=4, select_count=3, window=3)
    ),
    "nsa, dense": dataclasses.replace(CONFIG, nsa=NSAConfig(True, sparse=False)),
    "sigmoid": dataclasses.replace(CONFIG, gates="none", attention="sigmoid", sigmoid_length=16),
}
B, T = 8, 16  # context=8 divides it, too
_rng = np.random.default_rng(0)
BATCH = {
    "tokens": _rng.integers(0, 64, (B, T)),
    "targets": _rng.integers(0, 64, (B, T)),
    "positions": np.tile(np.where(np.arange(T) < 7, np.arange(T), np.arange(T) - 7), (B, 1)),
    "segment_ids": np.tile(np.where(np.arange(T) < 7, 1, 2), (B, 1)),
}
RUN = RunConfig(train=TrainConfig(batch_size=B, seq_len=T))


def loss_and_grads(config, mesh, devices, kind=AxisType.Auto):
    """Loss and gradients of a model placed as the trainer places it; and the gradients' shardings."""
    rng = np.random.default_rng(0)
    graphdef, params = nnx.split(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))
    params = nnx.as_pure(jax.tree.map(lambda p: jnp.asarray(rng.normal(0, 0.1, p.shape), p.dtype), params))
    place = Placement(mesh, B, jax.devices()[:devices])
    if place.mesh is not None and kind == AxisType.Explicit:
        place.mesh = jax.make_mesh(place.mesh.axis_sizes, place.mesh.axis_names, axis_types=(kind,) * 5)

    def loss(params, batch):
        logits, aux = nnx.merge(graphdef, params)(batch["tokens"], batch["positions"], batch["segment_ids"])
        hit = jax.nn.one_hot(batch["targets"], 64)
        extra = aux["load_balance"] + aux["router_z"] if config.is_moe else 0
        return -(hit * jax.nn.log_softmax(logits)).sum(-1).mean() + 0.1 * extra

    def value_and_grad(params, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        return value, pin(grads)

    with place.scope():
        if place.mesh is not None:
            params = jax.device_put(params, place.shardings(params))
        batch = place.put(lambda rows: jax.tree.map(lambda x: x[rows], BATCH), len(BATCH["tokens"]))
        value, grads = jax.jit(value_and_grad)(params, batch)
    return jax.tree.map(np.asarray, (value, grads)), params, grads


def compare(divided, alone):
    values, params, grads = divided
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), values, alone)
    for p, g in zip(jax.tree.leaves(params), jax.tree.leaves(grads), strict=True):
        assert g.sharding.is_equivalent_to(p.sharding, p.ndim)


SIZES = (1, 2, 4, 8)
EVERY_MESH = [dict(zip(MESH_AXES, s)) for s in itertools.product(SIZES, repeat=5) if math.prod(s) == 8]


@pytest.fixture(scope="module")
def alone():
    """What one device computes, once per model."""
    return {config: loss_and_grads(config, MeshConfig(fsdp=1), 1)[0] for config in (CONFIG, MOE)}


@pytest.mark.parametrize(
    "config,mesh", [(CONFIG, dict(fsdp=4, tensor=2)), (MOE, dict(fsdp=2, context=2, expert=2))], ids=["dense", "moe"]
)
def test_divided_model_has_the_loss_and_gradients_of_one_device(alone, config, mesh):
    compare(loss_and_grads(config, MeshConfig(**mesh), 8), alone[config])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("config", [MIXED, dataclasses.replace(MIXED, moe=MOE.moe)], ids=["dense", "moe"])
def test_divided_layers_of_a_pattern(config, kind):
    alone = loss_and_grads(config, MeshConfig(fsdp=1), 1)[0]
    compare(loss_and_grads(config, MeshConfig(fsdp=2, tensor=2), 4, kind), alone)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", EVERY_MESH, ids=["-".join(f"{k}{v}" for k, v in m.items() if v > 1) for m in EVERY_MESH])
@pytest.mark.parametrize("config", [CONFIG, MOE], ids=["dense", "moe"])
def test_every_mesh_of_eight_devices(alone, config, mesh):
    """Also where an axis does not divide what it should (the trainer refuses that): then it is left out."""
    compare(loss_and_grads(config, MeshConfig(**mesh), 8), alone[config])


@pytest.mark.parametrize("config", [CONFIG, MOE], ids=["dense", "moe"])
@pytest.mark.slow
def test_explicit_mesh(alone, config):
    """The same where shardings are part of the types; gradients then have the shardings of their parameters."""
    compare(loss_and_grads(config, MeshConfig(fsdp=2, tensor=2, context=2), 8, AxisType.Explicit), alone[config])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("config", RIVALS.values(), ids=RIVALS)
def test_other_systems_divided(config, kind):
    alone = loss_and_grads(config, MeshConfig(fsdp=1), 1)[0]
    other = {"expert": 2} if config.nsa.enabled and config.nsa.sparse else {"context": 2}
    compare(loss_and_grads(config, MeshConfig(fsdp=2, tensor=2, **other), 8, kind), alone)


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.slow
def test_a_divided_training_step(name):
    """Parameters and optimiser state after a step are those of one device, and lie where the rules say."""
    train = TrainConfig(batch_size=B, seq_len=T, microbatches=2)
    run = dataclasses.replace(RUN, model=MOE, optimizer=OptimizerConfig(name=name, warmup_steps=0), train=train)
    batch = BATCH | {"loss_mask": np.ones((B, T), bool)}

    def step(mesh, devices):
        place = Placement(mesh, B // 2, jax.devices()[:devices])
        with place.scope():
            state = initialize(run, place.shardings(jax.eval_shape(make_init(run))))
            return place, jax.jit(make_train_step(run))(
                state, place.put(lambda rows: jax.tree.map(lambda x: x[rows], batch), len(batch["tokens"]))
            )[0]

    _, alone = step(MeshConfig(fsdp=1), 1)
    place, divided = step(MeshConfig(fsdp=2, expert=2, tensor=2), 8)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), divided, alone)
    jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim) or pytest.fail(str(s)), divided, place.shardings(divided))


def test_attention_gathers_nothing():
    """Each device attends within its own sequences and heads: no communication, in either direction."""
    from gatedattn import kernels

    mesh = mesh_of(AxisType.Auto, fsdp=4, tensor=2)
    with jax.set_mesh(mesh):
        q = jax.device_put(jnp.ones((8, 6, 4, 8)), P("fsdp", None, "tensor"))
        k = jax.device_put(jnp.ones((8, 6, 2, 8)), P("fsdp", None, "tensor"))
        text = (
            jax.jit(jax.grad(lambda q, k, v: kernels.attention(q, k, v)[0].sum(), (0, 1, 2))).lower(q, k, k).compile().as_text()
        )
    assert not any(word in text for word in ("all-gather", "all-reduce", "all-to-all", "collective-permute"))
    assert set(mesh.axis_names) <= AXES
