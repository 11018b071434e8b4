"""A prepared corpus: packed rows in ArrayRecord files, read at random access. `prepare.py` makes it.

DIR/about.json                     what it is, and size and sha256 of each file; written last, so that its presence means whole
DIR/tokenizer.json                 (or another tokenizer's file)
DIR/train-00000.array_record ...   a record is a row: its tokens and the one that follows, little-endian u16 or u32
DIR/valid-00000.array_record ...
"""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from array_record.python.array_record_data_source import ArrayRecordDataSource
from jaxtyping import Int, Int32, Integer

from gatedattn.config import ConfigError
from gatedattn.data import tokenizers
from gatedattn.data.cache import digest
from gatedattn.data.packing import unpack
from gatedattn.data.tokenizers import Tokenizer

FORMAT = 1
ABOUT = "about.json"
SAMPLE = 1 << 21  # tokens that stand for all where frequencies are wanted


def dtype(vocab_size: int) -> np.dtype:
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


class Records:
    """`Rows` of a split. Files are opened when they are first read, each row with one read of its own."""

    def __init__(self, folder: Path, files: list[dict[str, Any]], seq_len: int, tokenizer: Tokenizer):
        self.folder, self.files, self.seq_len = folder, files, seq_len
        self.bos_id, self.dtype = tokenizer.bos_id, dtype(tokenizer.vocab_size)
        self.vocab_size = tokenizer.vocab_size
        self.count = sum(file["rows"] for file in files)

    @cached_property
    def source(self) -> ArrayRecordDataSource:
        return ArrayRecordDataSource([str(self.folder / file["name"]) for file in self.files if file["rows"]])

    def __len__(self) -> int:
        return self.count

    @property
    def num_tokens(self) -> int:
        return sum(file["tokens"] for file in self.files)

    def windows(self, index: Int[np.ndarray, "B"]) -> list[Integer[np.ndarray, "_"]]:
        """`Packed.windows` of the rows `index`; nothing for rows past the end. Raises `ConfigError` for a damaged record."""
        inside = [int(i) for i in index if i < len(self)]
        try:
            found = iter(self.source.__getitems__(inside)) if inside else iter(())
        except (RuntimeError, ValueError, IndexError, OSError) as error:
            reason = (str(error).splitlines() or [""])[0][:200]
            raise ConfigError(
                f"{self.folder}: a record cannot be read ({reason}): the same `python -m gatedattn prepare` repairs it"
            ) from None
        windows = [np.frombuffer(next(found) if i < len(self) else b"", self.dtype) for i in index]
        if any(not 3 <= len(w) <= self.seq_len + 2 or w[0] > 1 or (w >= self.vocab_size).any() for w in windows if len(w)):
            raise ConfigError(
                f"{self.folder}: a record holds what no row can: the same `python -m gatedattn prepare` repairs it"
            )
        return windows

    def rows(self, index: Int[np.ndarray, "B"]) -> dict[str, np.ndarray]:
        """As `Packed.rows`."""
        return unpack(self.windows(index), self.seq_len, self.bos_id)

    def sample(self) -> Int32[np.ndarray, "n"]:
        """The tokens of rows evenly spread over all, about two million at most."""
        count = min(len(self), max(SAMPLE // self.seq_len, 1))
        windows = self.windows(np.arange(count) * len(self) // count)
        return np.concatenate([window[1:-1] for window in windows]).astype(np.int32)


class Prepared:
    """A prepared corpus, opened: `about`, its tokenizer, and `packed` rows by split.

    Raises `ConfigError` if there is none, it is not finished, or a file is not of the size it was written with.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder).expanduser()
        self.about = _read_about(self.folder)
        tokenizer = tokenizers.load(self.folder)
        if tokenizer is None or tokenizer.fingerprint != self.about["tokenizer"]:
            raise ConfigError(
                f"{self.folder}: its tokenizer is {'gone' if tokenizer is None else 'another'}; prepare it again in a new folder"
            )
        self.tokenizer = tokenizer
        for split in self.about["splits"].values():
            for file in split["files"]:
                path = self.folder / file["name"]
                size = path.stat().st_size if path.exists() else -1
                if size != file["bytes"]:
                    found = "is gone" if size < 0 else f"has {size} bytes instead of {file['bytes']}"
                    raise ConfigError(f"{path} {found}: the same `python -m gatedattn prepare` repairs it")

    @property
    def fingerprint(self) -> str:
        return digest(json.dumps(self.about["splits"], sort_keys=True))

    @property
    def packed(self) -> dict[str, Records]:
        about = self.about
        return {
            name: Records(self.folder, split["files"], about["seq_len"], self.tokenizer)
            for name, split in about["splits"].items()
        }

    def check(self, tokenizer: Tokenizer, seq_len: int, bos: str) -> None:
        """Raise `ConfigError` unless the run asks for what was prepared."""
        wrong = [
            f"{key}={asked!r} (it has {has!r})"
            for key, asked, has in (("train.seq_len", seq_len, self.about["seq_len"]), ("data.bos", bos, self.about["bos"]))
            if asked != has
        ]
        if tokenizer.fingerprint != self.tokenizer.fingerprint:
            wrong.append(f"another data.tokenizer (set {self.folder / self.tokenizer.file})")
        if wrong:
            raise ConfigError(f"prepared:{self.folder} cannot serve {', '.join(wrong)}: change the setting, or prepare it anew")


def _read_about(folder: Path) -> dict:
    """about.json, checked: names that stay in the folder, counts that are counts."""
    path = folder / ABOUT
    if not path.is_file():
        what = "is not finished: run the same `python -m gatedattn prepare` again" if (folder / "plan.json").exists() else (
            "holds no prepared corpus: make one with `python -m gatedattn prepare SOURCE DIR`")  # fmt: skip
        raise ConfigError(f"{folder} {what}")
    try:
        about = json.loads(path.read_text())
        if about["format"] != FORMAT:
            raise ConfigError(f"{path}: format {about['format']!r} cannot be read; known: {FORMAT}")
        valid = about["bos"] in ("document", "row") and _count(about["seq_len"]) and set(about["splits"]) == {"train", "valid"}
        for split in about["splits"].values():
            valid = valid and _count(split["documents"]) and _count(split["text_bytes"])
            for file in split["files"]:
                valid = valid and Path(file["name"]).name == file["name"] and all(map(_count, (file["rows"], file["tokens"])))
                valid = valid and type(file["bytes"]) is int
        if not valid or not isinstance(about["tokenizer"], str):
            raise ValueError("values that cannot be")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: not what `python -m gatedattn prepare` wrote ({type(error).__name__}: {error})") from None
    return about


def _count(value) -> bool:
    return type(value) is int and value >= 0
