"""Models in Hugging Face folders (config.json, safetensors, tokenizer): `load`, `save`, `tokenizer`.

    model = load(folder);   logits, aux = model(tokens)

Reads Llama (SmolLM2), Mistral, Qwen2, Qwen3, Qwen3-MoE, Qwen3-Next with full attention in all layers, and the code of the
paper's authors (Qwen3 with gates). Needs neither torch nor transformers; runs no code from the folder, unpickles nothing,
follows no path out of it. See `hf_config` and `hf_export` for what a config may ask, `mapping` for the layouts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from gatedattn.config import TransformerConfig
from gatedattn.data import tokenizers
from gatedattn.data.cache import write_atomically
from gatedattn.interop import tensors as tensors_lib
from gatedattn.interop.build import build, flat_parameters
from gatedattn.interop.hf_config import config_from_hf, packing_of
from gatedattn.interop.hf_export import config_to_hf
from gatedattn.interop.mapping import Assembled, Layout
from gatedattn.transformer import Transformer

CONFIG, GENERATION = "config.json", "generation_config.json"
# Not part of the model: rotary tables, and Qwen3-Next's multi-token-prediction layer (transformers skips it too).
IGNORED = re.compile(r"rotary_emb\.inv_freq$|^mtp\.")


def load(folder: str | Path, *, mesh: Mesh | None = None, dtype: str = "float32", param_dtype=jnp.float32) -> Transformer:
    """The model in a Hugging Face folder.

    Args:
        mesh: place parameters by the path rules of `gatedattn.sharding`, each device reading its own shard.
        dtype: of activations and matmuls ("float32", "bfloat16"); param_dtype: of the parameters.

    Raises:
        ConfigError: the config asks for what this model cannot do, or tensors are missing, left over or of the wrong shape.
    """
    config, params = open_folder(folder, dtype)
    return build(config, params, mesh=mesh, param_dtype=param_dtype)


def open_folder(folder: str | Path, dtype: str = "float32") -> tuple[TransformerConfig, dict[str, Assembled]]:
    """The config of a Hugging Face folder, and our parameters by path, not yet read. Raises as `load` does."""
    folder = Path(folder)
    hf = tensors_lib.read_json(folder / CONFIG)
    config = config_from_hf(hf, dtype)
    layout = Layout(config, packing_of(hf))
    tensors = tensors_lib.Folder(folder)

    def ignored(key: str) -> bool:
        return bool(IGNORED.search(key)) or config.tie_embeddings and key == "lm_head.weight"  # a copy of the embedding

    layout.check(tensors.shapes, str(folder), ignored)
    return config, layout.parameters(tensors)


def save(
    model: Transformer | Mapping,
    config: TransformerConfig,
    folder: str | Path,
    tokenizer: tokenizers.Tokenizer | None = None,
    layout: str = "stock",
    *,
    shard_bytes: int = tensors_lib.SHARD_BYTES,
) -> None:
    """Write a folder that transformers 4 and 5 open, and `load` reads back.

    Without gates it becomes a Qwen3, Qwen3-MoE, Llama, Mistral or Qwen2 folder; with the elementwise gate g1 a Qwen3-Next one
    of full-attention layers, or with layout="authors" one for the paper's code, headwise gates too. Parameters come back bit
    for bit, except that zero-centred norms (Qwen3-Next) and plain ones differ by 1: a model of the other kind comes back with
    its norm weights shifted, the same factors to within 2^-24 (exactly, for plain weights from 0.5 to 2).

    Args:
        model: or its parameters by path, see `gatedattn.interop.build.flat_parameters`. Their dtype is kept.

    Raises:
        ConfigError: no class computes this model; the message says which settings stand in the way.
    """
    hf = config_to_hf(config, layout)
    params = flat_parameters(model) if isinstance(model, Transformer) else model
    shift = float(config.norm_zero_centered) - float(hf["model_type"] == "qwen3_next")
    dtype = str(np.dtype(params["embedding/table"].dtype))
    hf |= {"dtype": dtype, "torch_dtype": dtype}
    if tokenizer is not None:
        hf |= {"bos_token_id": tokenizer.bos_id} | ({"eos_token_id": [*tokenizer.eos_ids]} if tokenizer.eos_ids else {})
    folder = Path(folder)
    tensors_lib.write(folder, Layout(config, packing_of(hf)).tensors(params, shift), shard_bytes)
    write_atomically(folder / CONFIG, (json.dumps(hf, indent=2) + "\n").encode())
    if tokenizer is not None:
        save_tokenizer(tokenizer, folder)


def tokenizer(folder: str | Path) -> tokenizers.Tokenizer | None:
    """The tokenizer.json or tokenizer.model of a folder, None if it has neither; BOS and EOS are what config.json and
    generation_config.json say, if they do."""
    folder = Path(folder)
    found = tokenizers.load(folder)
    if found is not None:
        for about in filter(Path.is_file, (folder / GENERATION, folder / CONFIG)):
            about = tensors_lib.read_json(about)
            found.set_special(about.get("bos_token_id"), about.get("eos_token_id"))
    return found


def save_tokenizer(tokenizer: tokenizers.Tokenizer, folder: Path) -> None:
    """The tokenizer's own file; for a tokenizer.json also what lets `AutoTokenizer` open it. Without an EOS, BOS, which begins the
    next document, ends this one."""
    tokenizer.save(folder)
    if isinstance(tokenizer, tokenizers.Json):
        bos, eos = (tokenizer.backend.id_to_token(i) for i in (tokenizer.bos_id, (*tokenizer.eos_ids, tokenizer.bos_id)[0]))
        about = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": eos}
        about["clean_up_tokenization_spaces"] = False
        write_atomically(folder / "tokenizer_config.json", (json.dumps(about, indent=2) + "\n").encode())
