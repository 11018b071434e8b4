"""`load`: a DataConfig -> batches by step number.

The batch of a step is a pure function of the configuration, the seed and the step: a checkpoint holds no iterator state, and a
host reads only the rows it needs. Grain decides which row stands where (a fresh permutation of all rows each epoch; sources
with weights interleaved in proportion), packing.py cuts the rows out of tokenized corpora that lie in `data.cache_dir`.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grain
import numpy as np
from jaxtyping import Float64, Int64

from gatedattn.config import ConfigError, DataConfig, suggest
from gatedattn.data import backcopy, cache, sources, tokenizers
from gatedattn.data.backcopy import Backcopy
from gatedattn.data.packing import Packed, Rows, Stream
from gatedattn.data.records import Prepared
from gatedattn.data.tokenizers import Tokenizer

SYNTHETIC_VALID_ROWS = 1024
FORMAT = "2"  # of the tokenized corpora; a new number makes old ones unused

Batch = dict[str, np.ndarray]


@dataclass(frozen=True)
class Batches:
    """The batches of a split by step number, each a dict of arrays [B, T]: tokens, targets, segment_ids, positions (int32),
    loss_mask (bool), and what else the source knows.

    num_rows, num_tokens: rows and target tokens of one epoch; None if rows are made afresh and never end.
    num_batches: batches of one pass; None for training, which goes on for ever.
    """

    batch_size: int
    fetch: Callable[[Int64[np.ndarray, "B"]], Batch] = field(repr=False)  # running row numbers -> rows
    place: Callable[[Int64[np.ndarray, "B"]], dict[str, list[int]]] = field(repr=False)  # -> rows of each source
    num_rows: int | None
    num_tokens: int | None
    num_batches: int | None

    def __call__(self, step: int, rows: slice | Int64[np.ndarray, " b"] = slice(None)) -> Batch:
        """The batch of `step` (from 0), or only its `rows`. Raises IndexError outside the pass."""
        if step < 0 or self.num_batches is not None and step >= self.num_batches:
            raise IndexError(
                f"no batch {step}: there are {'endless' if self.num_batches is None else self.num_batches}, counted from 0"
            )
        return self.fetch(self._numbers(step)[rows])

    def locate(self, step: int) -> dict[str, list[int]]:
        """Source -> the numbers of its rows in the batch of `step`: where to look for what is wrong with it."""
        return self.place(self._numbers(step))

    def _numbers(self, step: int) -> Int64[np.ndarray, "B"]:
        return np.arange(step * self.batch_size, (step + 1) * self.batch_size)


@dataclass(frozen=True)
class Tokenized:
    """A tokenized source: its packed rows by split ("train", "valid") and how much text they come from. `fingerprint` changes
    with the text."""

    name: str
    fingerprint: str
    packed: dict[str, Rows]
    documents: dict[str, int]
    text_bytes: dict[str, int]  # UTF-8


@dataclass(frozen=True)
class Data:
    """What a run reads. `valid` has one entry per source: all its held-out rows, in order, once. `task`: the Backcopy object of
    a synthetic source (its oracle), else None."""

    tokenizer: Tokenizer
    train: Batches
    valid: dict[str, Batches]
    corpora: tuple[Tokenized, ...] = ()
    weights: tuple[float, ...] = ()  # of the corpora in training, sum 1
    task: Backcopy | None = None

    @property
    def fingerprint(self) -> str:
        """Changes with the text (or the task), not with the order in which it is read."""
        if self.task is not None:
            return cache.digest(self.task.tokenizer.content, self.task.unigram.tobytes(), self.task.bigram.tobytes())
        return cache.digest(*(corpus.fingerprint for corpus in self.corpora))

    @property
    def valid_bytes(self) -> dict[str, int]:
        """UTF-8 bytes of each source's held-out text: the denominator of bits per byte."""
        return {c.name: c.text_bytes["valid"] for c in self.corpora}

    def unigram(self) -> Float64[np.ndarray, "V"]:
        """How the training targets are distributed over the vocabulary."""
        if self.task is not None:
            return (
                np.bincount(np.ravel(self.train(0)["targets"]), minlength=self.tokenizer.vocab_size)
                / self.train(0)["targets"].size
            )
        shares = np.zeros(self.tokenizer.vocab_size)
        for corpus, weight in zip(self.corpora, self.weights):
            tokens = corpus.packed["train"].sample()
            shares += weight * np.bincount(tokens, minlength=len(shares)) / len(tokens)
        return shares

    def summary(self) -> dict:
        """For the start-up banner: JSON-ready sizes, and the loss in nats of a model that knows token frequencies only."""
        p = self.unigram()
        out = {
            "vocab_size": self.tokenizer.vocab_size,
            "unigram_entropy": float(-np.sum(p * np.log(np.where(p > 0, p, 1)))),
            "tokens_per_epoch": self.train.num_tokens,
            "rows_per_epoch": self.train.num_rows,
            "sources": {},
        }
        for corpus, weight in zip(self.corpora, self.weights):
            out["sources"][corpus.name] = {
                "weight": weight,
                **{f"{split}_tokens": packed.num_tokens for split, packed in corpus.packed.items()},
                **{f"{split}_rows": len(packed) for split, packed in corpus.packed.items()},
                **{f"{split}_documents": count for split, count in corpus.documents.items()},
                "valid_bytes": corpus.text_bytes["valid"],
            }
        return out


