"""Text <-> token ids: bytes, byte-level BPE, any tokenizer.json, SentencePiece, single characters.

One small interface (`Tokenizer`). None of them adds BOS by itself, and none turns the text of a special token ("<|bos|>" in a
document) into its id: only the packing may begin a document.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import tokenizers as hf
from jaxtyping import Int32
from tokenizers import decoders, models, pre_tokenizers, trainers

from gatedattn.config import ConfigError, suggest
from gatedattn.data.cache import digest, write_atomically

BOS = "<|bos|>"
BOS_NAMES = (BOS, "<s>", "<|begin_of_text|>", "<|startoftext|>", "<|endoftext|>", "[BOS]", "<bos>", "<BOS>")
# Tokens after which a text is over, in the families that we read.
EOS_NAMES = ("</s>", "<|end_of_text|>", "<|endoftext|>", "<|eot_id|>", "<|im_end|>", "<eos>", "<EOS>", "[EOS]")
LONG_TEXT = 1 << 20  # characters; longer documents are encoded in pieces, since an Encoding takes over 100 bytes a token
LONGEST = 4  # times as long a piece is cut wherever it stands


class Tokenizer(ABC):
    """`vocab_size` ids, of which `bos_id` begins documents and `eos_ids` (there may be none) end them; `content` is what `save`
    writes, under the name `file`.
    """

    file: str
    vocab_size: int
    bos_id: int
    eos_ids: tuple[int, ...] = ()
    content: bytes

    @abstractmethod
    def encode(self, text: str) -> Int32[np.ndarray, "T"]: ...

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; BOS and ids outside the vocabulary are left out."""

    def encode_many(self, texts: Iterable[str]) -> Iterator[Int32[np.ndarray, "T"]]:
        """`encode` of each text, in order."""
        return map(self.encode, texts)

    def set_special(self, bos, eos) -> None:
        """Take over what a model says of its own tokens: an id for BOS; an id or a list of ids for EOS; anything else is not one."""

        def valid(ids) -> tuple[int, ...]:
            ids = ids if isinstance(ids, list | tuple) else [ids]
            return tuple(i for i in ids if type(i) is int and 0 <= i < self.vocab_size)

        self.bos_id = (*valid(bos), self.bos_id)[0]
        self.eos_ids = tuple(dict.fromkeys((*self.eos_ids, *valid(eos))))

    @property
    def fingerprint(self) -> str:
        return digest(self.file, self.content)

    def save(self, folder: str | Path) -> None:
        write_atomically(Path(folder) / self.file, self.content)


class Bytes(Tokenizer):
    """The 256 bytes of UTF-8 are ids 0-255; BOS is 256."""

    file = "tokenizer_bytes.json"
    vocab_size, bos_id = 257, 256
    content = b'{"bytes": 256, "bos_id": 256}\n'

    def encode(self, text):
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def decode(self, ids):
        return bytes(int(i) for i in ids if 0 <= i < 256).decode(errors="replace")


class Characters(Tokenizer):
    """One id per symbol; BOS comes after the last. Characters outside the symbols are dropped."""

    file = "tokenizer_characters.json"

    def __init__(self, symbols: str):
        self.symbols = symbols
        self.content = json.dumps({"symbols": symbols}).encode()
        self.bos_id = len(symbols)
        self.vocab_size = len(symbols) + 1
        self._codes = np.array([ord(s) for s in symbols], np.uint32)
        self._order = np.argsort(self._codes)

    def encode(self, text):
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        at = np.searchsorted(self._codes, codes, sorter=self._order).clip(max=len(self._codes) - 1)
        ids = self._order[at]
        return ids[self._codes[ids] == codes].astype(np.int32)

    def decode(self, ids):
        return "".join(self.symbols[i] for i in ids if 0 <= i < len(self.symbols))


class Json(Tokenizer):
    """A tokenizer.json of the `tokenizers` library. Raises ConfigError if it cannot be read or has no BOS-like token."""

    file = "tokenizer.json"

    def __init__(self, content: bytes, origin: str = "tokenizer.json"):
        self.content = content
        try:
            self.backend = hf.Tokenizer.from_str(content.decode())
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # the library raises plain Exception, and its panics are not even that
            raise ConfigError(f"{origin}: not a tokenizer.json that `tokenizers` {hf.__version__} can read ({error})") from None
        self.backend.no_truncation()
        self.backend.no_padding()
        self.backend.encode_special_tokens = True  # the text "<|bos|>" stays text
        self.vocab_size = max(self.backend.get_vocab(with_added_tokens=True).values()) + 1
        ids = [i for name in BOS_NAMES if (i := self.backend.token_to_id(name)) is not None]
        if not ids:
            raise ConfigError(f"{origin} has no token to begin documents with: looked for {', '.join(BOS_NAMES)}")
        self.bos_id = ids[0]
        self.eos_ids = tuple(i for name in EOS_NAMES if (i := self.backend.token_to_id(name)) is not None)
        self._cuttable = "ByteLevel" in json.dumps(json.loads(self.backend.to_str()).get("pre_tokenizer"))

    def encode(self, text):
        return next(self.encode_many([text]))

    def encode_many(self, texts):
        """In parallel over batches of documents; a long document goes in pieces."""
        batch, size = [], 0
        for text in texts:
            if len(text) > LONG_TEXT and self._cuttable:
                yield from self._encode_batch(batch)
                batch, size = [], 0
                yield np.concatenate([ids for piece in pieces(text, LONG_TEXT) for ids in self._encode_batch([piece])])
                continue
            batch.append(text)
            size += len(text)
            if size > LONG_TEXT:
                yield from self._encode_batch(batch)
                batch, size = [], 0
        yield from self._encode_batch(batch)

    def _encode_batch(self, texts: list[str]) -> Iterator[Int32[np.ndarray, "T"]]:
        for encoding in self.backend.encode_batch_fast(texts, add_special_tokens=False):
            yield np.array(encoding.ids, np.int32)

    def decode(self, ids):
        return self.backend.decode([int(i) for i in ids if i >= 0], skip_special_tokens=True)


