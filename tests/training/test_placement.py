import dataclasses
import re

import jax
import numpy as np
import pytest

from gatedattn.config import ConfigError, MeshConfig, MoEConfig, RunConfig, TrainConfig, TransformerConfig
from gatedattn.training import loop, recorder
from gatedattn.training.placement import AXES, Placement, check, make_mesh, mesh_shape


def test_the_axis_of_minus_one_takes_what_is_left():
    assert mesh_shape(MeshConfig(), 1) == {"data": 1, "fsdp": 1, "tensor": 1, "expert": 1, "context": 1}
    assert mesh_shape(MeshConfig(data=2, tensor=2), 8)["fsdp"] == 2
    with pytest.raises(ConfigError, match="mesh.tensor=3.* does not fit 8 devices"):
        mesh_shape(MeshConfig(tensor=3), 8)
    with pytest.raises(ConfigError, match="mesh.data=4 does not fit 1 device:"):
        mesh_shape(MeshConfig(data=4, fsdp=1), 1)
    with pytest.raises(ConfigError, match="6 sequences .* over 4 devices"):
        Placement(MeshConfig(tensor=1), 6, jax.devices()[:4])


MODEL = TransformerConfig(vocab_size=96, d_model=48, num_heads=6, num_kv_heads=2, head_dim=8, ffn_dim=64)


@pytest.mark.parametrize(
    "mesh,message",
    [
        (
            dict(tensor=4),
            "mesh.tensor=4 does not divide model.num_heads=6: mesh.tensor may be 3 or 6, or model.num_heads 4 or 8",
        ),
        (dict(tensor=3), "mesh.tensor=3 does not divide model.num_kv_heads=2: mesh.tensor may be 2, or model.num_kv_heads 3"),
        (dict(fsdp=32), "mesh.fsdp=32 does not divide model.d_model=48: mesh.fsdp may be 24 or 48, or model.d_model 32 or 64"),
        (
            dict(context=5),
            "mesh.context=5 does not divide train.seq_len=256: mesh.context may be 4 or 8, or train.seq_len 255 or 260",
        ),
        (
            dict(data=3, fsdp=2),
            "mesh.data x mesh.fsdp x mesh.expert=6 does not divide train.batch_size / train.microbatches=8: their product may be 4 or 8,",
        ),
    ],
)
def test_a_mesh_that_does_not_divide_is_refused(mesh, message):
    sizes = dict.fromkeys(AXES, 1) | mesh
    batch = 32 if "fsdp" in mesh and "data" not in mesh else 8
    run = RunConfig(model=MODEL, train=TrainConfig(batch_size=batch, seq_len=256))
    with pytest.raises(ConfigError, match="^" + re.escape(message)):
        check(run, sizes)


def test_experts_that_do_not_divide_are_refused():
    model = dataclasses.replace(MODEL, moe=MoEConfig(num_experts=6, top_k=2, expert_dim=32))
    with pytest.raises(ConfigError, match="mesh.expert=4 does not divide model.moe.num_experts=6: mesh.expert may be 3 or 6"):
        check(RunConfig(model=model), dict.fromkeys(AXES, 1) | dict(expert=4))


class Chip:
    """As much of a TPU as the layout of a mesh looks at: a place in the torus of a slice."""

    platform, device_kind, process_index, core_on_chip = "tpu", "TPU v5p", 0, 0

    def __init__(self, slice_index, x, y, z):
        self.slice_index, self.coords = slice_index, (x, y, z)
        self.id = slice_index * 8 + x + 2 * y + 4 * z


def test_only_data_goes_across_slices():
    chips = [Chip(s, x, y, z) for s in range(2) for z in range(2) for y in range(2) for x in range(2)]
    mesh = make_mesh({"data": 4, "fsdp": 2, "tensor": 2, "expert": 1, "context": 1}, chips)
    slices = np.vectorize(lambda chip: chip.slice_index)(mesh.devices)
    assert slices.shape == (4, 2, 2, 1, 1)
    assert (slices[:2] == 0).all() and (slices[2:] == 1).all()
    with pytest.raises(ConfigError, match="mesh.data=1 over 2 slices: must be a multiple of 2"):
        make_mesh({"data": 1, "fsdp": 16, "tensor": 1, "expert": 1, "context": 1}, chips)


class Gpu:
    """As much of a GPU as the layout of a mesh looks at."""

    platform, device_kind = "gpu", "NVIDIA H100 80GB HBM3"

    def __init__(self, i):
        self.id, self.process_index, self.slice_index = i, i // 8, i // 8


def test_any_axis_goes_across_hosts_of_gpus_and_the_inner_ones_stay_within():
    gpus = [Gpu(i) for i in range(16)]
    one = {"data": 1, "fsdp": 16, "tensor": 1, "expert": 1, "context": 1}
    assert [g.id for g in make_mesh(one, gpus[::-1]).devices.flat] == list(range(16))
    mesh = make_mesh(one | {"data": 2, "fsdp": 4, "tensor": 2}, gpus)
    hosts = np.vectorize(lambda gpu: gpu.process_index)(mesh.devices)
    assert (hosts[0] == 0).all() and (hosts[1] == 1).all()


@pytest.mark.slow
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
