"""Any MODEL by its path: a run, one of its checkpoints, a converted folder, a Hugging Face folder, a GGUF file.

A converted folder is our own: config.json ({"format": "gatedattn", "model": `TransformerConfig`, "bos_id": ..., "eos_ids":
[...]}), the parameters under their own paths in model.safetensors, and the tokenizer's file.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from gatedattn.config import ConfigError, TransformerConfig, from_mapping, to_mapping
from gatedattn.data import tokenizers
from gatedattn.data.cache import write_atomically
from gatedattn.interop import gguf, huggingface
from gatedattn.interop import tensors as tensors_lib
from gatedattn.interop.build import build, flat_parameters
from gatedattn.interop.lengthen import lengthen
from gatedattn.transformer import Transformer, abstract_parameters

FORMAT = "gatedattn"
KINDS = (
    "a run (config.json, checkpoints/), a converted folder, a Hugging Face folder (config.json, safetensors) or a .gguf file"
)


class Source(NamedTuple):
    """A model, opened. `params`: by path, arrays or what reads itself when it is indexed. `trained`: tokens in a row of its training;
    0 if that is not known."""

    config: TransformerConfig
    params: Mapping
    tokenizer: tokenizers.Tokenizer | None
    trained: int = 0


def load_model(
    path: str | Path, *, rope: str = "", mesh: Mesh | None = None, param_dtype=jnp.float32
) -> tuple[Transformer, tokenizers.Tokenizer | None]:
    """The model at `path`, of whatever kind, and its tokenizer, if it has one.

    `rope` changes how it tells positions, to read further than it was trained to (see `lengthen`): "yarn,factor=4". With a mesh,
    parameters are placed by the path rules of `gatedattn.sharding`. Raises `ConfigError` if there is no model, or one that this
    project cannot compute.
    """
    source = open_model(path)
    config = lengthen(source.config, rope, source.trained or _reach(source.config)) if rope else source.config
    return build(config, source.params, mesh=mesh, param_dtype=param_dtype), source.tokenizer


def open_model(path: str | Path) -> Source:
    """The model at `path`; from files, its parameters are read only when they are indexed."""
    path = Path(path)
    if path.is_file():
        with open(path, "rb") as file:
            magic = file.read(4)
        if magic != gguf.MAGIC:
            raise ConfigError(f"{path} is a file, but not a GGUF file: MODEL must be {KINDS}")
        return _open_gguf(path)
    if path.parent.name == "checkpoints" and path.name.isdecimal() and path.is_dir():
        return _open_run(path.parent.parent, int(path.name))
    if not (path / "config.json").is_file():
        found = f"{path} has no config.json" if path.is_dir() else f"{path} does not exist"
        raise ConfigError(f"{found}: MODEL must be {KINDS}")
    about = tensors_lib.read_json(path / "config.json")
    if about.get("format") == FORMAT:
        return _open_converted(path, about)
    if (path / "checkpoints").is_dir():
        return _open_run(path)
    if "model_type" in about:
        return Source(*huggingface.open_folder(path), _tokenizer(huggingface.tokenizer, path))
    raise ConfigError(f"{path}/config.json describes no finished model (no checkpoints/, no model_type): MODEL must be {KINDS}")


def _open_gguf(path: Path) -> Source:
    config, params, file = gguf.open_file(path)
    return Source(config, params, _tokenizer(gguf.tokenizer, file))


def _reach(config: TransformerConfig) -> int:
    """The length that the weights are for: what an extension that is already in the settings extends, or all that they read."""
    return config.max_seq_len if config.rope.scaling == "none" else config.rope.original_max_len


def _tokenizer(read: Callable, source) -> tokenizers.Tokenizer | None:
    """A tokenizer that somebody else wrote; if it cannot be used, say so: the weights are of use without it."""
    try:
        return read(source)
    except ConfigError as error:
        print(f"no tokenizer: {error}", file=sys.stderr)
        return None


def _open_converted(path: Path, about: dict) -> Source:
    model = about.get("model")
    if not isinstance(model, dict):
        raise ConfigError(f"{path}/config.json: model={model!r} must be the settings of a model")
    config = from_mapping(TransformerConfig, model, "model")
    params = tensors_lib.Folder(path)
    wanted, shapes = {name: leaf.shape for name, leaf in abstract_parameters(config).items()}, params.shapes
    wrong = sorted(name for name in wanted.keys() | shapes.keys() if wanted.get(name) != shapes.get(name))
    if wrong:
        found, must = shapes.get(wrong[0], "missing"), wanted.get(wrong[0], "absent")
        raise ConfigError(
            f"{path}: {len(wrong)} parameters do not fit its config.json, e.g. {wrong[0]} is {found}, must be {must}"
        )
    tokenizer = tokenizers.load(path)
    if tokenizer is not None:
        tokenizer.set_special(about.get("bos_id"), about.get("eos_ids"))
    return Source(config, params, tokenizer)


def _open_run(path: Path, step: int | None = None) -> Source:
    from gatedattn.training import recorder
    from gatedattn.training.checkpoint import Checkpoints

    try:
        run = recorder.read_config(path)
    except OSError:
        raise ConfigError(f"{path} has checkpoints but no config.json: it is not the folder of a run") from None
    abstract = nnx.as_pure(nnx.state(nnx.eval_shape(lambda: Transformer(run.model, rngs=nnx.Rngs(0))), nnx.Param))
    # Wherever it was trained: without a sharding Orbax would look for the devices that saved it.
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), abstract)
    with Checkpoints(path, read_only=True) as checkpoints:
        step = checkpoints.latest() if step is None else step
        if step is None:
            raise ConfigError(f"{path} holds no finished checkpoint: train first")
        params = checkpoints.restore_params(abstract, step)
    return Source(run.model, flat_parameters(params), tokenizers.load(path), run.train.seq_len)


def save_model(source: Source, folder: str | Path) -> None:
    """Write a converted folder, one parameter in memory at a time; dtypes are kept."""
    folder = Path(folder)
    entries = []
    for name, param in source.params.items():
        dtype = np.dtype(param.dtype)
        entries.append(tensors_lib.Tensor(name, tuple(param.shape), dtype, lambda param=param: np.asarray(param[()])))
    tensors_lib.write(folder, entries)
    about = {"format": FORMAT, "model": to_mapping(source.config)}
    if source.tokenizer is not None:
        about |= {"bos_id": source.tokenizer.bos_id, "eos_ids": [*source.tokenizer.eos_ids]}
        source.tokenizer.save(folder)
    write_atomically(folder / "config.json", (json.dumps(about, indent=2) + "\n").encode())


def convert(direction: str, source: str | Path, destination: str | Path, layout: str = "stock") -> str:
    """`python -m gatedattn convert`: from-hf, from-gguf (a converted folder) or to-hf (a Hugging Face folder).

    Returns what was done, in a line. Raises `ConfigError` if the destination holds something already, if the source is of
    another kind, or as `load_model` does.
    """
    source, destination = Path(source), Path(destination)
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise ConfigError(f"{destination} exists and is not empty: give a new folder")
    if direction == "from-gguf" and source.is_dir():
        raise ConfigError(f"{source} is a folder: from-gguf takes a .gguf file; for a Hugging Face folder use from-hf")
    if direction == "from-hf" and source.is_file():
        raise ConfigError(f"{source} is a file: from-hf takes a folder; for a .gguf file use from-gguf")
    model = open_model(source)
    if direction == "to-hf":
        huggingface.save(model.params, model.config, destination, model.tokenizer, layout)
    else:
        save_model(model, destination)
    size = sum(int(np.prod(param.shape)) for param in model.params.values())
    tokenizer = "with" if model.tokenizer else "without"
    return f"{destination}: {size:,} parameters, gates {model.config.layer_gates}, {tokenizer} tokenizer"
