"""A sequence spread over devices: the same attention and gradients as on one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from gatedattn import kernels
from gatedattn.kernels import context
from gatedattn.kernels.context import Shard

P = PartitionSpec


def mesh_of(kind=AxisType.Auto, **axes):
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8])
def test_balanced_shards_have_equal_causal_work(count):
    positions = [np.asarray(Shard(i, count, True).positions(6)) for i in range(count)]
    assert sorted(np.concatenate(positions)) == list(range(6 * count))
    assert len({int((p + 1).sum()) for p in positions}) == 1  # keys seen


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8])
def test_balance_and_restore(count):
    """Each device ends up with the tokens that its `Shard` names, and gets its own back."""
    with jax.set_mesh(jax.make_mesh((count,), ("context",), axis_types=(AxisType.Auto,), devices=jax.devices()[:count])):

        def there_and_back(x):
            y = context.balance(x, 0, "context", count)
            named = Shard(lax.axis_index("context"), count, True).positions(len(x))
            return y - named, context.restore(y, 0, "context", count)

        run = jax.shard_map(there_and_back, in_specs=P("context"), out_specs=P("context"), check_vma=False)
        off, back = jax.jit(run)(jnp.arange(4 * count))
    np.testing.assert_array_equal(off, 0)
    np.testing.assert_array_equal(back, np.arange(4 * count))


@pytest.mark.parametrize(
    "kernel,T,count,window,kind",
    [
        ("reference", 24, 4, 0, AxisType.Auto),
        ("chunked", 24, 4, 0, AxisType.Auto),  # six queries a device, in two runs
        ("chunked", 12, 4, 5, AxisType.Explicit),  # three: not rearranged
        pytest.param("splash", 256, 2, 0, AxisType.Auto, marks=pytest.mark.slow),  # one tile a device: not rearranged
        pytest.param("splash", 512, 2, 200, AxisType.Auto, marks=pytest.mark.slow),
    ],
)
def test_equals_one_device(kernel, T, count, window, kind):
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, T, n, 16)).astype(np.float32) for n in (4, 2, 2))
    segments = np.sort(rng.integers(1, 4, (2, T)), axis=1).astype(np.int32)
    sinks = np.array([0.5, -1.0, 0.0, 2.0], np.float32)

    def value_and_gradients(q, k, v, sinks, name):
        def scalar(q, k, v, sinks):
            options = dict(segment_ids=segments, window=window, kernel=name, interpret=name == "splash")
            out, _ = kernels.attention(q, k, v, sinks=sinks, **options)
            return jnp.sin(out).sum(), out

        return jax.value_and_grad(scalar, (0, 1, 2, 3), has_aux=True)(q, k, v, sinks)

    run = jax.jit(value_and_gradients, static_argnums=4)
    alone = run(q, k, v, sinks, "reference")
    with jax.set_mesh(mesh_of(kind, fsdp=2, context=count, tensor=8 // 2 // count)):
        places = [P("fsdp", "context", "tensor")] * 3 + [P()]
        divided = run(*(jax.device_put(x, place) for x, place in zip((q, k, v, sinks), places)), kernel)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=3e-5), divided, alone)


def test_lse_comes_back_in_order():
    q = jnp.asarray(np.random.default_rng(0).normal(size=(1, 16, 1, 8)), jnp.float32)
    alone = kernels.attention(q, q, q)[1]
    with jax.set_mesh(mesh_of(context=4, tensor=2)):
        divided = jax.jit(lambda q: kernels.attention(q, q, q)[1])(q)
    np.testing.assert_allclose(divided, alone, atol=1e-6)


def test_only_keys_values_and_halves_of_queries_travel():
    """Forward: keys and values are gathered, queries go to their chunks and results come back; no reduction."""
    mesh = mesh_of(context=8)
    with jax.set_mesh(mesh):
        q = jax.device_put(jnp.ones((1, 64, 4, 8)), P(None, "context"))
        text = jax.jit(lambda q, k, v: kernels.attention(q, k, v)[0]).lower(q, q[:, :, :2], q[:, :, :2]).compile().as_text()
    assert "all-gather" in text and "collective-permute" in text
    assert "all-reduce" not in text and "all-to-all" not in text
