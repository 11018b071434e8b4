"""The mixture of experts against a plain loop over experts, alone and divided over devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from gatedattn.config import MoEConfig
from gatedattn.layers import MoE
from gatedattn.sharding import shardings

B, T, D = 2, 9, 12
F64 = dict(dtype=jnp.float64, param_dtype=jnp.float64)
P = PartitionSpec


def randomize(module, seed=0, std=0.5):
    """Every parameter random, so that no term hides behind a zero or a one."""
    rng = np.random.default_rng(seed)
    state = jax.tree.map(lambda p: jnp.asarray(rng.normal(0, std, p.shape), p.dtype), nnx.state(module, nnx.Param))
    nnx.update(module, state)
    return module


def run(module, *args):
    """The module's result, compiled as one program (op by op would compile each)."""
    return nnx.jit(lambda m, *a: m(*a))(module, *args)


def data(seed=1, B=B, T=T):
    rng = np.random.default_rng(seed)
    segments = np.sort(rng.integers(1, 4, (B, T)), axis=1).astype(np.int32)
    return jnp.asarray(rng.normal(size=(B, T, D))), segments


@pytest.mark.parametrize(
    "renormalize,shared,capacity",
    [
        (True, {}, 0.0),
        pytest.param(False, dict(shared_dim=8), 0.0, marks=pytest.mark.slow),
        pytest.param(True, dict(shared_dim=8, shared_gate=True), 2.5, marks=pytest.mark.slow),  # E / k: room for every token
    ],
)
def test_equals_a_loop_over_experts(x64, renormalize, shared, capacity):
    x, segments = data()
    segments[0, -2:] = 0  # padding
    config = MoEConfig(num_experts=5, top_k=2, expert_dim=7, renormalize=renormalize, capacity=capacity, **shared)
    moe = randomize(MoE(D, config, **F64, rngs=nnx.Rngs(0)))

    def loop(params, x):
        silu = jax.nn.silu
        probs = jax.nn.softmax((x @ params["router"]["kernel"]).astype(jnp.float32).astype(jnp.float64))
        kept = probs >= jnp.sort(probs, axis=-1)[..., -2:-1]
        weights = jnp.where(kept, probs, 0)
        if renormalize:
            weights = weights / weights.sum(-1, keepdims=True)
        y = 0
        for e in range(5):
            gate, up, down = (params[name]["kernel"][e] for name in ("gate", "up", "down"))
            y += weights[..., e, None] * ((silu(x @ gate) * (x @ up)) @ down)
        if shared:
            s = params["shared"]
            extra = (silu(x @ s["gate"]["kernel"]) * (x @ s["up"]["kernel"])) @ s["down"]["kernel"]
            y += extra * (jax.nn.sigmoid(x @ params["score"]["kernel"]) if "shared_gate" in shared else 1)
        return y, probs, kept

    graphdef, state = nnx.split(moe)
    params = nnx.to_pure_dict(state)
    y, aux = run(moe, x, segments != 0)
    expected, probs, kept = jax.jit(loop)(params, x)
    np.testing.assert_allclose(y, expected, atol=1e-6)  # the router's softmax is float32

    real = np.asarray(segments != 0)
    load, mean = np.asarray(kept)[real].mean(0) / 2, np.asarray(probs)[real].mean(0)
    np.testing.assert_allclose(aux["router_load"], load, atol=1e-6)
    np.testing.assert_allclose(aux["router_dropped"], 0, atol=1e-6)
    np.testing.assert_allclose(aux["load_balance"], 5 * (load * mean).sum(), atol=1e-5)
    np.testing.assert_allclose(
        aux["router_entropy"], -(np.asarray(probs)[real] * np.log(np.asarray(probs)[real])).sum(-1).mean(), atol=1e-5
    )

    def ours(params, x):
        nnx.replace_by_pure_dict(state, params)
        return jnp.sin(nnx.merge(graphdef, state)(x)[0]).sum()

    ours_grads = jax.jit(jax.grad(ours, (0, 1)))(params, x)
    loop_grads = jax.jit(jax.grad(lambda p, x: jnp.sin(loop(p, x)[0]).sum(), (0, 1)))(params, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), ours_grads, loop_grads)


def test_uniform_router_balances_to_one():
    moe = MoE(D, MoEConfig(num_experts=8, top_k=8, expert_dim=4), rngs=nnx.Rngs(0))
    moe.router.kernel[...] = jnp.zeros_like(moe.router.kernel[...])
    _, aux = run(moe, data()[0].astype(jnp.float32))
    np.testing.assert_allclose([aux["load_balance"], aux["router_entropy"]], [1, np.log(8)], rtol=1e-6)


