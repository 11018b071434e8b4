"""The layers in other people's hands: alone, in any type, under any transformation; and the examples of docs/reuse.md."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

from gatedattn import GatedAttention, GatedAttentionBlock, GateSpec, MoE, TransformerConfig
from gatedattn.config import MoEConfig

B, T, D = 8, 6, 16
SIZES = dict(d_model=D, num_heads=4, num_kv_heads=2, head_dim=8, ffn_dim=24)
GATES = "g1+g2:headwise+g4:query+g5"


def random(build, seed=0):
    """The module that `build` makes, abstractly, with random parameters of NumPy's (JAX's would have to be compiled)."""
    rng = np.random.default_rng(seed)
    graphdef, state = nnx.split(nnx.eval_shape(build))
    return nnx.merge(graphdef, jax.tree.map(lambda p: jnp.asarray(rng.normal(0, 0.2, p.shape), p.dtype), state))


def data(dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(1).normal(size=(B, T, D)), dtype)


@pytest.mark.parametrize(
    "dtype",
    ["float64", "bfloat16", "float32", "float16"],
)
@pytest.mark.slow
def test_any_type(dtype):
    with jax.enable_x64(dtype == "float64"):
        # XLA's CPU back end has no product of bfloat16 matrices with a float32 result, which it makes of a float32 router's: on CPU,
        # bfloat16 goes with float32 parameters.
        param_dtype = "float32" if dtype == "bfloat16" else dtype
        types = dict(dtype=jnp.dtype(dtype), param_dtype=jnp.dtype(param_dtype))
        moe = MoEConfig(num_experts=4, top_k=2, expert_dim=8, shared_dim=8)
        block = random(lambda: GatedAttentionBlock(**SIZES, gates=GATES, sink="learned", moe=moe, **types, rngs=nnx.Rngs(0)))
        graphdef, params = nnx.split(block)

        def loss(params, x):
            y, aux = nnx.merge(graphdef, params)(x)
            return y.astype(jnp.promote_types(dtype, jnp.float32)).sum(), y

        grads, y = jax.jit(jax.grad(loss, has_aux=True))(params, data(dtype))
    assert y.dtype == dtype and np.isfinite(np.asarray(y, np.float64)).all()
    for p, g in zip(jax.tree.leaves(params), jax.tree.leaves(grads), strict=True):
        assert p.dtype == g.dtype == param_dtype and np.isfinite(np.asarray(g, np.float64)).all()


@pytest.mark.parametrize("experts", [0, 4])
@pytest.mark.parametrize("axes", [("data", "tensor"), ("dp", "model")])
@pytest.mark.slow
def test_meshes(axes, experts):
    """Auto and Explicit, with our axes and with a stranger's; sequences and weights divided; as without a mesh."""
    moe = MoEConfig(num_experts=experts, top_k=2, expert_dim=8)
    block = random(lambda: GatedAttentionBlock(**SIZES, gates=GATES, moe=moe, rngs=nnx.Rngs(0)))
    graphdef, params = nnx.split(block)

    def loss(params, x):  # three times the same layer, in a scan
        def layer(x, _):
            y, _ = nnx.merge(graphdef, params)(x)
            return y, None

        return jnp.sin(jax.lax.scan(layer, x, length=2)[0]).sum()

    step = jax.jit(jax.value_and_grad(loss))
    value, grads = step(params, data())
    for kind in (AxisType.Auto, AxisType.Explicit):
        with jax.set_mesh(jax.make_mesh((4, 2), axes, axis_types=(kind,) * 2)):
            inputs = jax.device_put(data(), PartitionSpec(axes[0]))
            divided, divided_grads = step(jax.device_put(params, PartitionSpec()), inputs)
        np.testing.assert_allclose(divided, value, rtol=1e-5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4, rtol=1e-4), divided_grads, grads)


def test_inside_a_strangers_shard_map():
    """Axes that are already in someone's hands are not touched."""
    layer = random(lambda: GatedAttention(num_heads=4, num_kv_heads=2, head_dim=8, d_model=D, rngs=nnx.Rngs(0)))
    graphdef, params = nnx.split(layer)
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)

    def apply(params, x):
        return nnx.merge(graphdef, params)(x)[0]

    expected = jax.jit(apply)(params, data())
    for manual in ({"data", "tensor"}, {"data"}):
        specs = dict(in_specs=(PartitionSpec(), PartitionSpec("data")), out_specs=PartitionSpec("data"))
        mapped = jax.shard_map(apply, mesh=mesh, **specs, axis_names=manual, check_vma=False)
        with jax.set_mesh(mesh):
            np.testing.assert_allclose(jax.jit(mapped)(params, data()), expected, atol=1e-5)


def test_without_a_config():
    gates = GateSpec("g1", granularity="headwise")
    with_config = nnx.eval_shape(lambda: GatedAttentionBlock(TransformerConfig(**SIZES, gates="g1:headwise"), rngs=nnx.Rngs(0)))
    without = nnx.eval_shape(lambda: GatedAttentionBlock(**SIZES, gates=gates, rngs=nnx.Rngs(0)))
    assert nnx.split(with_config)[1] == nnx.split(without)[1]
    moe = nnx.eval_shape(lambda: MoE(D, num_experts=4, top_k=2, expert_dim=8, rngs=nnx.Rngs(0)))
    assert moe.config == MoEConfig(num_experts=4, top_k=2, expert_dim=8)
    with pytest.raises(TypeError, match="needs a config, or num_kv_heads, head_dim, ffn_dim"):
        GatedAttentionBlock(d_model=D, num_heads=4, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="num_experts must be given"):
        MoE(D, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="num_head"):
        MoE(D, num_heads=4, rngs=nnx.Rngs(0))


def examples():
    page = (Path(__file__).parents[1] / "docs" / "reuse.md").read_text()
    parts = re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE)
    return {title: code for title, text in parts for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL)}


def test_there_are_three_examples():
    assert list(examples()) == ["In an NNX model", "In a Linen model", "In a pretrained model"]


@pytest.mark.parametrize("title", [t if "NNX" in t else pytest.param(t, marks=pytest.mark.slow) for t in examples()])
def test_examples_of_the_documentation(title, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(examples()[title], f"docs/reuse.md: {title}", "exec"), {"__name__": "example"})
