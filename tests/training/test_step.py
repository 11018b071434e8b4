import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from gatedattn.training import step as steps


@pytest.mark.slow
def test_microbatches_change_nothing_but_memory(config, batch):
    """Sums and counts: with loss masks as uneven as these, a mean of per-part means would be far off."""
    results = []
    for microbatches in (1, 4):
        c = dataclasses.replace(config, train=dataclasses.replace(config.train, microbatches=microbatches, z_loss=1e-2))
        state, metrics = jax.jit(steps.make_train_step(c))(steps.initialize(c), batch)
        results.append((metrics, optax.tree.get(state.opt_state, "mu")))  # mu = 0.1 * gradient after one step
    (whole, grads), (parts, grads_of_parts) = results
    assert whole["tokens"] == parts["tokens"] == batch["loss_mask"].sum()
    for name in ("loss", "ce", "z_loss", "grad_norm"):
        np.testing.assert_allclose(whole[name], parts[name], rtol=1e-5)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(grads_of_parts), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_training_lowers_the_loss_and_donates_its_state(config, batch):
    train_step = jax.jit(steps.make_train_step(config), donate_argnums=0)
    state = steps.initialize(config)
    old, losses = state, []
    for _ in range(20):
        state, metrics = train_step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.5 * losses[0]
    assert int(state.step) == 20
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old.params))


def test_the_loss_is_that_of_the_models_logits(config, batch):
    c = dataclasses.replace(config, train=dataclasses.replace(config.train, z_loss=0.1))
    state = steps.initialize(c)
    _, metrics = jax.jit(steps.make_train_step(c))(state, batch)
    sums = jax.jit(steps.make_eval_step(c))(state.params, batch)

    model = nnx.merge(steps.graph(c.model), state.params)
    logits, _ = nnx.jit(model)(batch["tokens"], batch["positions"], batch["segment_ids"])
    mask = batch["loss_mask"]
    ce = jnp.sum(mask * optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])) / mask.sum()
    z = jnp.sum(mask * jax.nn.logsumexp(logits, axis=-1) ** 2) / mask.sum()
    np.testing.assert_allclose(metrics["ce"], ce, rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"], ce + 0.1 * z, rtol=1e-5)
    np.testing.assert_allclose(sums["ce_sum"] / sums["count"], ce, rtol=1e-5)


@pytest.mark.slow
def test_a_mixture_of_experts_adds_its_losses(moe_config, batch):
    state = steps.initialize(moe_config)
    _, metrics = jax.jit(steps.make_train_step(moe_config))(state, batch)
    moe = moe_config.model.moe
    expected = metrics["ce"] + moe.load_balance * metrics["load_balance"] + moe.z_loss * metrics["router_z"]
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-6)
    assert 0.9 < metrics["load_balance"] < 4
    assert 0.25 <= metrics["router_max_load"] <= 1


def test_the_state_depends_on_the_seed_alone(config):
    one, same = steps.initialize(config), steps.initialize(config)
    other = steps.initialize(dataclasses.replace(config, train=dataclasses.replace(config.train, seed=1)))
    assert all(map(np.array_equal, jax.tree.leaves(one), jax.tree.leaves(same)))
    assert not np.array_equal(one.params["embedding"]["table"], other.params["embedding"]["table"])


@pytest.mark.slow
def test_parameters_stay_float32(config, batch):
    c = dataclasses.replace(config, model=dataclasses.replace(config.model, dtype="bfloat16"))
    state, metrics = jax.jit(steps.make_train_step(c))(steps.initialize(c), batch)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
    assert metrics["loss"].dtype == jnp.float32 and jnp.isfinite(metrics["loss"])
