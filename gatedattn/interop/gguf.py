"""Llama-family models from GGUF files: `load`, `tokenizer`.

    model = load("SmolLM2-135M-Instruct.Q4_1.gguf");   logits, aux = model(tokens)

GGUF differs from Hugging Face's layout in three ways: names; shapes are listed innermost dimension first; and the rows of
Llama's q and k projections are permuted so that RoPE turns neighbouring pairs (2i, 2i+1) instead of the halves (i, i + H/2) as
here. Left permuted, a model still runs, just 1.5 to 2 nats worse. Weights are dequantised, one tensor at a time, by the `gguf`
package. The header is parsed here, every count and offset checked against the file before anything is allocated.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import tokenizers as hf_tokenizers
from jax.sharding import Mesh
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from gatedattn.config import ConfigError, TransformerConfig
from gatedattn.data import tokenizers
from gatedattn.interop.build import build
from gatedattn.interop.hf_config import config_from_hf
from gatedattn.interop.mapping import LAYER, Assembled, Layout
from gatedattn.transformer import Transformer

MAGIC = b"GGUF"
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))  # GGUF's value kinds -> struct codes
STRING, ARRAY = 8, 9
PRE_TOKENIZERS = {
    "smollm": lambda: [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "gpt-2": lambda: [pre_tokenizers.ByteLevel(add_prefix_space=False)],
}


class Entry(NamedTuple):
    shape: tuple[int, ...]  # outermost first, as numpy has it
    kind: Any  # gguf.GGMLQuantizationType
    begin: int
    end: int


class File(Mapping):
    """The tensors of a GGUF file, dequantised to float32, and its `metadata`. Raises `ConfigError` for a damaged file."""

    def __init__(self, path: str | Path):
        try:
            import gguf
        except ImportError:
            raise ConfigError("reading GGUF files takes the gguf package: pip install gguf") from None
        self.path, self._quants = Path(path), gguf.quants
        try:
            self.bytes = np.asarray(np.memmap(path, np.uint8, "r"))  # slices of a memmap object itself are slow
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: cannot be read ({error})") from None
        self._view, self._at = memoryview(self.bytes), 0
        if bytes(self._take(4)) != MAGIC:
            raise ConfigError(f"{path}: not a GGUF file")
        version = self._number("I")
        if version not in (2, 3):
            raise ConfigError(f"{path}: GGUF version {version} cannot be read; known: 2, 3 (little-endian)")
        tensors, pairs = self._count(24), self._count(12)
        self.metadata = {self._string(): self._value(self._number("I")) for _ in range(pairs)}
        headers = [self._tensor_header() for _ in range(tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1:
            self._refuse(f"general.alignment={alignment!r}")
        start = -(-self._at // alignment) * alignment
        self.entries: dict[str, Entry] = {}
        for name, shape, code, offset in headers:
            try:
                kind = gguf.GGMLQuantizationType(code)
                per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
            except (ValueError, KeyError):
                self._refuse(f"tensor {name!r} has the unknown type {code}")
            elements = int(np.prod([int(n) for n in shape], dtype=object))
            size = elements // per_block * block_bytes
            if shape[-1] % per_block or start + offset + size > len(self.bytes) or name in self.entries:
                self._refuse(f"tensor {name!r} {kind.name} {shape} at {offset} does not fit into its {len(self.bytes)} bytes")
            self.entries[name] = Entry(shape, kind, start + offset, start + offset + size)

    def _refuse(self, why: str):
        raise ConfigError(f"{self.path}: {why}")

    def _take(self, size: int) -> memoryview:
        if size > len(self.bytes) - self._at:
            self._refuse(f"its header asks for {size} bytes at {self._at} of {len(self.bytes)}: cut short or damaged")
        self._at += size
        return self._view[self._at - size : self._at]

    def _number(self, code: str):
        return struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))[0]

    def _count(self, smallest: int) -> int:
        """A number of things of at least `smallest` bytes each, which the rest of the file must be able to hold."""
        count = self._number("Q")
        if count * smallest > len(self.bytes) - self._at:
            self._refuse(f"its header promises {count} entries, more than the file can hold")
        return count

    def _string(self) -> str:
        return bytes(self._take(self._number("Q"))).decode(errors="replace")

    def _value(self, kind: int):
        if kind in SCALARS:
            return self._number(SCALARS[kind])
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            self._refuse(f"its metadata has the unknown kind {kind}")
        kind = self._number("I")
        if kind in SCALARS:
            code = "<" + SCALARS[kind]
            return np.frombuffer(self._take(self._count(struct.calcsize(code)) * struct.calcsize(code)), code).tolist()
        if kind != STRING:
            self._refuse("its metadata has an array of arrays")
        return [self._string() for _ in range(self._count(8))]

    def _tensor_header(self) -> tuple[str, tuple[int, ...], int, int]:
        name, dims = self._string(), self._number("I")
        if not 1 <= dims <= 4:
            self._refuse(f"tensor {name!r} has {dims} dimensions")
        shape = tuple(self._number("Q") for _ in range(dims))
        if 0 in shape:
            self._refuse(f"tensor {name!r} is empty: {shape}")
        return name, shape[::-1], self._number("I"), self._number("Q")

    def __getitem__(self, name: str) -> np.ndarray:
        shape, kind, begin, end = self.entries[name]
        try:
            return self._quants.dequantize(self.bytes[begin:end].reshape(*shape[:-1], -1), kind).reshape(shape)
        except NotImplementedError:
            self._refuse(f"tensor {name!r} is quantised as {kind.name}, which the gguf package cannot undo")

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


class _Renamed(Mapping):
    """A file's tensors under Hugging Face's names, q and k un-permuted. Keeps the last one, to be read in slices."""

    dtype = np.dtype(np.float32)

    def __init__(self, file: File, config: TransformerConfig):
        self.file, self.last = file, (None, None)
        self.theirs = dict(NAMES)
        self.heads = {}
        for layer in range(config.num_layers):
            for ours, theirs in LAYER_NAMES.items():
                self.theirs[LAYER.format(l=layer) + ours + ".weight"] = f"blk.{layer}.{theirs}.weight"
            for name, heads in (("q", config.num_heads), ("k", config.num_kv_heads)):
                self.heads[f"{LAYER.format(l=layer)}self_attn.{name}_proj.weight"] = heads
        self.theirs = {ours: theirs for ours, theirs in self.theirs.items() if theirs in file}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        known = {ours: self.file.entries[theirs].shape for ours, theirs in self.theirs.items()}
        strange = self.file.keys() - set(self.theirs.values())
        return known | {name: self.file.entries[name].shape for name in sorted(strange)}

    def __getitem__(self, name: str) -> np.ndarray:
        if self.last[0] != name:
            array = self.file[self.theirs[name]]
            self.last = name, unpermute(array, self.heads[name]) if name in self.heads else array
        return self.last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self.theirs)

    def __len__(self) -> int:
        return len(self.theirs)


def unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows [heads * H, D] ordered by pairs (i, half) as they are ordered by halves: (half, i)."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def config_from_metadata(file: File, dtype: str = "float32") -> TransformerConfig:
    """The model that a file's metadata describes. Raises `ConfigError` unless it is a llama, and as `config_from_hf` does."""
    kind = file.metadata.get("general.architecture")
    if kind != "llama":
        raise ConfigError(f"{file.path}: architecture {kind!r} cannot be read; known: llama")

    def get(key: str, default=None):
        return file.metadata.get(f"llama.{key}", default)

    if get("expert_count"):
        raise ConfigError(f"{file.path}: a llama with {get('expert_count')} experts cannot be read, only dense ones")
    width, heads = get("embedding_length"), get("attention.head_count")
    head_dim = get("attention.key_length", width // heads if type(width) is type(heads) is int and heads > 0 else None)
    if type(head_dim) is not int or head_dim < 1:
        raise ConfigError(f"{file.path}: llama.embedding_length={width!r} and attention.head_count={heads!r} must be numbers")
    table = file.entries.get("token_embd.weight")
    rope = {"rope_type": get("rope.scaling.type", "none"), "factor": get("rope.scaling.factor")}
    rope["original_max_position_embeddings"] = get("rope.scaling.original_context_length", get("context_length"))
    hf = {
        "model_type": "llama",
        "vocab_size": get("vocab_size", table.shape[0] if table else None),
        "hidden_size": width,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "rope_theta": get("rope.freq_base"),
        "partial_rotary_factor": get("rope.dimension_count", head_dim) / head_dim,
        "rope_scaling": rope if rope["rope_type"] != "none" else None,
        "tie_word_embeddings": "output.weight" not in file,
    }
    return config_from_hf(hf, dtype)


def open_file(path: str | Path, dtype: str = "float32") -> tuple[TransformerConfig, dict[str, Assembled], File]:
    """A GGUF file's config, our parameters by path, not yet read, and the file. Raises `ConfigError` if they do not fit."""
    file = File(path)
    config = config_from_metadata(file, dtype)
    layout, tensors = Layout(config), _Renamed(file, config)
    layout.check(tensors.shapes, str(path))
    return config, layout.parameters(tensors), file


def load(path: str | Path, *, mesh: Mesh | None = None, dtype: str = "float32", param_dtype=jnp.float32) -> Transformer:
    """The model in a GGUF file; arguments and errors as `gatedattn.interop.huggingface.load`."""
    config, params, _ = open_file(path, dtype)
    return build(config, params, mesh=mesh, param_dtype=param_dtype)


def tokenizer(file: File | str | Path) -> tokenizers.Json:
    """The byte-level BPE in a file's metadata. Raises `ConfigError` for other kinds of tokenizer."""
    file = file if isinstance(file, File) else File(file)

    def get(key: str):
        return file.metadata.get(f"tokenizer.ggml.{key}")

    kind, pre, tokens, merges = get("model"), get("pre") or "gpt-2", get("tokens"), get("merges")
    if kind != "gpt2" or pre not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise ConfigError(f"{file.path}: tokenizer {kind!r} with pre-tokenizer {pre!r} cannot be read; known: gpt2, {known}")
    if not isinstance(tokens, list) or not isinstance(merges, list) or any(str(m).count(" ") != 1 for m in merges):
        raise ConfigError(f"{file.path}: its tokenizer's tokens and merges are not lists, the latter of pairs")
    types = get("token_type") or []
    special = [token for token, kind in zip(tokens, types, strict=False) if kind == 3]  # control tokens, never part of a text
    try:
        vocabulary = {token: i for i, token in enumerate(tokens)}
        backend = hf_tokenizers.Tokenizer(models.BPE(vocabulary, [tuple(m.split(" ")) for m in merges]))
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(f"{file.path}: its merges do not fit its tokens ({error})") from None
    backend.pre_tokenizer = pre_tokenizers.Sequence(PRE_TOKENIZERS[pre]())
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    found = tokenizers.Json(json.dumps(json.loads(backend.to_str())).encode(), str(file.path))
    found.set_special(get("bos_token_id"), get("eos_token_id"))
    return found
