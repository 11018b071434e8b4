"""The configuration: round trips, and refusals that say what to type instead."""

import dataclasses
import json

import pytest

from gatedattn import config as config_lib
from gatedattn.config import (
    CheckpointConfig,
    ConfigError,
    DataConfig,
    EvalConfig,
    MeshConfig,
    MoEConfig,
    OptimizerConfig,
    ProbeConfig,
    RopeConfig,
    RunConfig,
    TrainConfig,
    TransformerConfig,
    from_mapping,
    parse_recipe_args,
    to_config_dict,
    to_mapping,
)

CONFIGS = [
    RunConfig(),
    RunConfig(
        name="other",
        model=TransformerConfig(
            gates="g1:headwise+g2",
            moe=MoEConfig(num_experts=4, top_k=2, shared_dim=32),
            rope=RopeConfig(scaling="yarn", factor=4.0, fraction=0.25),
            sink="learned",
        ),
        data=DataConfig(source="synthetic:backcopy", bos="row"),
        train=TrainConfig(batch_size=12, microbatches=3),
        optimizer=OptimizerConfig(name="muon", schedule="wsd"),
        mesh=MeshConfig(data=-1, fsdp=2),
    ),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.name)
def test_mapping_round_trips(config):
    assert from_mapping(RunConfig, to_mapping(config)) == config
    assert from_mapping(RunConfig, json.loads(json.dumps(to_mapping(config)))) == config
    assert from_mapping(RunConfig, to_config_dict(config).to_dict()) == config


def test_missing_keys_keep_their_defaults():
    assert from_mapping(RunConfig, {}) == RunConfig()
    assert from_mapping(RunConfig, {"model": {"num_layers": 2}}).model == TransformerConfig(num_layers=2)


def test_config_dict_is_locked_and_takes_overrides():
    skin = to_config_dict(RunConfig())
    skin.train.steps = 700
    assert from_mapping(RunConfig, skin.to_dict()).train.steps == 700
    with pytest.raises((AttributeError, KeyError)):
        skin.train.stepz = 700


@pytest.mark.parametrize(
    "mapping,message",
    [
        ({"modle": {}}, "unknown config key 'modle' (did you mean 'model'?)"),
        ({"train": {"batchsize": 4}}, "unknown config key 'train.batchsize' (did you mean 'batch_size'?)"),
        ({"model": {"moe": {"topk": 4}}}, "unknown config key 'model.moe.topk' (did you mean 'top_k'?)"),
        ({"train": {"qqqqq": 1}}, "known here: batch_size"),
        ({"train": 3}, "train=3: must be a group of settings"),
        ({"train": {"steps": "10"}}, "train.steps='10': must be int, not str"),
        ({"train": {"steps": 1.5}}, "train.steps=1.5: must be int, not float"),
        ({"train": {"steps": True}}, "train.steps=True: must be int, not bool"),
        ({"model": {"qk_norm": 1}}, "model.qk_norm=1: must be bool, not int"),
        ({"model": {"gates": None}}, "model.gates=None: must be str, not NoneType"),
        ({"optimizer": {"learning_rate": "fast"}}, "optimizer.learning_rate='fast': must be float, not str"),
        ({"optimizer": {"learning_rate": True}}, "must be float, not bool"),
        ({"model": {"dtype": "float16"}}, "float32, bfloat16, float64"),
    ],
)
def test_bad_mappings_are_refused(mapping, message):
    with pytest.raises(ConfigError) as error:
        from_mapping(RunConfig, mapping)
    assert message in str(error.value)


def test_whole_numbers_cross_between_int_and_float():
    config = from_mapping(RunConfig, {"train": {"steps": 1e3}, "optimizer": {"clip_norm": 1, "warmup_steps": 0}})
    assert config.train.steps == 1000 and isinstance(config.train.steps, int)
    assert isinstance(config.optimizer.clip_norm, float)


