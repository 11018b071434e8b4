import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

from gatedattn.aot.hlo import Program
from gatedattn.training import loss as loss_lib
from gatedattn.training.loss import next_token_loss

B, T, D, V = 3, 7, 5, 11


@pytest.fixture
def inputs():
    with jax.enable_x64(True):
        keys = jax.random.split(jax.random.key(0), 4)
        hidden = jax.random.normal(keys[0], (B, T, D), jnp.float64)
        unembedding = jax.random.normal(keys[1], (D, V), jnp.float64)
        targets = jax.random.randint(keys[2], (B, T), 0, V)
        mask = jax.random.bernoulli(keys[3], 0.6, (B, T))
        yield hidden, unembedding, targets, mask


def plain(hidden, unembedding, targets, mask, z_loss):
    logits = hidden @ unembedding
    ce = optax.softmax_cross_entropy(logits, jax.nn.one_hot(targets, V, dtype=logits.dtype))
    lse = jax.nn.logsumexp(logits, axis=-1)
    return jnp.sum(mask * (ce + z_loss * lse**2))


@pytest.mark.parametrize("z_loss", [0.0, 0.3])
@pytest.mark.parametrize("chunk", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4)), 7, 21, 1000])
def test_value_and_gradients_match_a_plain_computation(inputs, chunk, z_loss):
    hidden, unembedding, targets, mask = inputs

    def ours(h, w):
        sums = next_token_loss(h, w, targets, mask, z_loss=z_loss, chunk=chunk)
        return sums["loss_sum"], sums

    (value, sums), grads = jax.jit(jax.value_and_grad(ours, (0, 1), has_aux=True))(hidden, unembedding)
    expected, expected_grads = jax.value_and_grad(plain, (0, 1))(hidden, unembedding, targets, mask, z_loss)
    np.testing.assert_allclose(value, expected, rtol=1e-12)
    np.testing.assert_allclose(grads[0], expected_grads[0], rtol=1e-10, atol=1e-13)
    np.testing.assert_allclose(grads[1], expected_grads[1], rtol=1e-10, atol=1e-13)

    logits = hidden @ unembedding
    assert sums["count"] == mask.sum()
    assert sums["correct"] == jnp.sum(mask & (logits.argmax(-1) == targets))
    np.testing.assert_allclose(sums["z_sum"], jnp.sum(mask * jax.nn.logsumexp(logits, axis=-1) ** 2), rtol=1e-12)
    np.testing.assert_allclose(sums["loss_sum"], sums["ce_sum"] + z_loss * sums["z_sum"], rtol=1e-12)


def test_without_a_gradient_the_sums_are_the_same(inputs):
    hidden, unembedding, targets, mask = inputs
    plain_call = next_token_loss(hidden, unembedding, targets, mask, z_loss=0.1, chunk=4)
    traced = jax.vjp(lambda h: next_token_loss(h, unembedding, targets, mask, z_loss=0.1, chunk=4), hidden)[0]
    for name, value in plain_call.items():
        np.testing.assert_allclose(traced[name], value, rtol=1e-14)


def test_masked_tokens_contribute_nothing_whatever_they_hold(inputs):
    hidden, unembedding, targets, mask = inputs
    spoiled = jnp.where(mask[..., None], hidden, jnp.inf)
    wild_targets = jnp.where(mask, targets, -1)

    def loss(h, w, y):
        return next_token_loss(h, w, y, mask, z_loss=0.2, chunk=4)["loss_sum"]

    a, da = jax.value_and_grad(loss)(hidden, unembedding, targets)
    b, db = jax.value_and_grad(loss)(spoiled, unembedding, wild_targets)
    assert a == b
    np.testing.assert_array_equal(da, db)


@pytest.mark.slow
def test_bfloat16_hidden_keeps_float32_sums_and_gradients_of_the_unembedding():
    hidden = jax.random.normal(jax.random.key(0), (2, 64, 32), jnp.bfloat16)
    unembedding = jax.random.normal(jax.random.key(1), (32, 50), jnp.float32)
    targets = jnp.zeros((2, 64), jnp.int32)
    mask = jnp.ones((2, 64), bool)

    def loss(h, w):
        return next_token_loss(h, w, targets, mask, chunk=16)["loss_sum"]

    value, (d_hidden, d_unembedding) = jax.value_and_grad(loss, (0, 1))(hidden, unembedding)
    assert (value.dtype, d_hidden.dtype, d_unembedding.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
    expected = jax.grad(
        lambda w: jnp.sum(optax.softmax_cross_entropy_with_integer_labels(hidden.astype(w.dtype) @ w, targets))
    )(unembedding)
    np.testing.assert_allclose(d_unembedding, expected, atol=0.02 * float(jnp.abs(expected).max()))


def test_memory_does_not_grow_with_the_logits():
    """Doubling B*T adds hidden states and their gradients, but less than one chunk's float32 logits [chunk, V]."""
    chunk, d, v = 512, 16, 4096

    def temporaries(tokens: int) -> int:
        def loss(h, w, y, m):
            return next_token_loss(h, w, y, m, z_loss=1e-4, chunk=chunk)["loss_sum"]

        shapes = (
            jax.ShapeDtypeStruct((4, tokens // 4, d), jnp.float32),
            jax.ShapeDtypeStruct((d, v), jnp.float32),
            jax.ShapeDtypeStruct((4, tokens // 4), jnp.int32),
            jax.ShapeDtypeStruct((4, tokens // 4), jnp.bool_),
        )
        compiled = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*shapes).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    small, large = temporaries(4096), temporaries(16384)
    one_chunk = chunk * v * 4
    assert large - small < one_chunk
    assert large < 16384 * v * 4 / 4  # and far from the whole [B*T, V]


@pytest.mark.parametrize("axes", [{"fsdp": 4, "tensor": 2}, {"data": 2, "expert": 2, "context": 2}], ids=str)
@pytest.mark.parametrize("large", [2**28, 0], ids=["whole", "in parts"])
def test_on_a_mesh_the_same_and_the_unembedding_summed_once(axes, large, monkeypatch):
    monkeypatch.setattr(loss_lib, "LARGE", large)
    keys = jax.random.split(jax.random.key(0), 3)
    hidden, unembedding = jax.random.normal(keys[0], (4, 16, 8)), jax.random.normal(keys[1], (8, 32))
    targets, mask = jax.random.randint(keys[2], (4, 16), 0, 32), jnp.arange(16)[None] > jnp.arange(4)[:, None]

    def loss(h, w, y, m):
        return next_token_loss(h, w, y, m, z_loss=0.1, chunk=3)["loss_sum"]

    step = jax.value_and_grad(loss, (0, 1))
    expected = step(hidden, unembedding, targets, mask)
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
    with jax.set_mesh(mesh):
        compiled = jax.jit(step).lower(hidden, unembedding, targets, mask).compile()
        found = compiled(hidden, unembedding, targets, mask)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), found, expected)
    program = Program(compiled.as_text())
    summed = [c for c in program.collectives() if c.kind in ("all-reduce", "reduce-scatter")]
    once = unembedding.size * 4  # bytes; and a share of it over the axes that fsdp leaves, and a few scalars
    assert once <= sum(c.times * c.payload for c in summed) <= 1.25 * once + 64, summed