def load(
    config: DataConfig,
    *,
    seq_len: int,
    batch_size: int,
    seed: int,
    workdir: str | Path | None = None,
    vocab_size: int | None = None,
) -> Data:
    """Tokenizer, training batches and held-out batches of a run.

    The first call prepares corpora in `config.cache_dir` and says so on stderr; later ones reuse them. The tokenizer is kept in
    `workdir` and taken from there when a run resumes. Without weights, sources are joined and every row is seen once an epoch.

    Raises ConfigError for sources or tokenizers that cannot be used, and for a tokenizer with more ids than `vocab_size`.
    """
    specs = sources.parse(config.source)
    if specs[0].kind == "synthetic":
        return _synthetic(specs[0], config, seq_len, batch_size, seed, workdir, vocab_size)
    prepared = {spec: Prepared(spec.name) for spec in specs if spec.kind == "prepared"}
    opened = {spec: sources.open_corpus(spec, config) for spec in specs if spec.kind != "prepared"}
    kept = tokenizers.load(workdir) if workdir else None
    tokenizer = choose_tokenizer(config, list(opened.values()), next((p.tokenizer for p in prepared.values()), kept))
    for each in prepared.values():
        each.check(tokenizer, seq_len, config.bos)
    _accept(tokenizer, config, vocab_size, kept, workdir)
    corpora = tuple(
        _prepared(str(s), prepared[s]) if s in prepared else _tokenize(str(s), opened[s], tokenizer, config, seq_len)
        for s in specs
    )
    trains = [c.packed["train"] for c in corpora]
    weights = np.array([spec.weight or len(packed) for spec, packed in zip(specs, trains)], float)
    order = _order([len(p) for p in trains], None if specs[0].weight is None else weights, seed)

    def ordered(numbers) -> Int64[np.ndarray, "B"]:
        return np.array([order[int(i)] for i in numbers], np.int64)

    train = Batches(
        batch_size,
        lambda numbers: _gather(trains, ordered(numbers)),
        lambda numbers: _located(corpora, ordered(numbers)),
        sum(map(len, trains)),
        sum(p.num_tokens for p in trains),
        None,
    )
    valid = {}
    for corpus in corpora:
        packed = corpus.packed["valid"]
        count = math.ceil(len(packed) / batch_size)
        place = functools.partial(_in_order, corpus.name)
        valid[corpus.name] = Batches(batch_size, packed.rows, place, len(packed), packed.num_tokens, count)
    if workdir and not kept:  # at the end: a start that was refused leaves nothing behind
        tokenizer.save(workdir)
    return Data(tokenizer, train, valid, corpora, tuple((weights / weights.sum()).tolist()))