@pytest.mark.parametrize(
    "make,message",
    [
        (lambda: RopeConfig(scaling="ntk"), "none, linear, yarn"),
        (lambda: RopeConfig(fraction=0.0), "must be in (0, 1]"),
        (lambda: RopeConfig(fraction=1.5), "must be in (0, 1]"),
        (lambda: RopeConfig(factor=4.0), "set scaling to linear or yarn"),
        (lambda: RopeConfig(theta=-1.0), "RopeConfig.theta=-1.0: must be positive"),
        (lambda: MoEConfig(num_experts=4, top_k=8), "top_k=8 exceeds num_experts=4"),
        (lambda: MoEConfig(num_experts=-1), "must not be negative"),
        (lambda: TransformerConfig(num_layers=0), "TransformerConfig.num_layers=0: must be positive"),
        (lambda: TransformerConfig(num_heads=6, num_kv_heads=4), "num_kv_heads may be 1, 2, 3, 6"),
        (lambda: TransformerConfig(head_dim=33), "must be a whole even number"),
        (lambda: TransformerConfig(head_dim=32, rope=RopeConfig(fraction=0.1)), "rotates 3.2 dimensions"),
        (lambda: TransformerConfig(sink="softmax1"), "none, learned, off_by_one"),
        (lambda: TransformerConfig(kernel="refrence"), "did you mean 'reference'"),
        (lambda: TransformerConfig(gates="g1:headwize"), "did you mean 'headwise'"),
        (lambda: TransformerConfig(gates="g1+sdpa"), "twice"),
        (lambda: TransformerConfig(d_model=64, gates="g1:in_dim=65"), "in_dim=65 exceeds d_model=64"),
        (lambda: TransformerConfig(window=-1), "must not be negative"),
        (lambda: DataConfig(source=""), "data.source is empty"),
        (lambda: DataConfig(bos="never"), "document, row"),
        (lambda: DataConfig(valid_fraction=1.0), "must be in (0, 1)"),
        (lambda: TrainConfig(batch_size=8, microbatches=3), "not a multiple of train.microbatches=3"),
        (lambda: TrainConfig(platform="cuda"), "any, cpu, gpu, tpu"),
        (lambda: TrainConfig(log_every=0), "must be positive"),
        (lambda: OptimizerConfig(name="adam"), "did you mean 'adamw'"),
        (lambda: OptimizerConfig(b2=1.0), "optimizer.b2=1.0: must be in [0, 1)"),
        (lambda: OptimizerConfig(decay_fraction=0.0), "must be in (0, 1]"),
        (lambda: ProbeConfig(rows=0), "must be positive"),
        (lambda: EvalConfig(every=-1), "must not be negative"),
        (lambda: CheckpointConfig(keep=0), "must be positive"),
        (lambda: MeshConfig(tensor=0), "mesh.tensor=0: must be a positive number or -1"),
        (lambda: MeshConfig(data=-1, fsdp=-1), "data, fsdp are all -1"),
        (
            lambda: RunConfig(model=TransformerConfig(position="learned", max_seq_len=64), train=TrainConfig(seq_len=128)),
            "set model.max_seq_len=128",
        ),
    ],
)
def test_out_of_range_is_refused(make, message):
    with pytest.raises(ConfigError) as error:
        make()
    assert message in str(error.value)


def test_positions_without_rope_need_no_even_head():
    assert TransformerConfig(head_dim=33, position="none").head_dim == 33


def test_constant_schedule_needs_no_steps_beyond_warmup():
    RunConfig(train=TrainConfig(steps=10), optimizer=OptimizerConfig(schedule="constant"))


def test_configs_are_frozen_hashable_values():
    assert hash(RunConfig()) == hash(RunConfig())
    with pytest.raises(dataclasses.FrozenInstanceError):
        RunConfig().train.steps = 3


def test_every_field_has_a_coercible_type():
    """from_mapping knows bool, int, float, str and nested dataclasses: a field of another type would be refused at run time."""

    def kinds(cls):
        for f in dataclasses.fields(cls):
            kind = config_lib.typing.get_type_hints(cls)[f.name]
            yield from kinds(kind) if dataclasses.is_dataclass(kind) else [kind]

    assert set(kinds(RunConfig)) <= {bool, int, float, str}


# --- recipe arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arg,expected",
    [
        (None, {}),
        ("", {}),
        ("smoke", {"smoke": True}),
        ("smoke=false", {"smoke": False}),
        ("gate=g1:headwise,layers=48", {"gate": "g1:headwise", "layers": 48}),
        ("gate=g1:scale=2:zeros+g2", {"gate": "g1:scale=2:zeros+g2"}),
        ("variant=k8,smoke,lr=1e-3", {"variant": "k8", "smoke": True, "lr": 1e-3}),
    ],
)
def test_recipe_arguments(arg, expected):
    args = parse_recipe_args(arg, layers=28, lr=0.0)
    assert vars(args) == {"gate": "", "variant": "", "smoke": False, "layers": 28, "lr": 0.0} | expected


@pytest.mark.parametrize(
    "arg,message",
    [
        ("layer=48", "unknown recipe argument 'layer' (did you mean 'layers'?)"),
        ("qqqq", "this recipe takes: gate, layers, smoke, variant"),
        ("layers=many", "must be int"),
        ("layers", "needs a value: layers=28"),
        ("gate", "needs a value: gate=..."),
        ("smoke=maybe", "must be true or false"),
    ],
)
def test_bad_recipe_arguments(arg, message):
    with pytest.raises(ConfigError) as error:
        parse_recipe_args(arg, layers=28)
    assert message in str(error.value)
