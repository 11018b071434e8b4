import dataclasses
import json
import re

import numpy as np
import pytest

from gatedattn.__main__ import main
from gatedattn.config import ConfigError, RopeConfig, RunConfig, TransformerConfig, to_mapping
from gatedattn.interop import models
from gatedattn.interop.build import flat_parameters
from gatedattn.interop.lengthen import lengthen

MODEL = TransformerConfig(
    vocab_size=257, d_model=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, ffn_dim=16, max_seq_len=64
)


@pytest.mark.parametrize(
    "rope,expected,reach",
    [
        ("yarn,factor=4", RopeConfig(scaling="yarn", factor=4.0, original_max_len=32), 128),
        ("scaling=yarn, factor=4, original_max_len=64", RopeConfig(scaling="yarn", factor=4.0, original_max_len=64), 256),
        ("linear,factor=1.5", RopeConfig(scaling="linear", factor=1.5, original_max_len=32), 64),
        ("theta=1000000", RopeConfig(theta=1e6), 64),
        ("yarn,factor=4,theta=1e6,beta_fast=16", RopeConfig(1e6, 1.0, "yarn", 4.0, 32, beta_fast=16.0), 128),
    ],
)
def test_settings(rope, expected, reach):
    found = lengthen(MODEL, rope, trained=32)
    assert found == dataclasses.replace(MODEL, rope=expected, max_seq_len=reach)


def test_an_extension_is_replaced_not_added_to():
    has = dataclasses.replace(MODEL, rope=RopeConfig(1e6, 0.5, "yarn", 4.0, 16, beta_slow=2.0, attention_factor=1.5))
    assert lengthen(has, "linear,factor=2", 16).rope == RopeConfig(1e6, 0.5, "linear", 2.0, 16)
    assert lengthen(has, "scaling=none", 16).rope == RopeConfig(1e6, 0.5, original_max_len=16)
    assert lengthen(has, "factor=8", 16).rope == dataclasses.replace(has.rope, factor=8.0)


@pytest.mark.parametrize(
    "rope,message",
    [
        ("yarn", "by how much? Add factor="),
        ("yarm,factor=2", "must be one of none, linear, yarn (did you mean 'yarn'?)"),
        ("factr=2,yarn", "no setting 'factr' (did you mean 'factor'?)"),
        ("yarn,factor=two", "factor='two' must be a number"),
        ("yarn,factor=nan", "must be a finite number"),
        ("yarn,factor=2,factor=3", "factor is given twice"),
        ("factor=2", "has no effect with scaling='none'"),
        ("yarn,linear", "scaling is given twice"),
        ("theta=0", "must be positive"),
    ],
)
def test_refused(rope, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        lengthen(MODEL, rope, 32)


def test_learned_positions_are_refused():
    with pytest.raises(ConfigError, match="position=learned, not rope"):
        lengthen(dataclasses.replace(MODEL, position="learned"), "yarn,factor=2", 32)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that was trained at 32 tokens, as a folder of ours."""
    from flax import nnx

    from gatedattn.data import tokenizers
    from gatedattn.transformer import Transformer

    folder = tmp_path_factory.mktemp("model")
    model = Transformer(MODEL, rngs=nnx.Rngs(0))
    models.save_model(models.Source(MODEL, flat_parameters(model), tokenizers.Bytes(), 32), folder)
    return folder


def test_loaded_with_another_rope_it_computes_what_that_config_computes(run):
    tokens = np.arange(100)[None] % 257
    source = models.open_model(run)
    plain, long = (models.load_model(run, rope=rope)[0] for rope in ("", "yarn,factor=2"))
    expected = models.build(
        dataclasses.replace(MODEL, rope=RopeConfig(scaling="yarn", factor=2.0, original_max_len=64)), source.params
    )
    np.testing.assert_array_equal(long(tokens)[0], expected(tokens)[0])
    assert not np.allclose(long(tokens)[0], plain(tokens)[0], atol=1e-4) and long.config.max_seq_len == 128


def test_a_run_was_trained_at_its_rows(tmp_path):
    """What YaRN extends is the length of the rows a run was trained on, whatever `max_seq_len` allows."""
    from flax import nnx

    from gatedattn.training.checkpoint import Checkpoints
    from gatedattn.training.step import TrainState
    from gatedattn.transformer import Transformer

    config = RunConfig(model=MODEL, train=dataclasses.replace(RunConfig().train, seq_len=48))
    (tmp_path / "config.json").write_text(json.dumps(to_mapping(config)))
    params = nnx.as_pure(nnx.state(Transformer(MODEL, rngs=nnx.Rngs(0)), nnx.Param))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(TrainState(params, {}, np.int32(1)), config)
    assert models.open_model(tmp_path).trained == 48
    assert models.load_model(tmp_path, rope="yarn,factor=2")[0].config.rope.original_max_len == 48


def test_every_command_takes_it(run, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("The state of the union is as it was, and will be what we make of it.")
    losses = []
    for rope in ([], ["--rope=linear,factor=4"]):
        assert main(["perplexity", str(run), f"--text=a={tmp_path}/a.txt", "--length=64", "--json", *rope]) == 0
        losses.append(json.loads(capsys.readouterr().out)["sets"]["a"]["loss"])
    assert losses[0] != losses[1]
    for command in (
        ["generate"],
        ["analyze", f"--text={tmp_path}/a.txt", f"--out={tmp_path}/out"],
        ["perplexity", f"--text={tmp_path}/a.txt"],
    ):
        assert main([command[0], str(run), *command[1:], "--rope=yarn"]) == 2
        assert "by how much?" in capsys.readouterr().err