def test_a_full_expert_drops_the_last_to_come():
    """Capacity 1 with 18 tokens, 4 experts and top-2: 9 places each. Tokens beyond lose that expert's share and nothing else."""
    x = data()[0].astype(jnp.float32)
    config = MoEConfig(num_experts=4, top_k=2, expert_dim=5, capacity=1.0, renormalize=False)
    moe = randomize(MoE(D, config, rngs=nnx.Rngs(0)))
    y, aux = run(moe, x)

    rows = np.asarray(x).reshape(-1, D)
    router, gate, up, down = (np.asarray(m.kernel[...]) for m in (moe.router, moe.gate, moe.up, moe.down))
    probs = np.asarray(jax.nn.softmax(rows @ router))
    expected, room, dropped = np.zeros_like(rows), [9] * 4, 0
    for r, row in enumerate(rows):
        for e in np.argsort(-probs[r])[:2]:
            if not room[e]:
                dropped += 1
                continue
            room[e] -= 1
            a = row @ gate[e]
            expected[r] += probs[r, e] * ((a / (1 + np.exp(-a)) * (row @ up[e])) @ down[e])
    assert dropped
    np.testing.assert_allclose(y.reshape(-1, D), expected, atol=1e-5)
    np.testing.assert_allclose(aux["router_dropped"], dropped / 36, atol=1e-6)


# --- over devices ------------------------------------------------------------------------------------------------------------

MESHES = [
    dict(expert=8),
    dict(expert=4, tensor=2),
    dict(data=2, fsdp=2, expert=2),
    dict(fsdp=2, context=2, expert=2),
    dict(fsdp=4, tensor=2),
]
SMALL = dict(B=1, T=16)  # a batch that no axis divides: every device has the same tokens


def value_and_gradients(config, batch, mesh=None, kind=AxisType.Auto):
    x, segments = data(**batch)
    x = x.astype(jnp.float32)
    graphdef, state = nnx.split(randomize(MoE(D, config, rngs=nnx.Rngs(0))))
    params = nnx.as_pure(state)

    def scalar(params, x):
        y, aux = nnx.merge(graphdef, params)(x, jnp.asarray(segments != 3))
        return jnp.sin(y).sum() + aux["load_balance"] + aux["router_z"], (y, aux)

    f = jax.jit(jax.value_and_grad(scalar, (0, 1), has_aux=True))
    if mesh is None:
        return f(params, x)
    mesh = jax.make_mesh(tuple(mesh.values()), tuple(mesh), axis_types=(kind,) * len(mesh))
    with jax.set_mesh(mesh):
        places = shardings({"moe": params}, mesh)["moe"]
        axes = tuple(a for a in ("data", "fsdp", "expert") if a in mesh.shape) if batch["B"] > 1 else None
        x = jax.device_put(x, NamedSharding(mesh, P(axes, "context" if "context" in mesh.shape else None)))
        return f(jax.tree.map(jax.device_put, params, places), x)


@pytest.fixture(scope="module")
def alone():
    return {}


@pytest.mark.parametrize(
    "mesh,capacity",
    [(MESHES[3], 4.0), *((m, 0.0) for m in MESHES)],
    ids=str,
)
@pytest.mark.slow
def test_divided_experts_equal_one_device(alone, mesh, capacity):
    batch = dict(B=8, T=4)
    config = MoEConfig(num_experts=8, top_k=2, expert_dim=6, capacity=capacity)
    if capacity not in alone:
        alone[capacity] = value_and_gradients(config, batch)
    divided = value_and_gradients(config, batch, mesh)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), divided, alone[capacity])


@pytest.mark.parametrize("capacity", [0.0, pytest.param(4.0, marks=pytest.mark.slow)], ids=["dropless", "capacity"])
def test_experts_are_divided_where_tokens_are_not(capacity):
    config = MoEConfig(num_experts=8, top_k=2, expert_dim=6, capacity=capacity)
    divided = value_and_gradients(config, SMALL, dict(expert=4, tensor=2))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), divided, value_and_gradients(config, SMALL)
    )


@pytest.mark.slow
def test_explicit_mesh():
    batch, config = dict(B=8, T=4), MoEConfig(num_experts=8, top_k=2, expert_dim=6, shared_dim=4, shared_gate=True)
    divided = value_and_gradients(config, batch, dict(fsdp=2, expert=2, tensor=2), AxisType.Explicit)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), divided, value_and_gradients(config, batch)
    )


def test_a_small_buffer_drops_and_says_so():
    """Half of what the devices need on average: half of the assignments find no room, and the rest is computed as ever."""
    batch = dict(B=8, T=4)
    config = MoEConfig(num_experts=8, top_k=2, expert_dim=6, expert_buffer=0.5)
    (_, (y, aux)), _ = value_and_gradients(config, batch, dict(expert=8))
    assert 0.4 < aux["router_dropped"] < 0.7 and np.isfinite(y).all()


def test_no_device_gathers_all_experts():
    config = MoEConfig(num_experts=8, top_k=2, expert_dim=6)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: MoE(D, config, rngs=nnx.Rngs(0))))
    mesh = jax.make_mesh((8,), ("expert",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        params = nnx.as_pure(state)
        params = jax.tree.map(
            lambda p, s: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=s), params, shardings({"moe": params}, mesh)["moe"]
        )
        x = jax.ShapeDtypeStruct((8, 4, D), jnp.float32, sharding=NamedSharding(mesh, P("expert")))

        def scalar(params, x):
            return nnx.merge(graphdef, params)(x)[0].sum()

        text = jax.jit(jax.grad(scalar)).lower(params, x).compile().as_text()
    assert "reduce-scatter" in text or "all-reduce" in text
    assert f"f32[8,{D},6]" not in text and f"f32[8,6,{D}]" not in text  # each device has one of the eight
