import contextlib
import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gatedattn.config import CheckpointConfig, ConfigError, MeshConfig
from gatedattn.training import step as steps
from gatedattn.training.checkpoint import Checkpoints, Damaged, NotSaved, checksum
from gatedattn.training.placement import Placement


def numbered(state, step=7):
    return jax.tree.map(lambda x: x + np.arange(x.size, dtype=x.dtype).reshape(x.shape), state)._replace(step=np.int32(step))


@pytest.mark.parametrize("name", ["adamw", pytest.param("muon", marks=pytest.mark.slow)])
def test_a_state_comes_back_bit_for_bit(config, tmp_path, name):
    c = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, name=name))
    state = numbered(steps.initialize(c))
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest() is None
        checkpoints.save(state, c, {"tokenizer": "abc"})
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        assert checkpoints.latest() == 7 and checkpoints.about(7)["tokenizer"] == "abc"
        abstract = jax.eval_shape(steps.make_init(c))
        back = checkpoints.restore(abstract)
        assert jax.tree.structure(back) == jax.tree.structure(state)
        jax.tree.map(np.testing.assert_array_equal, back, state)
        jax.tree.map(np.testing.assert_array_equal, checkpoints.restore_params(abstract.params), state.params)
    saved = tmp_path / "checkpoints/7/config/metadata"
    assert json.loads(saved.read_text())["optimizer"]["name"] == name
    assert not list(tmp_path.rglob("*.pkl"))


def test_the_newest_are_kept_and_some_for_good(config, tmp_path):
    state = steps.initialize(config)
    with Checkpoints(tmp_path, CheckpointConfig(keep=2, keep_every=4)) as checkpoints:
        for step in range(1, 12):
            checkpoints.save(state._replace(step=np.int32(step)), config)
        checkpoints.finish()
        assert checkpoints.steps() == [4, 8, 10, 11]
        checkpoints.delete_after(8)
        assert checkpoints.steps() == [4, 8]
        checkpoints.save(state._replace(step=np.int32(9)), config)
    assert sorted(int(p.name) for p in (tmp_path / "checkpoints").iterdir()) == [4, 8, 9]


def test_a_checkpoint_of_another_model_is_refused(config, tmp_path):
    wider = dataclasses.replace(config, model=dataclasses.replace(config.model, ffn_dim=64))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(steps.initialize(config), config)
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        with pytest.raises(ConfigError, match=r"does not fit this config: .*mlp/down/kernel is float32\[2, 48, 32\] there"):
            checkpoints.restore(jax.eval_shape(steps.make_init(wider)))


