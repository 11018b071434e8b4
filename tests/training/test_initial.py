import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from gatedattn.config import ConfigError
from gatedattn.data import tokenizers
from gatedattn.interop.build import flat_parameters
from gatedattn.training import initial, loop
from gatedattn.training import step as steps
from gatedattn.training.initial import Origin, match
from gatedattn.transformer import abstract_parameters

ONE = jax.devices()[:1]


def with_gates(config, gates, **model):
    return dataclasses.replace(config, model=dataclasses.replace(config.model, gates=gates, **model))


def origin_of(config, tokenizer=None, params=None):
    params = steps.initialize(config).params if params is None else params
    return Origin("there", config.model, flat_parameters(params), tokenizer)


def logits(config, params, tokens):
    return jax.jit(lambda params: nnx.merge(steps.graph(config.model), params)(tokens)[0])(params)


@pytest.mark.parametrize("before", [pytest.param("none", marks=pytest.mark.slow), "g2"])
def test_a_gate_with_an_identity_start_leaves_every_logit_unchanged(config, capsys, before):
    plain, gated = with_gates(config, before), with_gates(config, "g1:scale=2:zeros" + "+g2" * (before == "g2"))
    theirs = steps.initialize(dataclasses.replace(plain, train=dataclasses.replace(plain.train, seed=3))).params
    origin = origin_of(plain, params=theirs)
    params = initial.begin(gated.model, steps.initialize(gated).params, origin, tokenizers.Bytes())
    tokens = np.arange(32).reshape(2, 16)
    np.testing.assert_array_equal(logits(gated, params, tokens), logits(plain, theirs, tokens))
    out = capsys.readouterr().out
    assert f"{len(origin.params)} parameters matched, 1 new, 0 left" in out and "new  layers/attention/gates/" in out
    assert "WARNING" not in out


def test_gates_are_known_by_what_they_are_not_by_their_number(config):
    def places(ours, theirs):
        ours, theirs = with_gates(config, ours).model, with_gates(config, theirs).model
        wanted = {path: leaf.shape for path, leaf in abstract_parameters(ours).items()}
        found = match(ours, wanted, Origin("there", theirs, abstract_parameters(theirs)))
        gates = {path: other for path, other in found.matched.items() if "gates/" in path}
        return gates, found.new, found.left

    first, second = "layers/attention/gates/0/kernel", "layers/attention/gates/1/kernel"
    assert places("g1+g2", "g2") == ({second: first}, [first], [])
    assert places("g2", "g1+g2") == ({first: second}, [], [first])
    assert places("g1", "g1:headwise") == ({}, [first], [first])
    assert places("g1:zeros", "g1") == ({first: first}, [], [])  # how it began is over
    assert places("none", "g1") == ({}, [], [first])


@pytest.mark.slow
def test_what_does_not_fit_is_refused(config):
    ours, place = config.model, steps.initialize(config).params
    wider = with_gates(config, "g1", d_model=64)
    with pytest.raises(ConfigError, match="train.init_from=there: .* is .* there, this model's is"):
        initial.begin(ours, place, origin_of(wider), tokenizers.Bytes())
    with pytest.raises(ConfigError, match="none of its 1 parameters"):
        initial.begin(ours, place, Origin("there", ours, {"x": np.zeros(2)}), tokenizers.Bytes())
    with pytest.raises(ConfigError, match="made for another tokenizer"):
        initial.begin(ours, place, origin_of(config, tokenizer=tokenizers.Characters("abc")), tokenizers.Bytes())


def test_gates_that_change_the_model_and_other_settings_are_said(config, capsys):
    origin = origin_of(with_gates(config, "none", norm_eps=1e-5))
    initial.begin(config.model, steps.initialize(config).params, origin, tokenizers.Bytes())
    out = capsys.readouterr().out
    assert "WARNING      the new gates g1 change the model" in out and "model.norm_eps was 1e-05 there and is 1e-06 here" in out


@pytest.mark.slow
def test_a_run_begins_with_another_runs_parameters_and_resumes_as_its_own(text_config, tmp_path, capsys):
    from gatedattn.interop import models

    short = dataclasses.replace(with_gates(text_config, "none"), train=dataclasses.replace(text_config.train, steps=4))
    done = loop.train(short, tmp_path / "first", ONE)
    config = with_gates(text_config, "g1:scale=2:zeros")
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=4, init_from=str(tmp_path / "first")))
    with pytest.raises(ConfigError, match="needs the opened model"):
        loop.train(config, tmp_path / "third", ONE)
    source = models.open_model(config.train.init_from)
    for path, param in flat_parameters(done.params).items():
        np.testing.assert_array_equal(source.params[path], param)
    loop.train(config, tmp_path / "second", ONE, Origin(config.train.init_from, source.config, source.params, source.tokenizer))
    assert f"starting     from {tmp_path}/first" in capsys.readouterr().out
    loop.train(config, tmp_path / "second", ONE)  # goes on by itself
    out = capsys.readouterr().out
    assert "resuming     from step 4" in out and "starting" not in out