def _order(sizes: Sequence[int], weights: Sequence[float] | None, seed: int) -> grain.MapDataset:
    """Running number -> row, rows of all corpora numbered through. Grain wants seeds below 2**32."""
    seeds = np.random.SeedSequence(seed).generate_state(len(sizes)).tolist()
    if weights is None:
        return grain.MapDataset.range(sum(sizes)).seed(seeds[0]).shuffle().repeat()
    ends = np.cumsum(sizes).tolist()
    parts = [grain.MapDataset.range(e - n, e).seed(s).shuffle().repeat() for n, e, s in zip(sizes, ends, seeds)]
    return grain.MapDataset.mix(parts, list(weights))


def _in_order(name: str, numbers: Int64[np.ndarray, "B"]) -> dict[str, list[int]]:
    return {name: numbers.tolist()}


def _located(corpora: Sequence[Tokenized], index: Int64[np.ndarray, "B"]) -> dict[str, list[int]]:
    """Rows by their number over all corpora -> by source."""
    ends = np.cumsum([len(c.packed["train"]) for c in corpora])
    owner = np.searchsorted(ends, index, side="right")
    return {
        corpora[k].name: (index[owner == k] - (ends[k] - len(corpora[k].packed["train"]))).tolist() for k in np.unique(owner)
    }


def _gather(packed: Sequence[Rows], index: Int64[np.ndarray, "B"]) -> Batch:
    """Rows by their number over all of `packed`."""
    ends = np.cumsum([len(p) for p in packed])
    owner = np.searchsorted(ends, index, side="right")
    batch: Batch = {}
    for k in np.unique(owner):
        mine = owner == k
        for name, rows in packed[k].rows(index[mine] - (ends[k] - len(packed[k]))).items():
            batch.setdefault(name, np.empty((len(index), *rows.shape[1:]), rows.dtype))[mine] = rows
    return batch


def choose_tokenizer(config: DataConfig, corpora: list[sources.Corpus], kept: Tokenizer | None) -> Tokenizer:
    """The tokenizer that is there already (`kept`, the run's or a prepared corpus's) where the configuration does not say
    exactly which, else the configured one."""
    size = tokenizers.bpe_size(config.tokenizer)
    if size and isinstance(kept, tokenizers.Json) and kept.vocab_size <= size:
        return kept  # the training text may have changed since; the run's ids may not
    if kept and config.tokenizer.endswith((".json", ".model")) and not Path(config.tokenizer).expanduser().exists():
        return kept  # a run folder that moved to another machine
    if size and not corpora:
        raise ConfigError(f"data.tokenizer={config.tokenizer!r}: the prepared text is in other tokens already ({kept.file}, "
                          f"{kept.vocab_size} ids): set data.tokenizer to the file in its folder")  # fmt: skip
    return _trained(config, corpora, size) if size else tokenizers.from_name(config.tokenizer)


def _accept(
    tokenizer: Tokenizer, config: DataConfig, vocab_size: int | None, kept: Tokenizer | None, workdir: str | Path | None
) -> None:
    """Raise `ConfigError` if the tokenizer has too many ids for the model, or the run has another one."""
    if vocab_size is not None and tokenizer.vocab_size > vocab_size:
        raise ConfigError(f"the tokenizer has {tokenizer.vocab_size} ids but model.vocab_size={vocab_size}: set "
                          f"model.vocab_size={tokenizer.vocab_size} or more, or choose a smaller data.tokenizer")  # fmt: skip
    if kept and kept.fingerprint != tokenizer.fingerprint:
        raise ConfigError(f"{workdir} holds a run with another tokenizer ({kept.file}, {kept.vocab_size} ids) than data.source="
                          f"{config.source!r} with data.tokenizer={config.tokenizer!r}: use another workdir")  # fmt: skip


