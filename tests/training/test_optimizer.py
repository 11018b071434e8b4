import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gatedattn.config import OptimizerConfig
from gatedattn.training import optimizer

L, D, N, H, F, E, V = 2, 16, 4, 8, 24, 3, 40


def params():
    """Parameters by the paths that the Transformer uses."""
    random = np.random.default_rng(0)

    def normal(*shape):
        return random.standard_normal(shape, np.float32)

    return {
        "embedding": {"table": normal(V, D)},
        "layers": {
            "attention": {
                "query": {"kernel": normal(L, D, N, H), "bias": normal(L, N, H)},
                "key": {"kernel": normal(L, D, 2, H)},
                "output": {"kernel": normal(L, N, H, D)},
                "gates": {0: {"kernel": normal(L, D, N, H), "bias": normal(L, N, H)}, 1: {"table": normal(L, N, H)}},
                "query_norm": {"weight": normal(L, H)},
                "sink": normal(L, N),
            },
            "mlp": {"down": {"kernel": normal(L, F, D)}},
            "moe": {"router": {"kernel": normal(L, D, E)}, "up": {"kernel": normal(L, E, D, F)}},
        },
        "final_norm": {"weight": normal(D)},
        "head": {"kernel": normal(D, V)},
    }


def flat(tree):
    return {optimizer.path_string(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def test_schedules_at_known_steps():
    base = {"learning_rate": 1.0, "end_learning_rate": 0.1, "warmup_steps": 10}
    cosine = optimizer.schedule(OptimizerConfig(schedule="cosine", **base), 111)
    np.testing.assert_allclose([cosine(s) for s in (0, 4, 9, 10, 60, 110, 200)], [0.1, 0.5, 1, 1, 0.55, 0.1, 0.1], rtol=1e-5)

    wsd = optimizer.schedule(OptimizerConfig(schedule="wsd", decay_fraction=0.2, **base), 101)
    np.testing.assert_allclose([wsd(s) for s in (0, 50, 80, 81, 100)], [0.1, 1, 1, 1, 0.1], rtol=1e-5)
    np.testing.assert_allclose(wsd(91), 1 - 0.9 * 10 / 19, rtol=1e-5)

    constant = optimizer.schedule(OptimizerConfig(schedule="constant", **base), 100)
    np.testing.assert_allclose([constant(s) for s in (0, 9, 10, 99)], [0.1, 1, 1, 1], rtol=1e-6)
    no_warmup = optimizer.schedule(OptimizerConfig(**base | {"warmup_steps": 0}), 11)
    np.testing.assert_allclose([no_warmup(0), no_warmup(5), no_warmup(10)], [1, 0.55, 0.1], rtol=1e-5)


DECAYED = {
    "layers/attention/query/kernel",
    "layers/attention/key/kernel",
    "layers/attention/output/kernel",
    "layers/attention/gates/0/kernel",
    "layers/mlp/down/kernel",
    "layers/moe/router/kernel",
    "layers/moe/up/kernel",
    "head/kernel",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_decay_only_shrinks_the_intended_parameters(name):
    config = OptimizerConfig(name=name, schedule="constant", warmup_steps=0, weight_decay=0.1)
    tree = params()
    tx = optimizer.build(config, 10)
    updates, _ = jax.jit(tx.update)(jax.tree.map(np.zeros_like, tree), tx.init(tree), tree, step=3)
    moved = {path for path, update in flat(updates).items() if np.any(update != 0)}
    assert moved == DECAYED
    muon = name == "muon"
    rate = config.muon_learning_rate if muon else config.learning_rate
    np.testing.assert_allclose(
        updates["layers"]["mlp"]["down"]["kernel"], -rate * 0.1 * tree["layers"]["mlp"]["down"]["kernel"], 1e-5
    )
    np.testing.assert_allclose(updates["head"]["kernel"], -config.learning_rate * 0.1 * tree["head"]["kernel"], 1e-5)


@pytest.mark.slow
def test_muon_orthogonalises_each_layers_matrix_and_leaves_the_rest_to_adam():
    config = OptimizerConfig(name="muon", schedule="constant", warmup_steps=0, weight_decay=0.0, clip_norm=0.0)
    tree = params()
    grads = params()
    tx = optimizer.build(config, 10)
    updates = flat(jax.jit(tx.update)(grads, tx.init(tree), tree, step=3)[0])
    matrices = {
        "layers/attention/query/kernel": (L, D, N * H),
        "layers/attention/key/kernel": (L, D, 2 * H),
        "layers/attention/output/kernel": (L, N * H, D),
        "layers/mlp/down/kernel": (L, F, D),
        "layers/moe/up/kernel": (L * E, D, F),
    }
    for path, shape in matrices.items():
        scale = config.muon_learning_rate * max(1, shape[2] / shape[1]) ** 0.5
        singular = np.linalg.svd(np.reshape(updates[path], shape) / scale, compute_uv=False)
        assert singular.min() > 0.3 and singular.max() < 1.3, path  # Newton-Schulz of five steps ends in about [0.7, 1.2]

    adam = optimizer.build(OptimizerConfig(schedule="constant", warmup_steps=0, weight_decay=0.0, clip_norm=0.0), 10)
    expected = flat(jax.jit(adam.update)(grads, adam.init(tree), tree, step=3)[0])
    for path in updates.keys() - matrices.keys():
        np.testing.assert_allclose(updates[path], expected[path], rtol=1e-6, err_msg=path)


def test_clipping_bounds_the_norm_that_adam_sees():
    config = OptimizerConfig(clip_norm=0.5, b1=0.0, schedule="constant", warmup_steps=0)
    tree = {"w": jnp.zeros(4)}
    tx = optimizer.build(config, 10)
    _, state = tx.update({"w": jnp.full(4, 100.0)}, tx.init(tree), tree, step=0)
    np.testing.assert_allclose(optax.tree.norm(optax.tree.get(state, "mu")), 0.5, rtol=1e-6)


@pytest.mark.slow
def test_adamw_is_optaxs_whatever_step_it_is_given():
    config = OptimizerConfig(warmup_steps=0, clip_norm=0.0)
    tree, grads = params(), params()
    ours = optimizer.build(config, 10)
    rate = optimizer.schedule(config, 10)
    theirs = optax.adamw(rate, config.b1, config.b2, config.eps, weight_decay=0.1, mask=optimizer.decay_mask(config))
    states = ours.init(tree), theirs.init(tree)
    for step in range(3):
        a, mine = jax.jit(ours.update)(grads, states[0], tree, step=step)
        b, other = jax.jit(theirs.update)(grads, states[1], tree)
        states = mine, other
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), a, b)
    # A step whose update was not applied leaves the moments alone; the schedule goes on.
    late, _ = ours.update(grads, states[0], tree, step=7)
    soon, _ = ours.update(grads, states[0], tree, step=3)
    np.testing.assert_allclose(late["head"]["kernel"] / soon["head"]["kernel"], rate(7) / rate(3), rtol=1e-5)
