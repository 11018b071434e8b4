"""Perplexity of texts: every token of every document counted once, in windows of any length."""

from __future__ import annotations

import collections
import functools
import glob
import math
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float64, Int
from tqdm import tqdm

from gatedattn.config import ConfigError
from gatedattn.data.sources import read_text
from gatedattn.data.tokenizers import Tokenizer
from gatedattn.linear import project
from gatedattn.sharding import constrain
from gatedattn.training.evaluate import perplexity
from gatedattn.transformer import Transformer

AHEAD = 4  # batches that the device may be ahead of the host
CHUNK = 256  # tokens of each row whose float32 logits exist at one time


class Window(NamedTuple):
    """Inputs ids[begin:end] of a document, targets ids[begin + 1 : end + 1], of which those from ids[first + 1] on count."""

    begin: int
    end: int
    first: int


def windows(targets: int, length: int, stride: int) -> Iterator[Window]:
    """Windows of at most `length` inputs over a document of `targets` + 1 tokens: each target counts in exactly one of them.

    The first window counts all its targets, each following one its last `stride`: so all but the first `length` targets see at least
    length - stride tokens before them. stride = length is the cheapest and the harshest.
    """
    end = min(length, targets)
    if targets:
        yield Window(0, end, 0)
    while end < targets:
        first, end = end, min(end + stride, targets)
        yield Window(max(end - length, 0), end, first)


def packed(documents: Iterable[np.ndarray], length: int, stride: int, batch: int) -> Iterator[dict[str, np.ndarray]]:
    """Batches [B, T] of windows of documents (token ids, BOS first), several short ones in a row, each a segment of its own.

    `count` marks the targets that count. The last batch is filled up with empty rows: one shape is compiled.
    """
    kinds = {"tokens": np.int32, "targets": np.int32, "positions": np.int32, "segment_ids": np.int32, "count": bool}

    def empty() -> dict[str, np.ndarray]:
        return {name: np.zeros((batch, length), kind) for name, kind in kinds.items()}

    rows, row, used, segment = empty(), 0, 0, 0
    for ids in documents:
        for window in windows(len(ids) - 1, length, stride):
            size = window.end - window.begin
            if used + size > length:
                row, used, segment = row + 1, 0, 0
            if row == batch:
                yield rows
                rows, row = empty(), 0
            here, segment = slice(used, used + size), segment + 1
            rows["tokens"][row, here] = ids[window.begin : window.end]
            rows["targets"][row, here] = ids[window.begin + 1 : window.end + 1]
            rows["positions"][row, here] = np.arange(size)
            rows["segment_ids"][row, here] = segment
            rows["count"][row, here] = np.arange(window.begin, window.end) >= window.first
            used += size
    if used:
        yield rows