def _trained(config: DataConfig, corpora: list[sources.Corpus], size: int) -> Tokenizer:
    def build(folder: Path) -> None:
        cache.announce(f"training a byte-level BPE of {size} ids on the training text")
        tokenizers.train_bpe((text for c in corpora for text in c.documents("train")), size).save(folder)

    key = cache.digest("bpe", tokenizers.hf.__version__, str(size), *(c.fingerprint for c in corpora))[:24]
    return tokenizers.load(cache.folder(Path(config.cache_dir).expanduser() / "tokenizers" / key, build))


def _prepared(name: str, corpus: Prepared) -> Tokenized:
    splits = corpus.about["splits"]
    counts = ({split: about[key] for split, about in splits.items()} for key in ("documents", "text_bytes"))
    return Tokenized(name, corpus.fingerprint, corpus.packed, *counts)


def _tokenize(name: str, corpus: sources.Corpus, tokenizer: Tokenizer, config: DataConfig, seq_len: int) -> Tokenized:
    """The corpus as packed rows; tokens lie in the cache, one file a split, for every seq_len and bos setting."""
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")

    def build(folder: Path) -> None:
        about = {}
        for split in ("train", "valid"):
            cache.announce(f"tokenizing the {split} split of {name}")
            lengths, text_bytes = [], 0

            def counted(texts):
                nonlocal text_bytes
                for text in texts:
                    text_bytes += len(text.encode())
                    yield text

            with open(folder / f"{split}.tokens", "wb") as file:
                for ids in tokenizer.encode_many(counted(corpus.documents(split))):
                    file.write(np.array([tokenizer.bos_id], dtype).data)
                    file.write(ids.astype(dtype).data)
                    lengths.append(len(ids) + 1)
            np.save(folder / f"{split}.starts.npy", np.cumsum([0, *lengths])[:-1].astype(np.int64), allow_pickle=False)
            if not text_bytes:
                raise ConfigError(f"data.source {name}: its {split} split holds no text")
            about[split] = {"documents": len(lengths), "text_bytes": text_bytes}
        (folder / "about.json").write_text(json.dumps(about))

    key = cache.digest("tokens", FORMAT, corpus.fingerprint, tokenizer.fingerprint)[:24]
    folder = cache.folder(Path(config.cache_dir).expanduser() / "tokens" / key, build)
    about = json.loads((folder / "about.json").read_text())
    packed = {}
    for split in about:
        tokens = np.memmap(folder / f"{split}.tokens", dtype, mode="r")
        starts = np.load(folder / f"{split}.starts.npy", allow_pickle=False)
        packed[split] = Packed(Stream(tokens, starts), seq_len, tokenizer.bos_id, config.bos)
    return Tokenized(
        name, corpus.fingerprint, packed, *({s: a[k] for s, a in about.items()} for k in ("documents", "text_bytes"))
    )


def _synthetic(spec: sources.Spec, config: DataConfig, seq_len: int, batch_size: int, seed: int, workdir, vocab_size) -> Data:
    """Backcopy needs no corpus and brings its own tokenizer: `data.tokenizer` and `data.bos` do not matter."""
    if spec.name != "backcopy":
        raise ConfigError(
            f"data.source {spec}: the only synthetic source is synthetic:backcopy{suggest(spec.name, ['backcopy'])}"
        )
    task = backcopy.from_speeches()
    kept = tokenizers.load(workdir) if workdir else None
    _accept(task.tokenizer, config, vocab_size, kept, workdir)
    if workdir and not kept:
        task.tokenizer.save(workdir)
    place = functools.partial(_in_order, str(spec))
    train = Batches(batch_size, lambda numbers: task.rows(seed, "train", numbers, seq_len), place, None, None, None)
    rows = SYNTHETIC_VALID_ROWS - SYNTHETIC_VALID_ROWS % batch_size or batch_size  # whole batches only: there is no end to pad
    # The held-out rows do not depend on the seed: runs with different seeds are compared on the same ones.
    valid = Batches(
        batch_size, lambda numbers: task.rows(0, "valid", numbers, seq_len), place, rows, rows * seq_len, rows // batch_size
    )
    return Data(task.tokenizer, train, {str(spec): valid}, task=task)
