"""Where documents come from: `data.source` -> corpora with a train and a validation split.

tfds:NAME            a TFDS dataset stored as ArrayRecord, read without TensorFlow; NAME may be any that TFDS knows or finds in
                     TFDS_DATA_DIR; `sotu` is our own and needs no download
text:GLOB            one UTF-8 file = one document
prepared:DIR         either of the two, tokenized and packed beforehand by `python -m gatedattn prepare` (see records.py)
synthetic:backcopy   see backcopy.py
"""

from __future__ import annotations

import glob
import hashlib
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

from gatedattn.config import ConfigError, DataConfig, suggest
from gatedattn.data.cache import announce, digest, file_digest

KINDS = ("tfds", "text", "prepared", "synthetic")
EXAMPLES = "tfds:sotu, text:books/*.txt or synthetic:backcopy"
READ_AT_ONCE = 64  # records; one by one, TFDS reads at 2 MB/s


@dataclass(frozen=True)
class Spec:
    kind: str
    name: str
    weight: float | None = None

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}"


def parse(source: str) -> list[Spec]:
    """The comma-separated parts of `data.source`, each `kind:name` or `kind:name@weight`. Weights: all of them or none.

    Raises ConfigError for an unknown kind, a weight that is not positive, weights on some parts only, a part given twice, or a
    synthetic source next to others (its tokens are symbols of its own).
    """
    specs = [_parse_one(part.strip()) for part in source.split(",")]
    names = [str(spec) for spec in specs]
    if repeated := next((n for n in names if names.count(n) > 1), None):
        raise ConfigError(f"data.source names {repeated} twice: give it once, with a larger @weight")
    weighted = [spec.weight is not None for spec in specs]
    if any(weighted) and not all(weighted):
        raise ConfigError(
            f"data.source={source!r}: {names[weighted.index(False)]} has no @weight: give every source one, or none"
        )
    if len(specs) > 1 and any(spec.kind == "synthetic" for spec in specs):
        raise ConfigError(f"data.source={source!r}: a synthetic source has its own symbols and cannot be mixed; give it alone")
    return specs


def _parse_one(part: str) -> Spec:
    kind, colon, name = part.partition(":")
    if kind not in KINDS or not colon or not name:
        raise ConfigError(f"data.source part {part!r}: must be kind:name, kind one of {', '.join(KINDS)}{suggest(kind, KINDS)}"
                          f"; e.g. {EXAMPLES}")  # fmt: skip
    stem, at, last = name.rpartition("@")
    if at:
        try:
            weight = float(last)
        except ValueError:
            if kind not in ("text", "prepared"):  # a path may hold an @
                raise ConfigError(
                    f"data.source part {part!r}: weight {last!r} is not a number, write e.g. {kind}:{stem}@0.5"
                ) from None
        else:
            if not (weight > 0 and math.isfinite(weight)):
                raise ConfigError(f"data.source part {part!r}: weight {last} must be positive")
            return Spec(kind, stem, weight)
    return Spec(kind, name)


class Corpus(Protocol):
    """`fingerprint` changes with the content or the split; `documents` yields the texts of "train" or "valid", always in the
    same order, all or those from number `start` to `stop`; `parts` cuts a split into such ranges of about `size` bytes of text:
    (start, stop, bytes)."""

    @property
    def fingerprint(self) -> str: ...

    def documents(self, split: str, start: int = 0, stop: int | None = None) -> Iterator[str]: ...

    def parts(self, split: str, size: int) -> list[tuple[int, int, int]]: ...


def open_corpus(spec: Spec, config: DataConfig) -> Corpus:
    """The corpus of a tfds or text source. Raises ConfigError if there is none, or nothing in it."""
    if spec.kind == "tfds":
        return TfdsCorpus(spec.name, Path(config.cache_dir).expanduser() / "tfds", config.valid_fraction)
    return TextCorpus(spec.name, config.valid_fraction)


