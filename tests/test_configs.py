"""Every recipe in configs/ with its arguments: it loads, becomes a RunConfig, and has the paper's sizes."""

import dataclasses
import importlib
import pathlib

import pytest

from gatedattn import variants
from gatedattn.config import ConfigError, RunConfig, from_mapping, to_mapping
from gatedattn.transformer import count

RECIPES = sorted(p.stem for p in (pathlib.Path(__file__).parents[1] / "configs").glob("*.py") if p.stem != "__init__")


def load(recipe: str, arg: str | None = None) -> RunConfig:
    return from_mapping(RunConfig, importlib.import_module(f"configs.{recipe}").get_config(arg).to_dict())


def test_all_recipes_are_found():
    assert {"backcopy", "base", "dense1b7", "extend32k", "moe15b", "tiny"} <= set(RECIPES)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("smoke", ["", ",smoke"])
def test_every_recipe_takes_gate_variant_and_smoke(recipe, smoke):
    plain = load(recipe, smoke.strip(",") or None)
    for gate in ("none", "g1", "g1:headwise", "g1+g2"):
        config = load(recipe, f"gate={gate}{smoke}")
        assert config.model.gates == gate and gate in config.name
        assert to_mapping(config)["data"] == to_mapping(plain)["data"]
    assert load(recipe, f"gate=sdpa{smoke}").model.gates == "g1"
    for name in ("baseline", "sdpa-headwise", "value-shared", "sdpa-norm", "sdpa-input-independent", "T1.15"):
        model = load(recipe, f"variant={name}{smoke}").model
        assert model == variants.apply(plain.model, name)


@pytest.mark.parametrize("recipe", RECIPES)
def test_bad_arguments_say_what_to_type(recipe):
    for arg, message in (
        ("gat=g1", "did you mean 'gate'"),
        ("gate=g1:headwize", "did you mean 'headwise'"),
        ("variant=sdpa-headwize", "did you mean 'sdpa-headwise'"),
        ("variant=sdpa-headwise,gate=g2", "already sets the gates"),
        ("smoke=7", "true or false"),
    ):
        with pytest.raises(ConfigError, match=message):
            load(recipe, arg)


@pytest.mark.parametrize("recipe", RECIPES)
def test_smoke_is_the_same_kind_of_model_in_miniature(recipe):
    full, small = load(recipe), load(recipe, "smoke")
    a, b = full.model, small.model
    assert a.num_heads // a.num_kv_heads == b.num_heads // b.num_kv_heads and a.is_moe == b.is_moe
    same = ("gates", "qk_norm", "position", "dtype", "remat", "tie_embeddings", "sandwich_norm", "rope", "sink")
    assert all(getattr(a, name) == getattr(b, name) for name in same)
    assert small.data.source == full.data.source and small.optimizer.learning_rate == full.optimizer.learning_rate
    assert count(b)["params_total"] < 400_000 and small.train.steps == 20 and small.tokens_per_step <= 1024
    assert all(0 < every < small.train.steps for every in (small.probe.every, small.eval.every, small.checkpoint.every))


@pytest.mark.parametrize("recipe", RECIPES)
def test_docstring_names_a_command_and_the_hardware(recipe):
    text = importlib.import_module(f"configs.{recipe}").__doc__
    assert f"--config=configs/{recipe}.py" in text and (recipe == "base" or "Hardware:" in text)


@pytest.mark.parametrize(
    "recipe,arg,billions",
    [
        ("dense1b7", None, 1.720),
        ("dense1b7", "layers=48", 1.706),
        ("moe15b", None, 15.577),
        ("dense1b7", "variant=T2.2", 1.720),
        ("dense1b7", "gate=g1,narrow", 1.720),
        ("dense1b7", "gate=g1", 1.838),
        ("dense1b7", "variant=T2.9", 1.706),
        ("moe15b", "gate=g1", 15.779),
    ],
)
def test_total_parameters(recipe, arg, billions):
    assert count(load(recipe, arg).model)["params_total"] / 1e9 == pytest.approx(billions, abs=1.2e-3)


