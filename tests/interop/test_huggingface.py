"""Folders out and in again, bit for bit; what is refused. Parity with transformers: test_huggingface_parity.py."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from gatedattn import TransformerConfig
from gatedattn.__main__ import main
from gatedattn.config import ConfigError, MoEConfig, RopeConfig, to_mapping
from gatedattn.data import tokenizers
from gatedattn.interop import huggingface, models, tensors
from gatedattn.interop.build import build, flat_parameters
from gatedattn.interop.hf_config import config_from_hf
from gatedattn.interop.hf_export import config_to_hf
from gatedattn.transformer import abstract_parameters

BASE = TransformerConfig(
    vocab_size=40,
    d_model=16,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_dim=24,
    gates="none",
    tie_embeddings=False,
)
MOE = MoEConfig(num_experts=4, top_k=2, expert_dim=12)
NEXT_MOE = dataclasses.replace(MOE, shared_dim=10, shared_gate=True)
CASES = {
    "qwen3": ({}, "stock"),
    "qwen3-tied-mqa": ({"tie_embeddings": True, "num_kv_heads": 1}, "stock"),
    "qwen3-yarn-window": (
        {"rope": RopeConfig(1e6, 1.0, "yarn", factor=4.0, original_max_len=1024, attention_factor=1.2), "window": 64}, "stock"
    ),
    "qwen3_moe": ({"moe": MOE}, "stock"),
    "llama": ({"qk_norm": False, "attention_bias": True, "output_bias": True}, "stock"),
    "mistral": ({"qk_norm": False, "window": 64}, "stock"),
    "qwen2": ({"qk_norm": False, "attention_bias": True}, "stock"),
    "qwen3_next": ({"gates": "g1", "norm_zero_centered": True, "rope": RopeConfig(fraction=0.25)}, "stock"),
    "qwen3_next-moe-bias": (
        {"gates": "g1:bias", "norm_zero_centered": True, "moe": NEXT_MOE, "attention_bias": True, "output_bias": True}, "stock"
    ),
    "authors-headwise": ({"gates": "g1:headwise", "num_kv_heads": 1}, "authors"),
    "authors-bias": ({"gates": "g1:bias", "attention_bias": True, "output_bias": True, "qk_norm": False}, "authors"),
    "authors-baseline": ({}, "authors"),
}  # fmt: skip


def random_parameters(config, seed=0):
    rng = np.random.default_rng(seed)
    return {path: rng.normal(size=leaf.shape).astype(np.float32) for path, leaf in abstract_parameters(config).items()}


def equal(ours, theirs):
    return ours.keys() == theirs.keys() and all(np.array_equal(np.asarray(ours[p]), np.asarray(theirs[p])) for p in ours)


@pytest.fixture
def folder(tmp_path):
    """A small Qwen3 folder."""
    huggingface.save(random_parameters(BASE), BASE, tmp_path / "hf")
    return tmp_path / "hf"


def edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("name", CASES)
def test_round_trip_is_exact(name, tmp_path):
    changes, layout = CASES[name]
    config = dataclasses.replace(BASE, **changes)
    params = random_parameters(config)
    huggingface.save(params, config, tmp_path, layout=layout, shard_bytes=20_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    model = huggingface.load(tmp_path)
    assert equal(params, flat_parameters(model))
    kept = {"max_seq_len": model.config.max_seq_len, "moe": dataclasses.replace(config.moe, z_loss=model.config.moe.z_loss)}
    assert model.config == dataclasses.replace(config, **kept)


@pytest.mark.parametrize("gates", ["none", "g1"])
def test_norms_shift_between_plain_and_zero_centered(gates, tmp_path):
    """Qwen3-Next stores w - 1: exact for w in [0.5, 2], else to half a unit in the last place of 1."""
    config = dataclasses.replace(BASE, gates=gates, norm_zero_centered=gates == "none")
    params = random_parameters(config)
    huggingface.save(params, config, tmp_path)
    model = huggingface.load(tmp_path)
    assert model.config.norm_zero_centered == (gates == "g1")
    back = flat_parameters(model)
    for path, ours in params.items():
        if "norm" not in path:
            assert np.array_equal(ours, back[path])
            continue
        factor, again = ours + config.norm_zero_centered, np.asarray(back[path]) + model.config.norm_zero_centered
        np.testing.assert_allclose(again, factor, atol=2**-24, rtol=2**-23)
        exact = (ours >= 0.5) & (ours <= 2) if gates == "g1" else np.ones_like(ours, bool)
        assert exact.any() and np.array_equal(again[exact], factor[exact])


@pytest.mark.parametrize("name", ["authors-headwise", "qwen3_next-moe-bias"])
def test_load_onto_a_mesh_reads_shards(name, tmp_path, monkeypatch):
    changes, layout = CASES[name]
    config = dataclasses.replace(BASE, **changes)
    params = random_parameters(config)
    huggingface.save(params, config, tmp_path, layout=layout)
    mesh = jax.make_mesh((2, 2, 2), ("fsdp", "tensor", "expert"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    largest = []
    original = huggingface.Assembled.__getitem__

    def spy(self, index):
        result = original(self, index)
        largest.append((self.path, result.size / np.prod(self.shape)))
        return result

    monkeypatch.setattr(huggingface.Assembled, "__getitem__", spy)
    model = huggingface.load(tmp_path, mesh=mesh)
    assert equal(params, flat_parameters(model))
    assert model.layers.attention.query.kernel[...].sharding.spec == jax.P(None, "fsdp", "tensor", None)
    assert max(size for path, size in largest if path == "layers/attention/query/kernel") == 1 / 4
    if config.is_moe:
        assert max(size for path, size in largest if path == "layers/moe/gate/kernel") == 1 / 8

    huggingface.save(model, config, tmp_path / "again", layout=layout)
    assert equal(tensors.Folder(tmp_path), tensors.Folder(tmp_path / "again"))


def test_the_safetensors_package_reads_and_writes_the_same(tmp_path):
    package = pytest.importorskip("safetensors.numpy")
    arrays = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.array(3, np.int64),
        "empty": np.zeros((0, 4), np.float16),
    }
    entries = [tensors.Tensor(n, a.shape, a.dtype, lambda a=a: a) for n, a in arrays.items()]
    half = np.array([1.5, -2], ml_dtypes.bfloat16)
    tensors.write(tmp_path, [*entries, tensors.Tensor("half", half.shape, half.dtype, lambda: half)])
    theirs = package.load_file(tmp_path / "model.safetensors")
    assert equal(arrays, {n: theirs[n] for n in arrays})
    assert np.array_equal(tensors.Folder(tmp_path)["half"], half)
    package.save_file(arrays, tmp_path / "model.safetensors")
    assert equal(arrays, dict(tensors.Folder(tmp_path)))


def test_both_spellings_of_rope():
    old = config_to_hf(dataclasses.replace(BASE, rope=RopeConfig(theta=1e6, scaling="yarn", factor=4.0, original_max_len=1024)))
    assert old["max_position_embeddings"] == 4096  # transformers 4.51 divides it by the original length
    new = {k: v for k, v in old.items() if k not in ("rope_theta", "rope_scaling")}
    del old["rope_parameters"]
    assert config_from_hf(old) == config_from_hf(new)
    assert config_from_hf(new).rope == RopeConfig(theta=1e6, scaling="yarn", factor=4.0, original_max_len=1024)
    new["rope_parameters"] |= {"factor": None, "mscale": 1.0, "mscale_all_dim": 0.5}
    rope = config_from_hf(new).rope
    assert rope.factor == 4.0
    assert rope.attention_factor == pytest.approx((0.1 * np.log(4) + 1) / (0.05 * np.log(4) + 1))


SMALL = {"vocab_size": 10, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("hf", "expected"),
    [
        ({"model_type": "llama"}, {"num_kv_heads": 4, "head_dim": 8, "tie_embeddings": False, "qk_norm": False, "window": 0}),
        (
            {"model_type": "llama", "tie_word_embeddings": True, "rope_theta": 1e5},
            {"tie_embeddings": True, "rope": RopeConfig(1e5)},
        ),
        ({"model_type": "mistral", "num_key_value_heads": 2}, {"window": 4096}),
        ({"model_type": "mistral", "num_key_value_heads": None, "sliding_window": None}, {"window": 0, "num_kv_heads": 4}),
        ({"model_type": "qwen3", "num_key_value_heads": 1}, {"head_dim": 128, "window": 0, "qk_norm": True}),
        (
            {
                "model_type": "qwen3",
                "num_key_value_heads": 1,
                "use_sliding_window": True,
                "max_window_layers": 0,
                "sliding_window": 9,
            },
            {"window": 9},
        ),
        (
            {"model_type": "qwen3_moe", "num_key_value_heads": 1},
            {"head_dim": 8, "moe": MoEConfig(128, 8, 768, renormalize=False)},
        ),
        (
            {"model_type": "qwen3_next", "full_attention_interval": 1, "num_experts": 0},
            {"head_dim": 256, "gates": "g1", "rope": RopeConfig(fraction=0.25), "norm_zero_centered": True},
        ),
        (
            {
                "model_type": "qwen3",
                "num_key_value_heads": 2,
                "headwise_attn_output_gate": True,
                "qkv_bias": True,
                "use_qk_norm": False,
            },
            {"gates": "g1:headwise:bias", "attention_bias": True, "output_bias": True, "qk_norm": False},
        ),
    ],
)
def test_defaults_of_each_family(hf, expected):
    config = config_from_hf(SMALL | hf)
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gpt2"}, "model_type='gpt2' cannot be read; known: llama"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "32"}, "hidden_size='32' must be a whole number"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers=1000000000000 must be a whole number from 1 to 10000"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "'llama3'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "'dynamic'"),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [1, 2]}}, "mrope_section"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": "x"}}, "rope.factor='x'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "differ between layers"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2, "truncate": False}}, "truncate"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"layer_types": ["full_attention", "sliding_attention"] * 2}, "full_attention and sliding_attention"),
        (
            {"model_type": "qwen3", "num_key_value_heads": 2, "use_sliding_window": True, "max_window_layers": 2},
            "sliding_attention",
        ),
        ({"model_type": "qwen3_next"}, "linear_attention"),
        ({"model_type": "qwen3_next", "full_attention_interval": 1, "shared_expert_intermediate_size": 0}, "shared_expert"),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 2}, "2 of 4 layers are mixtures"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0]}, "3 of 4 layers are mixtures"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": 5}, "wrong kind"),
        ({"headwise_attn_output_gate": True}, "headwise_attn_output_gate with model_type='llama'"),
    ],
)
def test_import_refuses_what_it_cannot_compute(changes, words):
    with pytest.raises(ConfigError, match="config.json") as error:
        config_from_hf(SMALL | {"model_type": "llama"} | changes)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("changes", "layout", "words"),
    [
        ({"sink": "learned", "sandwich_norm": True}, "stock", "sink=learned; sandwich_norm=True"),
        ({"gates": "g1:headwise"}, "stock", "layout=authors does"),
        ({"gates": "g2"}, "stock", "gates=g2"),
        ({"gates": "g1+g2"}, "authors", "gates=g1+g2"),
        ({"gates": "g1:scale=2:zeros"}, "authors", "gates=g1:scale=2"),
        ({"gates": "g1", "moe": MOE}, "stock", "gated shared expert"),
        ({"gates": "g1", "moe": MOE}, "authors", "dense"),
        ({"gates": "g1", "attention_bias": True}, "stock", "biases"),
        ({"gates": "g1", "window": 4}, "stock", "window=4"),
        ({"gates": "g1", "qk_norm": False}, "stock", "without qk_norm"),
        ({"rope": RopeConfig(fraction=0.5)}, "stock", "rope.fraction"),
        ({"position": "none"}, "stock", "position=none"),
        ({"output_bias": True}, "stock", "differ"),
        ({}, "other", "must be stock or authors"),
    ],
)
def test_export_refuses_what_no_class_computes(changes, layout, words):
    with pytest.raises(ConfigError) as error:
        config_to_hf(dataclasses.replace(BASE, **changes), layout)
    assert words in str(error.value)


def test_tensors_that_do_not_fit_are_all_named(folder):
    found = dict(tensors.Folder(folder))
    del found["model.norm.weight"]
    found["model.extra"] = np.zeros(2, np.float32)
    found["model.layers.1.self_attn.q_proj.weight"] = np.zeros((64, 16), np.float32)  # twice the rows: a gate nobody announced
    found["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)  # saved by old versions, harmless
    tensors.write(folder, [tensors.Tensor(n, a.shape, a.dtype, lambda a=a: np.array(a)) for n, a in found.items()])
    with pytest.raises(ConfigError) as error:
        huggingface.load(folder)
    text = str(error.value)
    assert "model.norm.weight is missing" in text and "model.extra is left over" in text and "inv_freq" not in text
    assert "q_proj.weight is (64, 16), must be (32, 16)" in text
    edit_config(folder, num_hidden_layers=9)
    with pytest.raises(ConfigError, match="and 5[0-9] more"):
        huggingface.load(folder)


@pytest.mark.parametrize("shard", ["../model.safetensors", "/etc/passwd", "sub/model.safetensors", "model.bin", 7, ".."])
def test_index_cannot_point_outside_the_folder(shard, folder):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": shard}}))
    with pytest.raises(ConfigError, match="must be a .safetensors file of this folder"):
        huggingface.load(folder)


def test_pickles_are_not_opened(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="pytorch_model.bin is a pickle, which can run code"):
        huggingface.load(folder)


def header(entries, data=b"\0" * 16, length=None):
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 7,
        header({}, length=2**63),
        header(b"{" * 100_000),
        header(b"[1]"),
        header({"a": 3}),
        header({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 17]}}),
        header({"a": {"dtype": "F32", "shape": [5], "data_offsets": [0, 20]}}),
        header({"a": {"dtype": "F32", "shape": [-1, -4], "data_offsets": [0, 16]}}),
        header({"a": {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 16]}}),
        header({"a": {"dtype": "F32", "shape": [4.0], "data_offsets": [0, 16]}}),
        header({"a": {"dtype": "F8", "shape": [4], "data_offsets": [0, 16]}}),
    ],
)
def test_hostile_headers_are_refused(content, folder):
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match="model.safetensors"):
        huggingface.load(folder)


def test_convert_there_and_back(tmp_path, capsys):
    """HF -> ours -> HF: the same bytes of weights, the tokenizer kept; and what a person gets wrong."""
    bpe = tokenizers.train_bpe(["the state of the union " * 50], 300)
    bpe.set_special(None, 5)
    config = dataclasses.replace(BASE, vocab_size=bpe.vocab_size)
    huggingface.save(random_parameters(config), config, tmp_path / "a", bpe)
    assert main(["convert", "from-hf", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert "with tokenizer" in capsys.readouterr().out
    assert json.loads((tmp_path / "b/config.json").read_text())["model"] == to_mapping(config_from_hf(config_to_hf(config)))
    assert main(["convert", "to-hf", str(tmp_path / "b"), str(tmp_path / "c")]) == 0
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "c" / name).read_bytes()
    model, tokenizer = models.load_model(tmp_path / "b")
    assert tokenizer.decode(tokenizer.encode("the union")) == "the union"
    assert tokenizer.bos_id == 0 and tokenizer.eos_ids == (5,)
    logits, _ = model(jnp.zeros((1, 4), int))
    assert logits.shape == (1, 4, config.vocab_size)

    capsys.readouterr()
    for args, words in [
        (["from-hf", "a", "b"], "exists and is not empty"),
        (["from-hf", "nowhere", "d"], "does not exist: MODEL must be a run"),
        (["from-gguf", "a", "d"], "from-gguf takes a .gguf file"),
        (["from-hf", "a/config.json", "d"], "from-hf takes a folder"),
        (["to-hf", "a/config.json", "d"], "not a GGUF file"),
    ]:
        assert main(["convert", args[0], *(str(tmp_path / name) for name in args[1:])]) == 2
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1
    assert not (tmp_path / "d").exists()


@pytest.mark.slow
def test_a_run_and_its_checkpoints_are_models(tmp_path):
    from gatedattn.config import RunConfig
    from gatedattn.training.checkpoint import Checkpoints
    from gatedattn.training.step import TrainState

    config = RunConfig(model=dataclasses.replace(BASE, gates="g1:headwise"))
    (tmp_path / "config.json").write_text(json.dumps(to_mapping(config)))
    with pytest.raises(ConfigError, match="no finished model"):
        models.load_model(tmp_path)
    saved = {}
    with Checkpoints(tmp_path) as checkpoints:
        for step in (1, 2):
            model = build(config.model, random_parameters(config.model, step))
            saved[step] = flat_parameters(model)
            checkpoints.save(TrainState(nnx.as_pure(nnx.state(model, nnx.Param)), {"m": jnp.zeros(2)}, jnp.int32(step)), config)
    tokenizers.Bytes().save(tmp_path)
    model, tokenizer = models.load_model(tmp_path)
    assert equal(saved[2], flat_parameters(model)) and tokenizer.vocab_size == 257
    assert equal(saved[1], flat_parameters(models.load_model(tmp_path / "checkpoints/1")[0]))
    models.convert("to-hf", tmp_path, tmp_path / "hf", "authors")
    assert equal(saved[2], flat_parameters(huggingface.load(tmp_path / "hf")))
