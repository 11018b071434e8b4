import dataclasses
import json

import jax
import numpy as np
import pytest

from gatedattn.config import ConfigError
from gatedattn.training import step as steps
from gatedattn.training.checkpoint import Checkpoints


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_state_comes_back_bit_for_bit(config, tmp_path, name):
    c = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, name=name))
    state = steps.initialize(c)
    state = jax.tree.map(lambda x: x + np.arange(x.size, dtype=x.dtype).reshape(x.shape), state)._replace(step=np.int32(7))
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest() is None
        checkpoints.save(state, c)
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest() == 7
        abstract = jax.eval_shape(steps.make_init(c))
        back = checkpoints.restore(abstract)
        assert jax.tree.structure(back) == jax.tree.structure(state)
        jax.tree.map(np.testing.assert_array_equal, back, state)
        jax.tree.map(np.testing.assert_array_equal, checkpoints.restore_params(abstract.params), state.params)
    saved = tmp_path / "checkpoints/7/config/metadata"
    assert json.loads(saved.read_text())["optimizer"]["name"] == name
    assert not list(tmp_path.rglob("*.pkl"))


def test_only_the_newest_are_kept(config, tmp_path):
    state = steps.initialize(config)
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(state._replace(step=np.int32(step)), config)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["2", "3"]


def test_a_checkpoint_of_another_model_is_refused(config, tmp_path):
    wider = dataclasses.replace(config, model=dataclasses.replace(config.model, ffn_dim=64))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(steps.initialize(config), config)
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(ConfigError, match="does not fit this config"):
        checkpoints.restore(jax.eval_shape(steps.make_init(wider)))
