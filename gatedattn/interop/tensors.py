"""Named tensors on disk, as safetensors: a reader that maps files into memory, and a writer that holds one tensor at a time.

A file is an unsigned 64-bit header length, a JSON header {name: {dtype, shape, data_offsets: [begin, end]}}, then the bytes.
Read here rather than by the `safetensors` package, so that a slice of a tensor costs a slice (whatever is reshaped or
transposed before it), bfloat16 arrives in numpy, and writing a shard does not need the whole shard in memory. The tests check
both against the package.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

from gatedattn.config import ConfigError

DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip
NAMES = {np.dtype(kind): name for name, kind in DTYPES.items()}
HEADER_LIMIT = 100_000_000  # bytes, the limit of the safetensors package
SHARD_BYTES = 5_000_000_000
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class Tensor(NamedTuple):
    """A tensor to be written; `read` is called once, when its turn has come."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read_json(path: Path) -> dict:
    """A JSON object. Raises `ConfigError` for anything else."""
    try:
        value = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: must hold a JSON object, not a {type(value).__name__}")
    return value


class File(Mapping):
    """The tensors of one file as read-only memory-mapped arrays. Raises `ConfigError` if its header does not fit it."""

    def __init__(self, path: Path):
        self.path = path
        try:
            size = path.stat().st_size
            with open(path, "rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if size < 8 or not 0 < length <= min(size - 8, HEADER_LIMIT):
                    raise ConfigError(f"{path}: not a safetensors file, or one that was cut short ({size} bytes)")
                header = json.loads(file.read(length))
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
        except (ValueError, RecursionError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{path}: its header is not JSON ({error})") from None
        if not isinstance(header, dict):
            raise ConfigError(f"{path}: its header is not a JSON object")
        self.metadata = header.pop("__metadata__", {})
        self.start, self.end = 8 + length, size
        self.entries = {name: self._check(name, entry) for name, entry in header.items()}
        self.bytes = np.asarray(np.memmap(path, np.uint8, "r"))

    def _check(self, name: str, entry) -> tuple[np.dtype, tuple[int, ...], int, int]:
        try:
            dtype, shape, (begin, end) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        except (KeyError, TypeError, ValueError):
            kind = entry.get("dtype") if isinstance(entry, dict) else entry
            raise ConfigError(f"{self.path}: tensor {name!r} is of dtype {kind!r}; known: {', '.join(DTYPES)}") from None
        numbers = [*shape, begin, end] if isinstance(shape, list) else [None]
        valid = all(type(n) is int and n >= 0 for n in numbers)
        if not valid or end - begin != math.prod(shape) * np.dtype(dtype).itemsize or self.start + end > self.end:
            what = f"{name!r} {entry['dtype']} {shape} at bytes {begin}..{end}"
            raise ConfigError(f"{self.path}: tensor {what} does not fit a file of {self.end} bytes")
        return np.dtype(dtype), tuple(shape), begin, end

    def __getitem__(self, name: str) -> np.ndarray:
        dtype, shape, begin, end = self.entries[name]
        return self.bytes[self.start + begin : self.start + end].view(dtype).reshape(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


class Folder(Mapping):
    """The tensors of model.safetensors, or of all the shards that model.safetensors.index.json names.

    Raises `ConfigError` if there are none, for shards outside the folder, and for pickled weights, which could run code.
    """

    def __init__(self, folder: str | Path):
        folder = Path(folder)
        if (folder / INDEX).is_file():
            places = read_json(folder / INDEX).get("weight_map")
            if not isinstance(places, dict) or not places:
                raise ConfigError(f"{folder / INDEX}: has no weight_map")
            for shard in places.values():
                if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
                    raise ConfigError(f"{folder / INDEX}: shard {shard!r} must be a .safetensors file of this folder")
            self.files = {shard: File(folder / shard) for shard in sorted(set(places.values()))}
            for name, shard in places.items():
                if name not in self.files[shard]:
                    raise ConfigError(f"{folder / INDEX}: says that {shard} holds {name!r}, but it does not")
        elif (folder / SINGLE).is_file():
            self.files = {SINGLE: File(folder / SINGLE)}
        else:
            pickled = sorted(p.name for suffix in ("*.bin", "*.pt", "*.pth") for p in folder.glob(suffix))
            why = f"; {pickled[0]} is a pickle, which can run code: save it as safetensors first" if pickled else ""
            raise ConfigError(f"{folder} holds no {SINGLE} nor {INDEX}{why}")
        self.places = {name: file for file in self.files.values() for name in file}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: file.entries[name][1] for name, file in self.places.items()}

    def __getitem__(self, name: str) -> np.ndarray:
        return self.places[name][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


def write(folder: str | Path, tensors: Iterable[Tensor], shard_bytes: int = SHARD_BYTES) -> list[str]:
    """Write model.safetensors, or shards of at most `shard_bytes` (or one tensor) with their index. Returns the file names."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[list[Tensor]] = [[]]
    for tensor in tensors:
        if shards[-1] and sum(t.nbytes for t in shards[-1]) + tensor.nbytes > shard_bytes:
            shards.append([])
        shards[-1].append(tensor)
    total = len(shards)
    names = [SINGLE] if total == 1 else [f"model-{i:05d}-of-{total:05d}.safetensors" for i in range(1, total + 1)]
    for old in (SINGLE, INDEX):  # a folder that is written again must not keep a stale way in
        (folder / old).unlink(missing_ok=True)
    for name, shard in zip(names, shards, strict=True):
        _write_file(folder / name, shard)
    if total > 1:
        index = {
            "metadata": {"total_size": sum(t.nbytes for shard in shards for t in shard)},
            "weight_map": {t.name: name for name, shard in zip(names, shards, strict=True) for t in shard},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return names


def _write_file(path: Path, tensors: list[Tensor]) -> None:
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for t in tensors:
        header[t.name] = {"dtype": NAMES[t.dtype], "shape": list(t.shape), "data_offsets": [at, at + t.nbytes]}
        at += t.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for t in tensors:
            array = np.asarray(t.read(), order="C")
            if array.shape != t.shape or array.dtype != t.dtype:
                raise ValueError(f"{t.name}: announced as {t.dtype} {t.shape}, came as {array.dtype} {array.shape}")
            file.write(array.reshape(-1).view(np.uint8).data)
    os.replace(temporary, path)