class SentencePiece(Tokenizer):
    """A SentencePiece model. Raises ConfigError if it cannot be read or defines no BOS."""

    file = "tokenizer.model"

    def __init__(self, content: bytes, origin: str = "tokenizer.model"):
        import sentencepiece

        self.content = content
        try:
            self.backend = sentencepiece.SentencePieceProcessor(model_proto=content)
        except (RuntimeError, OSError) as error:
            raise ConfigError(f"{origin}: not a SentencePiece model ({error})") from None
        self.vocab_size = self.backend.vocab_size()
        self.bos_id = self.backend.bos_id()
        self.eos_ids = (self.backend.eos_id(),) if self.backend.eos_id() >= 0 else ()
        if self.bos_id < 0:
            raise ConfigError(f"{origin} defines no BOS piece (bos_id is -1): train it with --bos_id, or use another tokenizer")

    def encode(self, text):
        return np.array(self.backend.encode(text, add_bos=False, add_eos=False), np.int32)

    def decode(self, ids):
        return self.backend.decode([int(i) for i in ids if 0 <= i < self.vocab_size and i != self.bos_id])


def pieces(text: str, size: int) -> Iterator[str]:
    """Cut a text every `size` characters or later, between a letter and a newline or between two words.

    No byte-level pre-tokenizer in use (GPT-2, cl100k, Llama 3, Qwen) makes a token across such a place, nor looks across it to
    split: the pieces encode to the same ids as the whole. Only a text without any (200 MB of NUL bytes, say) is cut every
    `LONGEST * size` characters wherever that is, which may cost a token there: otherwise its encoding would fill the memory.
    """
    start, cut = 0, re.compile(r"(?<=[^\W\d_])(?=\n| [^\W\d_])")
    while len(text) - start > size:
        match = cut.search(text, start + size, start + LONGEST * size)
        end = match.start() if match else start + LONGEST * size
        yield text[start:end]
        start = end
    if start < len(text) or not text:
        yield text[start:]


def train_bpe(texts: Iterable[str], size: int) -> Json:
    """Byte-level BPE with BOS as id 0. The same texts give the same tokenizer; few texts may give fewer than `size` ids."""
    backend = hf.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[BOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return Json(backend.to_str().encode())


def bpe_size(name: str) -> int | None:
    """SIZE of `bpe:SIZE`, None for other tokenizers. Raises ConfigError for a size that cannot be."""
    kind, _, size = name.partition(":")
    if kind != "bpe":
        return None
    if not size.isdecimal() or int(size) < 257:
        raise ConfigError(f"data.tokenizer={name!r}: SIZE must be a number from 257 (256 bytes and BOS), e.g. bpe:4096")
    return int(size)


def from_name(name: str) -> Tokenizer:
    """The tokenizer of a `data.tokenizer` setting that needs no training: `bytes`, `FILE.json` or `FILE.model`."""
    if name == "bytes":
        return Bytes()
    kind = {".json": Json, ".model": SentencePiece}.get(Path(name).suffix)
    if kind is None:
        allowed = ("bytes", "bpe:SIZE", "FILE.json", "FILE.model")
        raise ConfigError(f"data.tokenizer={name!r}: must be one of {', '.join(allowed)}{suggest(name, allowed)}")
    try:
        content = Path(name).expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(f"data.tokenizer={name!r}: cannot be read ({error.strerror})") from None
    return kind(content, name)


def load(folder: str | Path) -> Tokenizer | None:
    """The tokenizer saved in `folder` (a run's), or None if there is none."""
    folder = Path(folder)
    for kind in (Json, SentencePiece):
        if (path := folder / kind.file).exists():
            return kind(path.read_bytes(), str(path))
    if (path := folder / Characters.file).exists():
        return Characters(json.loads(path.read_text())["symbols"])
    return Bytes() if (folder / Bytes.file).exists() else None
