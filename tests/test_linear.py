import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.step import random_batch, reference
from gatedattn import linear
from gatedattn.training import step as steps

SHAPES = [((2, 3, 8), (8, 4, 6), 1), ((2, 3, 4, 6), (4, 6, 8), 2), ((5, 24), (24, 3), 1)]  # x, w, contracted dimensions


def draw(x, w, dtype):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in (x, w)]


def loss(x, w, inputs, for_cpu, out_dtype=None):
    with linear.for_cpu(for_cpu):
        y = linear.project(x, w, inputs=inputs, out_dtype=out_dtype)
    return (jnp.sin(y.astype(jnp.float32)) * jnp.arange(y.size).reshape(y.shape)).sum() / y.size, y


@pytest.mark.parametrize("x,w,inputs", SHAPES)
@pytest.mark.parametrize("for_cpu", [False, True])
def test_against_numpy(x, w, inputs, for_cpu, monkeypatch):
    """In float32, in which the library's form shows a fault better than in bfloat16, its only type."""
    monkeypatch.setattr(linear, "_library", lambda dtype: for_cpu)
    x, w = draw(x, w, jnp.float32)
    (_, y), (dx, dw) = jax.value_and_grad(loss, (0, 1), has_aux=True)(x, w, inputs, for_cpu)
    x, w = np.float64(x), np.float64(w)
    expected = np.tensordot(x, w, inputs)
    dy = np.cos(expected) * np.arange(y.size).reshape(y.shape) / y.size
    outer, rows = w.ndim - inputs, list(range(x.ndim - inputs))
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dx, np.tensordot(dy, w, (list(range(-outer, 0)),) * 2), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(dw, np.tensordot(x, dy, (rows, rows)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("out_dtype", [None, jnp.float32])
def test_bfloat16_for_cpu_is_as_exact(out_dtype):
    """Types are kept, and neither gradient is further from the float64 one than the plain form's."""
    operands = draw((64, 24), (24, 32), jnp.bfloat16)
    grads = {yes: jax.grad(loss, (0, 1), has_aux=True)(*operands, 1, yes, out_dtype)[0] for yes in (False, True)}
    assert [g.dtype for g in grads[True]] == [jnp.bfloat16] * 2
    x, w = map(np.float64, operands)
    dy = np.cos(x @ w) * np.arange(64 * 32).reshape(64, 32) / (64 * 32)
    exact = dy @ w.T, x.T @ dy
    for i in range(2):
        errors = {yes: np.abs(np.float64(grads[yes][i]) - exact[i]).max() for yes in grads}
        assert errors[True] <= 1.5 * errors[False] + 0.004 * np.abs(exact[i]).max()


def operand_types(function, *args) -> list[str]:
    """Of the matrix products in the compiled program, but for batched ones."""
    program = jax.jit(function).lower(*args).compile().as_text()
    found = []
    for computation in program.split("\n\n"):  # names are unique within one
        types = dict(re.findall(r"%([\w.\-]+) = (\w+)\[", computation))
        products = re.findall(r" dot\(%([\w.\-]+), %([\w.\-]+)\)(?!.*batch_dims)", computation)
        found += [types[name] for pair in products for name in pair]
    return found


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="about XLA's CPU back end")
class TestNothingIsWidened:
    """XLA's CPU back end copies to float32 what its library refuses."""

    @pytest.mark.parametrize("for_cpu", [False, True])
    def test_product_and_its_gradients(self, for_cpu):
        x, w = draw((256, 64), (64, 128), jnp.bfloat16)
        types = operand_types(jax.grad(lambda x, w: loss(x, w, 1, for_cpu)[0], (0, 1)), x, w)
        assert len(types) == 6
        assert (set(types) == {"bf16"}) == for_cpu, "XLA does it by itself now: `for_cpu` can go" if not for_cpu else types

    def test_training_step(self):
        """Four projections, the gate, three of the MLP and the head, each three times."""
        config = reference("bfloat16", num_layers=2, vocab_size=512)
        state = jax.eval_shape(steps.make_init(config))
        types = operand_types(steps.make_train_step(config), state, random_batch(config))
        assert types == ["bf16"] * 2 * 3 * 9
