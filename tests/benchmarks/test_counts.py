"""The counted guard: what it counts is right, growth is found, and the step is not dearer than the committed baseline."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from benchmarks import counts
from gatedattn import transformer

ROOT = Path(__file__).parents[2]


def test_flops_of_loops_branches_and_what_is_recomputed():
    w = jnp.ones((8, 8))

    def layer(x):
        return jnp.tanh(x @ w)

    def count(f, *args):
        return counts.flops(jax.make_jaxpr(f)(*args).jaxpr)

    x, one = jnp.ones((4, 8)), 2 * 4 * 8 * 8
    assert count(layer, x) == one
    assert count(jax.jit(layer), x) == one
    assert count(lambda x: jax.lax.scan(lambda c, _: (layer(c), None), x, length=5)[0], x) == 5 * one
    assert count(lambda x: jax.lax.map(layer, jnp.stack([x] * 3)), x) == 3 * one
    assert count(lambda x: jax.lax.cond(x[0, 0] > 0, layer, lambda x: layer(layer(x)), x), x) == 2 * one
    gradient = jax.grad(lambda x: jax.checkpoint(layer)(layer(x)).sum())
    assert count(gradient, x) == 5 * one  # two forward, two backward, one again


def test_the_step_costs_what_the_formula_says():
    """Three times the forward pass's products; the attention kernel computes its scores anew in the backward pass."""
    config = counts.cases()["g1"]
    model, length, batch_size = config.model, config.train.seq_len, config.train.batch_size
    state = jax.eval_shape(counts.steps.make_init(config))
    batch = jax.eval_shape(lambda: counts.random_batch(config))
    found = counts.flops(jax.jit(counts.steps.make_train_step(config)).trace(state, batch).jaxpr.jaxpr)
    assert found == json.loads(counts.BASELINE.read_text())["flops"]["g1"]

    leaves = jax.tree_util.tree_leaves_with_path(state.params)
    kernels = sum(x.size for path, x in leaves if path[-1].key == "kernel")
    row = 2 * model.num_layers * batch_size * model.num_heads * model.head_dim  # FLOPs of a product for each pair
    blocks, pair = length // 128, row * 128**2
    # 2 products for a pair forwards, 5 backwards, and one for each query. Of the loops over earlier blocks, whose rounds are not known, one
    # round is counted: 2 blocks of keys for each block of queries, backwards 1 of queries for each of keys.
    assert found == 6 * kernels * config.tokens_per_step + row * length + pair * blocks * (2 * 2 + 5 * 1)
    visited = blocks * (blocks + 1) // 2
    whole = found + pair * (2 * (visited - 2 * blocks) + 5 * (visited - blocks))
    assert 1.0 < whole / (transformer.flops_per_token(model, length) * config.tokens_per_step) < 1.35


def test_growth_is_found_and_less_is_told():
    baseline = {"flops": {"a": 100, "b": 100}, "temp_bytes": {jax.__version__: {"a": 1000, "b": 1000}}}
    found = {
        "a": {"flops": 106, "temp_bytes": 1040},
        "b": {"flops": 100, "temp_bytes": 900},
        "c": {"flops": 1, "temp_bytes": 1},
    }
    grew, notes = counts.compare(found, baseline)
    assert grew == ["a: flops 100 -> 106 (+6.0%)"]
    assert notes[0].startswith("b: temp_bytes 1,000 -> 900 (-10.0%): less") and "c: no flops" in notes[1]
    grew, notes = counts.compare(found, baseline | {"temp_bytes": {"0.1": {}}})
    assert len(grew) == 1 and "knows jax 0.1, not" in notes[0]


@pytest.mark.slow
def test_the_step_is_not_dearer_than_the_committed_baseline():
    env = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    run = subprocess.run([sys.executable, "-m", "benchmarks.counts"], cwd=ROOT, env=env | {"JAX_PLATFORMS": "cpu"},
                         capture_output=True, text=True)  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
