import dataclasses

import jax
import numpy as np
import pytest

from gatedattn.config import ConfigError, MeshConfig
from gatedattn.training import loop, recorder
from gatedattn.training.placement import Placement, mesh_shape


def test_the_axis_of_minus_one_takes_what_is_left():
    assert mesh_shape(MeshConfig(), 1) == {"data": 1, "fsdp": 1, "tensor": 1, "expert": 1, "context": 1}
    assert mesh_shape(MeshConfig(data=2, tensor=2), 8)["fsdp"] == 2
    with pytest.raises(ConfigError, match="mesh.tensor=3.* does not fit 8 devices"):
        mesh_shape(MeshConfig(tensor=3), 8)
    with pytest.raises(ConfigError, match="mesh.data=4 does not fit 1 device:"):
        mesh_shape(MeshConfig(data=4, fsdp=1), 1)
    with pytest.raises(ConfigError, match="6 sequences .* over 4 devices"):
        Placement(MeshConfig(tensor=1), 6, jax.devices()[:4])


def test_eight_devices_learn_what_one_learns_and_go_on_over_another_mesh(text_config, tmp_path):
    def train(steps, folder, devices, **mesh):
        train = dataclasses.replace(text_config.train, steps=steps, log_every=1)
        config = dataclasses.replace(text_config, train=train, mesh=MeshConfig(**mesh))
        result = loop.train(config, tmp_path / folder, jax.devices()[:devices])
        return result, [line["loss"] for line in recorder.read_lines(tmp_path / folder / "metrics.jsonl")]

    sharded, _ = train(4, "eight", 8, fsdp=4, tensor=2)
    query = sharded.params["layers"]["attention"]["query"]["kernel"]
    assert query.sharding.spec == jax.sharding.PartitionSpec(None, "fsdp", "tensor", None)
    _, eight = train(8, "eight", 4, data=2, fsdp=2)  # the checkpoint of eight devices, on four
    _, one = train(8, "one", 1)
    np.testing.assert_allclose(eight, one, rtol=1e-4)