def test_tiny_is_tiny():
    assert 1.9e6 < count(load("tiny").model)["params_total"] < 4e6
    for name in ("k8", "q48"):
        variants.apply(load("tiny").model, name)


@pytest.mark.parametrize(
    "arg,layers,batch,lr,steps,gates",
    [
        (None, 28, 1024, 4e-3, 95_367, "none"),
        ("tokens=3.5T", 28, 2048, 4.5e-3, 417_233, "none"),
        ("layers=48", 48, 1024, 4e-3, 95_367, "none"),
        ("layers=48,tokens=1T", 48, 4096, 5.3e-3, 59_605, "none"),
        ("variant=T2.4", 28, 2048, 4.5e-3, 417_233, "g1"),
        ("variant=T2.6", 48, 1024, 8e-3, 95_367, "none"),
        ("variant=dense48-1T-lr8e-3-elementwise", 48, 4096, 8e-3, 59_605, "g1"),
        ("variant=T2.14,layers=48,tokens=1T", 48, 4096, 8e-3, 59_605, "g1"),
        ("variant=sandwich-norm,layers=48", 48, 1024, 4e-3, 95_367, "none"),
        ("variant=sandwich-norm,gate=g1", 28, 1024, 4e-3, 95_367, "g1"),
        ("variant=sdpa-headwise-narrow", 28, 1024, 4e-3, 95_367, "g1:headwise"),
    ],
)
def test_dense_recipe_follows_table_2(arg, layers, batch, lr, steps, gates):
    config = load("dense1b7", arg)
    assert (config.model.num_layers, config.train.batch_size, config.train.steps) == (layers, batch, steps)
    assert (config.optimizer.learning_rate, config.model.gates, config.train.seq_len) == (lr, gates, 4096)


@pytest.mark.parametrize(
    "arg,message",
    [
        ("layers=32", "must be 28 or 48"),
        ("tokens=1T", "28 layers the paper has 3.5T and 400B"),
        ("layers=48,tokens=2T", "1T and 400B"),
        ("variant=T2.8,layers=28", "has layers=48"),
        ("variant=T2.8,tokens=1T", "has tokens=400B"),
        ("variant=experts+4", "this model is dense"),
    ],
)
def test_dense_recipe_refuses_what_the_paper_has_not(arg, message):
    with pytest.raises(ConfigError, match=message):
        load("dense1b7", arg)


@pytest.mark.parametrize(
    "arg,layers,batch,steps,before",
    [
        (None, 28, 128, 19_073, "runs/dense1b7"),
        ("variant=T2.4", 28, 256, 9_537, "runs/dense1b7-T2.4"),
        ("layers=48,tokens=1T,gate=g1,narrow", 48, 512, 4_768, "runs/dense1b7-g1"),
        ("smoke", 2, 8, 20, ""),
    ],
)
def test_extension_goes_on_with_a_dense_model(arg, layers, batch, steps, before):
    """80 B tokens at 32k, RoPE base 1M; a step has as many tokens as it had before, the model is otherwise the same."""
    config, origin = load("extend32k", arg), load("dense1b7", arg)
    assert (config.model.num_layers, config.train.batch_size, config.train.steps) == (layers, batch, steps)
    assert config.train.init_from == before and (arg == "smoke" or f"runs/{origin.name}" == before)
    assert config.tokens_per_step == origin.tokens_per_step and config.model.rope.theta == 1e6
    same = dataclasses.replace(config.model, rope=origin.model.rope, max_seq_len=origin.model.max_seq_len)
    assert same == origin.model


def test_moe_recipe_states_the_papers_schedule():
    config = load("moe15b")
    assert (config.train.steps, config.train.batch_size, config.train.seq_len) == (100_000, 1024, 4096)
    o = config.optimizer
    assert (o.learning_rate, o.end_learning_rate, o.warmup_steps, o.schedule) == (2e-3, 3e-5, 1000, "cosine")
    assert config.model.dtype == "bfloat16" and config.model.remat == "full" and config.model.rope.theta == 10_000
    with pytest.raises(ConfigError, match="mixture of experts"):
        load("moe15b", "variant=sdpa-elementwise-narrow")