@pytest.mark.slow
def test_it_is_restored_onto_other_meshes(config, tmp_path):
    """8 devices, 4 in another arrangement, 1, and back to 8: each saves what the one before it has saved, under a new step."""
    meshes = [
        (8, MeshConfig(fsdp=4, tensor=2)),
        (4, MeshConfig(data=2, fsdp=1, tensor=2)),
        (1, MeshConfig()),
        (8, MeshConfig()),
    ]
    abstract = jax.eval_shape(steps.make_init(config))
    first = jax.device_get(numbered(steps.initialize(config)))
    for step, (devices, mesh) in enumerate(meshes, 1):
        place = Placement(mesh, 8, jax.devices()[:devices])
        with place.scope(), Checkpoints(tmp_path) as checkpoints:
            target = place.on_devices(abstract)
            if step == 1:
                state = jax.device_put(first, place.shardings(abstract))
            else:
                state = checkpoints.restore(target)
                assert int(state.step) == step - 1
            state = state._replace(step=jax.device_put(np.int32(step), state.step.sharding))
            kernel = state.params["layers"]["mlp"]["up"]["kernel"]
            assert len(kernel.sharding.device_set) == devices
            if place.mesh:
                assert kernel.sharding == target.params["layers"]["mlp"]["up"]["kernel"].sharding
            jax.tree.map(np.testing.assert_array_equal, jax.device_get(state._replace(step=0)), first._replace(step=0))
            checkpoints.save(state, config)


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from(["float32", "bfloat16", "int32", "uint8", "bool"]),
    st.lists(st.integers(1, 5), max_size=3),
    st.integers(0, 2**32 - 1),
)
def test_a_checksum_sees_every_bit_and_no_sharding(dtype, shape, seed):
    random = np.random.default_rng(seed)
    x = random.integers(0, 2, shape).astype(bool) if dtype == "bool" else random.normal(0, 9, shape)
    x = np.asarray(jnp.asarray(x).astype(dtype))
    before = int(checksum(jnp.asarray(x)))
    words = x.reshape(-1).view(np.uint8).copy()
    bit = random.integers(words.size * (1 if dtype == "bool" else 8))
    words[bit // (1 if dtype == "bool" else 8)] ^= 1 << (0 if dtype == "bool" else bit % 8)
    assert int(checksum(jnp.asarray(words.view(x.dtype).reshape(x.shape)))) != before
    if len({w.tobytes() for w in x.reshape(-1)}) == x.size > 1:
        swapped = x.reshape(-1).copy()
        swapped[[0, -1]] = swapped[[-1, 0]]
        assert int(checksum(jnp.asarray(swapped.reshape(x.shape)))) != before


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.1, 1.0])
def test_damage_is_found_named_and_the_checkpoint_before_it_is_used(config, tmp_path, capsys, share):
    """The files of a checkpoint in turn: a bit flipped, cut short, gone. What comes back is what was saved, or an older one."""
    states = {step: numbered(steps.initialize(config), step) for step in (3, 7)}
    with Checkpoints(tmp_path, CheckpointConfig(keep=3)) as checkpoints:
        for state in states.values():
            checkpoints.save(state, config)
    abstract = jax.eval_shape(steps.make_init(config))
    files = sorted(p for p in (tmp_path / "checkpoints/7").rglob("*") if p.is_file())
    assert len(files) > 10
    random, found = np.random.default_rng(0), 0
    cases = list(itertools.product(files, ("flip", "flip", "cut", "gone")))
    cases = [cases[i] for i in random.permutation(len(cases))[: round(share * len(cases))]]
    cases.append((tmp_path / "checkpoints/7/params/manifest.ocdbt", "cut"))  # one that cannot be overlooked
    for path, damage in cases:
        whole = path.read_bytes()
        if damage == "gone":
            path.unlink()
        elif damage == "cut":
            path.write_bytes(whole[: len(whole) // 2])
        elif whole:
            at = random.integers(len(whole))
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << random.integers(8)]) + whole[at + 1 :])
        with Checkpoints(tmp_path, read_only=True) as checkpoints:
            back = checkpoints.restore(abstract)
        step = int(back.step)
        jax.tree.map(np.testing.assert_array_equal, back, states[step])
        assert (f"{tmp_path}/checkpoints/7 is damaged" in capsys.readouterr().out) == (step == 3)
        found += step == 3
        path.write_bytes(whole)
    assert found > (len(cases) / 4 if share == 1 else 0)  # damage does matter: not all of it is in bytes that nobody reads

    (array,) = [p for p in files if p.parent.name == "d" and p.stat().st_size > 10_000 and "params" in str(p)][:1]
    array.write_bytes(bytes(array.stat().st_size))
    with Checkpoints(tmp_path, read_only=True) as checkpoints, pytest.raises(Damaged, match="checkpoints/7 is damaged"):
        checkpoints.restore_params(abstract.params)
    with Checkpoints(
        tmp_path, CheckpointConfig(keep=3)
    ) as checkpoints:  # the run itself: out of the way, for the step to be saved anew
        assert int(checkpoints.restore(abstract).step) == 3
        assert checkpoints.steps() == [3] and (tmp_path / "damaged/7").is_dir()
        checkpoints.save(states[7], config)
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        jax.tree.map(np.testing.assert_array_equal, checkpoints.restore(abstract), states[7])


def test_a_full_disk_leaves_older_checkpoints_whole_and_the_next_save_works(config, tmp_path, small_disk):
    state = numbered(steps.initialize(config), 1)
    with small_disk(tmp_path / "disk", "4m") as disk:
        with Checkpoints(disk, CheckpointConfig(keep=9)) as checkpoints:
            checkpoints.save(state, config)
            checkpoints.finish()
            filler = disk / "filler"
            with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(4096))
            with pytest.raises(NotSaved, match="step 2 could not be written to .*No space left on device"):
                checkpoints.save(state._replace(step=np.int32(2)), config)
                checkpoints.finish()
            assert checkpoints.steps() == [1]
            filler.unlink()
            checkpoints.save(state._replace(step=np.int32(3)), config)
            checkpoints.finish()
            assert checkpoints.steps() == [1, 3]
            abstract = jax.eval_shape(steps.make_init(config))
            for step in (1, 3):
                back = checkpoints.restore(abstract, step)
                jax.tree.map(np.testing.assert_array_equal, back.params, state.params)
        assert sorted(p.name for p in (disk / "checkpoints").iterdir()) == ["1", "3"]
