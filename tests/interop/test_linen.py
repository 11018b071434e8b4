"""Linen siblings hold the same parameters and compute the same as the NNX modules, wherever Linen puts them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from flax.errors import ScopeParamShapeError
from flax.traverse_util import flatten_dict
from jax.sharding import AxisType, PartitionSpec

from gatedattn import layers
from gatedattn.config import MoEConfig
from gatedattn.interop import linen

B, T, D = 8, 6, 16
ATTENTION = dict(num_heads=4, num_kv_heads=2, head_dim=8, d_model=D, gates="g1+g2:headwise+g1:query")
BLOCK = ATTENTION | dict(ffn_dim=24)
CASES = {
    "GatedAttention": ((), ATTENTION),
    "GatedAttentionBlock": ((), BLOCK),
    "MoE": ((D,), dict(num_experts=4, top_k=2, expert_dim=8, shared_dim=8)),
    "MLP": ((D, 24), {}),
    "RMSNorm": ((D,), {}),
}
X = np.random.default_rng(0).normal(size=(B, T, D)).astype(np.float32)


def random_params(module, *args):
    """Random parameters of NumPy's: compiling JAX's random number generators would take longer than the tests."""
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(module.init, jax.random.key(0), *args)
    return jax.tree.map(lambda p: jnp.asarray(rng.normal(0, 0.2, p.shape), p.dtype), shapes)


@pytest.mark.parametrize("name", CASES)
def test_same_parameters_and_results_as_nnx(name):
    args, options = CASES[name]
    module = getattr(linen, name)(*args, **options)
    params = random_params(module, X)["params"]
    twin = nnx.eval_shape(
        lambda: getattr(layers, name)(*args, **options, **({} if name == "RMSNorm" else {"rngs": nnx.Rngs(0)}))
    )
    assert jax.tree.map(jnp.shape, linen.params_of(twin)) == jax.tree.map(jnp.shape, params)
    twin = linen.with_params(twin, params)
    jax.tree.map(np.testing.assert_array_equal, linen.params_of(twin), params)
    ours, theirs = jax.jit(module.apply)({"params": params}, X), nnx.jit(lambda m, x: m(x))(twin, X)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), ours, theirs)


@pytest.mark.parametrize("experts", [0, 4])
@pytest.mark.slow
def test_meshes(experts):
    """Sequences divided over devices, Auto and Explicit: values and gradients of a single device. The block holds all the layers."""
    module = linen.GatedAttentionBlock(**BLOCK, moe=MoEConfig(num_experts=experts, top_k=2, expert_dim=8))
    params = random_params(module, X)
    step = jax.jit(jax.value_and_grad(lambda p, x: jnp.sin(module.apply(p, x)[0]).sum()))
    value, grads = step(params, X)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))
    for kind in (AxisType.Auto, AxisType.Explicit):
        with jax.set_mesh(jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(kind,) * 2)):
            divided, divided_grads = step(params, jax.device_put(X, PartitionSpec("fsdp")))
        np.testing.assert_allclose(divided, value, rtol=1e-5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), divided_grads, grads)


def test_parameters_have_plain_paths():
    params = jax.eval_shape(linen.GatedAttention(**ATTENTION).init, jax.random.key(0), X)["params"]
    assert {"/".join(path) for path in flatten_dict(params)} == {
        "query/kernel", "key/kernel", "value/kernel", "output/kernel", "query_norm/weight", "key_norm/weight",
        "gates/0/kernel", "gates/1/kernel", "gates/2/kernel",
    }  # fmt: skip


@pytest.mark.slow
def test_inside_another_module_with_scan_and_remat():
    """A Linen model that scans over rematerialised blocks equals a loop over the same layers."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x, segment_ids):
            block = nn.remat(linen.GatedAttentionBlock, prevent_cse=False)
            layers = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=nn.broadcast, length=3)
            return layers(**BLOCK, name="layers")(x, None, segment_ids)[0]

    segments = np.sort(np.random.default_rng(0).integers(1, 3, (B, T)))
    model = Model()
    variables = jax.jit(model.init)(jax.random.key(0), X, segments)
    kernels = variables["params"]["layers"]["attention"]["query"]["kernel"]
    assert kernels.shape == (3, D, 4, 8) and not np.array_equal(kernels[0], kernels[1])

    def loop(variables):
        y = X
        for i in range(3):
            layer = jax.tree.map(lambda p, i=i: p[i], variables["params"]["layers"])
            y, _ = linen.GatedAttentionBlock(**BLOCK).apply({"params": layer}, y, None, segments)
        return y

    ours = jax.jit(jax.value_and_grad(lambda v: jnp.sin(model.apply(v, X, segments)).sum()))(variables)
    looped = jax.jit(jax.value_and_grad(lambda v: jnp.sin(loop(v)).sum()))(variables)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), ours, looped)


def test_gate():
    gate = linen.Gate("g1:headwise", d_model=D, num_heads=4, head_dim=8)
    y = jnp.ones((B, T, 4, 8))
    (gated, score), variables = gate.init_with_output(jax.random.key(0), y, X)
    assert variables["params"]["kernel"].shape == (D, 4, 1) and score.shape == (B, T, 4, 1)
    np.testing.assert_allclose(
        gated, y * jax.nn.sigmoid(jnp.einsum("btd,dnc->btnc", X, variables["params"]["kernel"])), atol=1e-6
    )


def test_wrong_parameters_are_refused():
    module = linen.MLP(D, 24)
    params = random_params(module, X)["params"]
    with pytest.raises(ScopeParamShapeError, match="up"):
        module.apply({"params": params | {"up": {"kernel": jnp.zeros((D, 3))}}}, X)
    with pytest.raises(ValueError, match=r"\['down', 'gate'\] at the top do not fit"):
        linen.with_params(layers.MLP(D, 24, rngs=nnx.Rngs(0)), {k: v for k, v in params.items() if k != "up"})
    with pytest.raises(TypeError, match="ffn_dim"):
        linen.GatedAttentionBlock(**ATTENTION).init(jax.random.key(0), X)
