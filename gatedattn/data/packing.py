"""Documents as token arrays -> rows of T tokens, at random access and without a copy.

A `Stream` is all documents of a split in one array, a BOS before each. A row is a window of it: nothing is stored per row
length, so one tokenized corpus serves every `train.seq_len`, and a row is made when it is asked for.

    stream   BOS a a a BOS b BOS c c c c (BOS)     the last BOS is only ever a target
    T=4      BOS a a a | BOS b BOS c | c c c -
    targets  a a a BOS | b BOS c c   | c c BOS -

The target of a token is the next token of its document, also across a row boundary; that of a document's last token is BOS.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from jaxtyping import Int, Int64, Integer
from numpy.typing import DTypeLike

from gatedattn.config import ConfigError


@dataclass(frozen=True)
class Stream:
    """tokens: n tokens, documents one after another, each begun by BOS; starts: where documents begin (ascending, first 0)."""

    tokens: Integer[np.ndarray, "n"]
    starts: Int64[np.ndarray, "documents"]

    @classmethod
    def of(cls, documents: Iterable[Int[np.ndarray, "_"]], bos_id: int, dtype: DTypeLike = np.int32) -> Stream:
        """The stream of documents that hold no BOS themselves; an empty document is a lone BOS."""
        tokens, starts = bytearray(), []
        bos = np.array([bos_id], dtype).tobytes()
        for document in documents:
            starts.append(len(tokens) // len(bos))
            tokens += bos
            tokens += np.asarray(document).astype(dtype).data
        return cls(np.frombuffer(tokens, dtype), np.array(starts, np.int64))


class Rows(Protocol):
    """Rows of `seq_len` tokens at random access: from a stream in memory (`Packed`), or from records (`records.Records`)."""

    @property
    def num_tokens(self) -> int:
        """Targets in the loss over all rows: every token of the corpus is one exactly once."""

    def __len__(self) -> int: ...

    def rows(self, index: Int[np.ndarray, "B"]) -> dict[str, np.ndarray]: ...

    def sample(self) -> Integer[np.ndarray, "n"]:
        """Tokens, BOS among them, in which every one is as frequent as among the targets, or nearly so."""


class Packed:
    """Rows of `seq_len` tokens over a stream.

    bos="document": rows cut the stream every T tokens. bos="row": a row that continues a document begins with a BOS of its own,
    so that the same token stands at position 0 of every row. That BOS shows up in place of the token before the window's first
    new one; its target is in the loss already, as the last target of the row before, and is masked.

    Raises ConfigError for an empty stream, and for bos="row" with rows too short to hold a BOS and a token.
    """

    def __init__(self, stream: Stream, seq_len: int, bos_id: int, bos: str = "document"):
        if len(stream.tokens) == 0:
            raise ConfigError("no documents to pack: the corpus is empty")
        if bos == "row" and seq_len < 2:
            raise ConfigError(f"train.seq_len={seq_len} leaves no room for a token after data.bos='row': at least 2")
        self.stream, self.seq_len, self.bos_id, self.bos = stream, seq_len, bos_id, bos
        self.first = self._row_starts()  # where each row's window begins
        self.overlaps = np.diff(self.first, prepend=-seq_len) < seq_len  # rows that begin with a BOS of their own

    def _row_starts(self) -> Int64[np.ndarray, "rows"]:
        n, step = len(self.stream.tokens), self.seq_len
        if self.bos == "document":
            return np.arange(0, n, step)
        document_starts = set(self.stream.starts.tolist())
        first, at = [0], step
        while at < n:
            # The window of a row that continues a document reaches back by one: that slot shows BOS.
            first.append(at if at in document_starts else at - 1)
            at = first[-1] + step
        return np.array(first, np.int64)

    def __len__(self) -> int:
        return len(self.first)

    @property
    def num_tokens(self) -> int:
        """Targets in the loss over all rows: every token of the stream is one exactly once."""
        return len(self.stream.tokens)

    def sample(self) -> Integer[np.ndarray, "n"]:
        """All tokens: they and the targets are the same multiset, since BOS ends as well as begins."""
        return self.stream.tokens

    def windows(self, start: int, stop: int) -> Iterable[Integer[np.ndarray, "_"]]:
        """What each of the rows from `start` to `stop` is made of: 1 if it begins with a BOS of its own, else 0; its tokens as they
        stand in the stream; and the one that follows (BOS after the last)."""
        tokens, n = self.stream.tokens, len(self.stream.tokens)
        own = (self.overlaps & (self.bos == "row")).astype(tokens.dtype)[:, None]
        end = np.array([self.bos_id], tokens.dtype)
        for row in range(start, min(stop, len(self))):
            until = self.first[row] + self.seq_len + 1
            yield np.concatenate([own[row], tokens[self.first[row] : until], end[: int(until > n)]])  # all of one dtype

    def rows(self, index: Int[np.ndarray, "B"]) -> dict[str, np.ndarray]:
        """Rows `index`: tokens, targets, segment_ids, positions i32[B, T] and loss_mask bool[B, T].

        segment_ids count the documents of a row from 1; 0 is padding (tokens and targets BOS, positions 0, not in the loss).
        positions count from 0 in each segment, also in a row that continues a document. Rows past the end are all padding.
        """
        tokens, starts, n = self.stream.tokens, self.stream.starts, len(self.stream.tokens)
        index = np.asarray(index)
        first = np.where(index < len(self), self.first[np.minimum(index, len(self) - 1)], n)[:, None]
        at = first + np.arange(self.seq_len)  # [B, T], places in the stream
        real = at < n
        document = np.searchsorted(starts, at, side="right") - 1
        begins = starts[document]
        shown, follows = (np.where(p < n, tokens[np.minimum(p, n - 1)], self.bos_id).astype(np.int32) for p in (at, at + 1))
        loss_mask = real.copy()
        if self.bos == "row":
            own = real[:, 0] & self.overlaps[np.minimum(index, len(self) - 1)]
            shown[own, 0] = self.bos_id
            loss_mask[own, 0] = False
        return {
            "tokens": shown,
            "targets": follows,
            "loss_mask": loss_mask,
            "segment_ids": np.where(real, document - document[:, :1] + 1, 0).astype(np.int32),
            "positions": np.where(real, at - np.maximum(begins, first), 0).astype(np.int32),
        }


def unpack(windows: Iterable[Int[np.ndarray, "_"]], seq_len: int, bos_id: int) -> dict[str, np.ndarray]:
    """The batch of rows that `Packed.rows` makes, from their `Packed.windows`; an empty window is a row of padding.

    A BOS begins a document: that none stands elsewhere is up to the tokenizer.
    """
    windows = list(windows)
    whole = np.full((len(windows), seq_len + 1), bos_id, np.int32)
    lengths, own = np.zeros(len(windows), np.int64), np.zeros(len(windows), bool)
    for row, window in enumerate(windows):
        if len(window):
            own[row], lengths[row] = window[0], len(window) - 2
            whole[row, : len(window) - 1] = window[1:]
    place = np.arange(seq_len)
    real = place < lengths[:, None]
    tokens, targets = whole[:, :-1].copy(), np.where(real, whole[:, 1:], bos_id)
    tokens[~real] = bos_id
    tokens[own, 0] = bos_id
    begins = tokens == bos_id
    begins[:, 0] = True
    loss_mask = real.copy()
    loss_mask[own, 0] = False
    return {
        "tokens": tokens,
        "targets": targets,
        "loss_mask": loss_mask,
        "segment_ids": np.where(real, np.cumsum(begins, axis=1), 0).astype(np.int32),
        "positions": np.where(real, place - np.maximum.accumulate(np.where(begins, place, 0), axis=1), 0).astype(np.int32),
    }