def token_losses(
    hidden: Float[Array, "B T D"], unembedding: Float[Array, "D V"], targets: Int[Array, "B T"], chunk: int = CHUNK
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """-log softmax(hidden @ unembedding) of the target, and the least over the vocabulary (the target's own if it is the most
    likely), in float32, with the logits of `chunk` tokens a row at one time."""
    T = targets.shape[1]
    chunk = min(chunk, T)
    pad = -T % chunk

    def split(x):
        x = jnp.pad(x, ((0, 0), (0, pad), *((0, 0),) * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)

    def losses(part):
        h, y = part
        logits = project(h, unembedding, out_dtype=jnp.promote_types(h.dtype, jnp.float32))
        hit = jax.lax.broadcasted_iota(y.dtype, logits.shape, 2) == y[..., None]  # not a gather: V may be sharded
        lse = jax.nn.logsumexp(logits, axis=-1)
        return lse - jnp.where(hit, logits, 0).sum(-1), lse - logits.max(-1)

    found = jax.lax.map(losses, (split(hidden), split(targets)))
    return tuple(jnp.moveaxis(x, 0, 1).reshape(targets.shape[0], -1)[:, :T] for x in found)


@functools.partial(jax.jit, static_argnames="graphdef")
def _batch_losses(params, batch, *, graphdef):
    model = nnx.merge(graphdef, params)
    hidden, _ = model.hidden(batch["tokens"], batch["positions"], batch["segment_ids"])
    return constrain(token_losses(hidden, model.unembedding(), batch["targets"])[0], "..")  # whole on every process


class Windows:
    """Texts, each a document that begins with BOS, as `packed` batches of windows; tells what it has read of them."""

    def __init__(self, tokenizer: Tokenizer, texts: Iterable[str], length: int, stride: int, batch: int):
        self.tokenizer, self.texts, self.length, self.stride, self.batch = tokenizer, texts, length, stride, batch
        self.text_bytes = self.documents = 0

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return packed(self._encoded(), self.length, self.stride, self.batch)

    def _encoded(self) -> Iterator[np.ndarray]:
        for text in self.texts:
            self.text_bytes += len(text.encode())
            self.documents += 1
            yield np.concatenate([[self.tokenizer.bos_id], self.tokenizer.encode(text)])


def losses(
    model: Transformer, batches: Iterable[dict[str, np.ndarray]], progress: str = ""
) -> tuple[Float64[np.ndarray, "P"], Int[np.ndarray, "P"]]:
    """Sums of losses and numbers of targets with 1, 2-3, 4-7, ... tokens before them. The device is some batches ahead of what is read."""
    graphdef, params = nnx.split(model)
    params, sums, counts = nnx.as_pure(params), np.zeros(64), np.zeros(64, np.int64)
    waiting: collections.deque = collections.deque()
    with tqdm(unit="token", unit_scale=True, desc=progress, disable=None if progress else True, file=sys.stderr) as bar:

        def read() -> None:
            rows, found = waiting.popleft()
            found = np.asarray(found, np.float64)
            seen = np.log2(rows["positions"][rows["count"]] + 1).astype(int)
            sums[:] += np.bincount(seen, found[rows["count"]], 64)
            counts[:] += np.bincount(seen, minlength=64)
            bar.update(int(rows["count"].sum()))

        for rows in batches:
            waiting.append((rows, _batch_losses(params, rows, graphdef=graphdef)))
            if len(waiting) > AHEAD:
                read()
        while waiting:
            read()
    return sums, counts


def summary(found: tuple[np.ndarray, np.ndarray], windows: Windows) -> dict:
    """What `measure` returns, of `losses`. Raises `ConfigError` if there was no token."""
    sums, counts = found
    total, tokens = float(sums.sum()), int(counts.sum())
    if not tokens:
        raise ConfigError(f"{windows.documents} documents without a token: nothing to measure")
    loss = total / tokens
    positions = [
        {
            "from": 2**i,
            "to": min(2 ** (i + 1) - 1, windows.length),
            "tokens": int(counts[i]),
            "loss": float(sums[i] / counts[i]),
        }
        for i in np.flatnonzero(counts).tolist()
    ]
    return {
        "loss": loss,
        "perplexity": perplexity(loss),
        "bits_per_byte": total / math.log(2) / windows.text_bytes,
        "tokens": tokens,
        "text_bytes": windows.text_bytes,
        "documents": windows.documents,
        "length": windows.length,
        "stride": windows.stride,
        "by_position": positions,
    }


def measure(
    model: Transformer,
    tokenizer: Tokenizer,
    texts: Iterable[str],
    *,
    length: int = 2048,
    stride: int | None = None,
    batch: int = 4,
    progress: str = "",
) -> dict:
    """The loss of `texts`, each a document that begins with BOS, read in windows of `length` tokens (see `windows`).

        loss           -sum log p(token | those before it in its window) / tokens, nats; BOS itself is not predicted
        perplexity     exp(loss)
        bits_per_byte  the same sum in bits per UTF-8 byte of text: comparable between tokenizers
        by_position    the loss of targets with 1, 2-3, 4-7, ... tokens before them in their window, BOS included

    Does not depend on `batch` or on the mesh (float32 rounding apart).

    Args:
        stride: targets that count in each window but the first; `length` by default.
        progress: name on the progress bar, on a terminal; none if empty.

    Raises:
        ConfigError: sizes out of range, more tokens than learned positions, or texts without a token.
    """
    stride, config = length if stride is None else stride, model.config
    if not 1 <= stride <= length:
        raise ConfigError(f"stride={stride}: must be in 1..{length}, the length of a window")
    if batch < 1:
        raise ConfigError(f"batch={batch}: must be at least 1")
    if config.position == "learned" and length > config.max_seq_len:
        raise ConfigError(f"length={length}: the model has learned {config.max_seq_len} positions")
    if tokenizer.vocab_size > config.vocab_size:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} ids, the model {config.vocab_size}: they do not belong together"
        )
    read = Windows(tokenizer, texts, length, stride, batch)
    return summary(losses(model, read, progress), read)


def average(results: Sequence[dict]) -> dict:
    """Over sets, each counting the same: mean loss and mean perplexity (the paper averages its domains' perplexities)."""
    return {name: float(np.mean([result[name] for result in results])) for name in ("loss", "perplexity", "bits_per_byte")}


def text_sets(arguments: Sequence[str]) -> dict[str, list[Path]]:
    """`NAME=GLOB` or `GLOB` (its own name), `**` crossing folders -> the files of each set. Raises `ConfigError`."""
    sets: dict[str, list[Path]] = {}
    for argument in arguments:
        name, _, pattern = argument.rpartition("=")
        name = name or pattern
        files = [Path(p) for p in sorted(glob.glob(os.path.expanduser(pattern), recursive=True)) if os.path.isfile(p)]
        if not files:
            raise ConfigError(f"--text={argument}: no such file (looked from {os.getcwd()})")
        if name in sets:
            raise ConfigError(f"--text: two sets are called {name!r}: write NAME=GLOB")
        sets[name] = files
    return sets


def texts(files: Sequence[Path]) -> Iterator[str]:
    """Each file a document. Raises `ConfigError` for one that is not UTF-8."""
    return (text for path in files if (text := read_text(path)))