class TextCorpus:
    """The files a glob matches (`**` crosses folders), each one a document; a BOM is dropped, CRLF becomes LF, empty files do
    not count.

    A file is held out by a hash of its path below the glob's fixed part, so adding files moves no other; both splits get at
    least one. A lone file is cut in two where a paragraph begins.
    """

    def __init__(self, pattern: str, valid_fraction: float):
        self.pattern, self.valid_fraction = pattern, valid_fraction
        pattern = os.path.expanduser(pattern)
        found = [p for p in glob.glob(pattern, recursive=True) if os.path.isfile(p)]
        if not found:
            what = "matches no file" if glob.has_magic(pattern) else "is not a file"
            hint = f"; write text:{self.pattern}/*.txt" if os.path.isdir(pattern) else ""
            raise ConfigError(f"data.source text:{self.pattern} {what} (looked from {os.getcwd()}){hint}")
        root = os.path.dirname(re.split(r"[*?\[]", pattern)[0]) or "."
        paths = {os.path.relpath(p, root): Path(p) for p in sorted(found) if os.path.getsize(p) > 0}
        if not paths:
            raise ConfigError(f"data.source text:{self.pattern}: all {len(found)} files are empty")
        self.paths = paths
        ranked = sorted(paths, key=_rank)
        count = sum(_rank(name) < valid_fraction for name in ranked)
        held_out = set(ranked[: min(max(count, 1), len(ranked) - 1)])
        self.single = paths[ranked[0]] if len(ranked) == 1 else None
        self.files = {
            split: [p for name, p in paths.items() if (name in held_out) == (split == "valid")] for split in ("train", "valid")
        }

    @cached_property
    def fingerprint(self) -> str:
        sums = [part for name, path in self.paths.items() for part in (name, file_digest(path))]
        return digest("text", repr(self.valid_fraction), *sums)

    def documents(self, split, start=0, stop=None):
        if self.single:
            text = read_text(self.single)
            cut = self._cut(text)
            yield from [text[:cut] if split == "train" else text[cut:]][start:stop]
            return
        for path in self.files[split][start:stop]:
            if text := read_text(path):
                yield text

    def parts(self, split, size):
        if self.single:
            share = 1 - self.valid_fraction if split == "train" else self.valid_fraction
            return [(0, 1, int(share * os.path.getsize(self.single)))]
        parts, start, total = [], 0, 0
        for number, path in enumerate(self.files[split], 1):
            total += os.path.getsize(path)
            if total >= size or number == len(self.files[split]):
                parts.append((start, number, total))
                start, total = number, 0
        return parts

    def _cut(self, text: str) -> int:
        """Where validation begins in a lone document: the paragraph, else line, else word that begins nearest to the aim, so
        that the held-out share stays between half and one and a half times what was asked; failing that, any word."""
        aim, slack = int(len(text) * (1 - self.valid_fraction)), int(len(text) * self.valid_fraction / 2)
        for boundary, reach in ((r"\n\s*\n", slack), (r"\n", slack), (r"\s", slack), (r"\s", len(text))):
            window = re.compile(boundary).finditer(text, max(aim - reach, 0), min(aim + reach, len(text)))
            if ends := [m.end() for m in window if m.end() < len(text)]:
                return min(ends, key=lambda end: abs(end - aim))
        raise ConfigError(f"data.source text:{self.pattern} is one file of {len(text)} characters without a space: "
                          "nowhere to cut off a validation part")  # fmt: skip


def _rank(name: str) -> float:
    """A number in [0, 1) that depends on the name alone."""
    return int.from_bytes(hashlib.sha256(name.encode(errors="surrogateescape")).digest()[:8], "big") / 2**64


def read_text(path: Path) -> str:
    """A UTF-8 file, without BOM and with LF ends. Raises ConfigError with the place of a byte that is not UTF-8, or if the file
    cannot be read."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    try:
        return raw.decode("utf-8").removeprefix("\ufeff").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start} (0x{raw[error.start]:02x}); convert it, e.g. "
                          f"iconv -f latin1 -t utf-8") from None  # fmt: skip


class TfdsCorpus:
    """A TFDS dataset in ArrayRecord. Its own `validation` (else `test`) split is the validation set; a dataset without either
    gives the last `valid_fraction` of its training examples. The text is the feature `text`, or the only Text feature.

    Raises ConfigError if the dataset is unknown, cannot be prepared, is stored in another format, or has no text.
    """

    def __init__(self, name: str, cache_dir: Path, valid_fraction: float):
        import tensorflow_datasets as tfds

        self.name = name
        if re.split(r"[:/]", name)[0] == "sotu":
            from gatedattn.data import sotu

            sotu.prepare(cache_dir)
        self.builder = self._builder(tfds, cache_dir)
        self.splits = self._splits(valid_fraction)
        features = self.builder.info.features
        texts = [key for key in features if isinstance(features[key], tfds.features.Text)]
        if "text" not in texts and len(texts) != 1:
            raise ConfigError(f"tfds:{name} has no feature 'text', and not one other Text feature to take (its features: "
                              f"{', '.join(features)})")  # fmt: skip
        self.feature = "text" if "text" in texts else texts[0]
        # Shard sizes stand in for the content: a pass over the records of a large dataset would take hours.
        files = sorted(Path(self.builder.data_dir).glob("*"))
        about = [f"{f.name} {f.stat().st_size}" for f in files if f.name != "manifest.json"]
        self.fingerprint = digest("tfds", self.builder.info.full_name, repr(self.splits), self.feature, *about)

    def _builder(self, tfds, cache_dir: Path):
        builder = None
        for data_dir in (cache_dir, None):  # None: TFDS_DATA_DIR or ~/tensorflow_datasets
            try:
                builder = tfds.builder(self.name, data_dir=data_dir, try_gcs=False)
            except tfds.core.DatasetNotFoundError:
                continue
            if builder.is_prepared():
                break
        if builder is None:
            known = ["sotu", *tfds.list_builders(with_community_datasets=False)]
            raise ConfigError(f"data.source tfds:{self.name}: TFDS knows no such dataset{suggest(self.name, known, 3)}; "
                              "one of your own must lie in TFDS_DATA_DIR")  # fmt: skip
        if not builder.is_prepared():
            announce(f"preparing tfds:{self.name} (downloads it)")
            try:
                builder = tfds.builder(self.name, data_dir=cache_dir, file_format="array_record", try_gcs=False)
                builder.download_and_prepare()
            except Exception as error:  # network, missing packages, manual downloads: TFDS raises what it likes
                first = next(iter(str(error).splitlines()), "")[:200]
                raise ConfigError(
                    f"tfds:{self.name} could not be prepared without TensorFlow: {type(error).__name__}: {first}"
                ) from error
        stored = getattr(builder.info.file_format, "value", None)
        if stored != "array_record":
            raise ConfigError(f"tfds:{self.name} in {builder.data_dir} is stored as {stored}: only array_record is read "
                              f"without TensorFlow; prepare it again with file_format='array_record'")  # fmt: skip
        return builder

    def _splits(self, valid_fraction: float) -> dict[str, str]:
        splits = self.builder.info.splits
        if "train" not in splits:
            raise ConfigError(f"tfds:{self.name} has no split 'train' (it has {', '.join(splits)})")
        for valid in ("validation", "test"):
            if valid in splits and splits[valid].num_examples:
                return {"train": "train", "valid": valid}
        count = splits["train"].num_examples
        cut = min(int(count * (1 - valid_fraction)), count - 1)
        if cut < 1:
            raise ConfigError(f"tfds:{self.name} has {count} training examples: too few to hold one out")
        return {"train": f"train[:{cut}]", "valid": f"train[{cut}:]"}

    def documents(self, split, start=0, stop=None):
        records = self.builder.as_data_source(split=self.splits[split])
        stop = len(records) if stop is None else stop
        for first in range(start, stop, READ_AT_ONCE):
            for number, record in enumerate(records.__getitems__(range(first, min(first + READ_AT_ONCE, stop))), first):
                if raw := record[self.feature]:
                    yield self._text(raw, number) if isinstance(raw, bytes) else raw

    def _text(self, raw: bytes, number: int) -> str:
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"tfds:{self.name}: example {number} is not UTF-8 at byte {error.start}") from None

    def parts(self, split, size):
        count = len(self.builder.as_data_source(split=self.splits[split]))
        whole = self.builder.info.splits[self.splits[split].partition("[")[0]]
        mean = max(whole.num_bytes / max(whole.num_examples, 1), 1)
        step = max(int(size / mean), 1)
        return [
            (start, min(start + step, count), int((min(start + step, count) - start) * mean)) for start in range(0, count, step)
        ]
