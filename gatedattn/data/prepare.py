"""`python -m gatedattn prepare SOURCE DIR`: a corpus tokenized and packed once, to be read by any number of runs and hosts.

The corpus is planned in parts of about `PART_BYTES` of text, whatever the number of processes, and each part becomes one file:
the result does not depend on how it was made. A part is written under another name, checked, and renamed; the same command goes
on after a kill, and does again what is missing or damaged.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter
from jaxtyping import Integer
from tqdm import tqdm

from gatedattn.config import ConfigError, DataConfig
from gatedattn.data import sources, tokenizers
from gatedattn.data.cache import announce, file_digest, write_atomically, writing
from gatedattn.data.packing import Packed, Stream
from gatedattn.data.records import ABOUT, FORMAT, dtype
from gatedattn.data.tokenizers import Tokenizer

PART_BYTES = 1 << 25
PLAN = "plan.json"


def prepare(
    source: str,
    folder: str | Path,
    *,
    tokenizer: str = DataConfig.tokenizer,
    seq_len: int,
    bos: str = DataConfig.bos,
    valid_fraction: float = DataConfig.valid_fraction,
    cache_dir: str = DataConfig.cache_dir,
    workers: int = 0,
    part_bytes: int = PART_BYTES,
) -> dict:
    """Prepare one source into `folder`; `workers` processes (0: one per core). Returns what about.json says.

    Raises `ConfigError` if the source or the tokenizer cannot be used, and if the folder holds something else: another
    preparation, or one of a source that has changed since.
    """
    from gatedattn.data.loader import choose_tokenizer

    folder = Path(folder).expanduser()
    config = DataConfig(source=source, tokenizer=tokenizer, bos=bos, valid_fraction=valid_fraction, cache_dir=cache_dir)
    specs = sources.parse(source)
    if len(specs) > 1 or specs[0].kind not in ("tfds", "text"):
        raise ConfigError(
            f"{source}: one tfds: or text: source is prepared at a time; mix the folders afterwards with prepared:DIR@WEIGHT,..."
        )
    if seq_len < 1:
        raise ConfigError(f"seq_len={seq_len}: must be positive")
    if folder.exists() and not folder.is_dir() or folder.is_dir() and any(folder.iterdir()) and not (folder / PLAN).exists():
        raise ConfigError(f"{folder} holds something else: give a new folder")
    corpus = sources.open_corpus(specs[0], config)
    chosen = choose_tokenizer(config, [corpus], tokenizers.load(folder) if folder.is_dir() else None)
    parts = [
        {"name": f"{split}-{number:05}.array_record", "split": split, "start": start, "stop": stop, "text": size}
        for split in ("train", "valid")
        for number, (start, stop, size) in enumerate(corpus.parts(split, part_bytes))
    ]
    plan = {
        "format": FORMAT, "source": source, "fingerprint": corpus.fingerprint, "tokenizer": chosen.fingerprint, "seq_len": seq_len,
        "bos": bos, "valid_fraction": valid_fraction, "part_bytes": part_bytes,
    }  # fmt: skip
    _begin(folder, plan, chosen)
    done = {part["name"]: about for part in parts if (about := _finished(folder, part["name"]))}
    left = [part for part in parts if part["name"] not in done]
    if done and left:
        announce(f"{len(done)} of {len(parts)} parts are there already")
    bar = tqdm(total=sum(p["text"] for p in parts), initial=sum(p["text"] for p in parts if p["name"] in done),
               unit="B", unit_scale=True, desc="prepare", file=sys.stderr, mininterval=1 if sys.stderr.isatty() else 30)  # fmt: skip
    with bar, writing(folder, "make room; the same command goes on"):
        for name, about in _work(folder, config, seq_len, left, workers or os.cpu_count() or 1):
            done[name] = about
            bar.update(next(part["text"] for part in left if part["name"] == name))
        return _finish(folder, plan, parts, done)


def _begin(folder: Path, plan: dict, tokenizer: Tokenizer) -> None:
    """Start the folder, or make sure that it is of the same plan."""
    path = folder / PLAN
    if path.exists():
        try:
            before = json.loads(path.read_text())
            changed = [key for key in plan if before.get(key) != plan[key]]
        except (ValueError, AttributeError):
            raise ConfigError(f"{path} is damaged: delete {folder} and prepare it again") from None
        if changed == ["fingerprint"]:
            raise ConfigError(
                f"{plan['source']} has changed since {folder} was prepared from it: give a new folder, or delete that one"
            )
        if changed:
            told = ", ".join(f"{key} was {before.get(key)!r}, is now {plan[key]!r}" for key in changed if key != "fingerprint")
            raise ConfigError(f"{folder} was prepared otherwise ({told}): give a new folder, or delete that one")
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save(folder)
        write_atomically(path, json.dumps(plan, indent=1).encode())
    except OSError as error:  # /proc says that it does not exist
        raise ConfigError(f"{folder} cannot be written ({error.strerror})") from None


def _finished(folder: Path, name: str) -> dict | None:
    """What a part holds, if it is there and intact."""
    try:
        about = json.loads((folder / f"{name}.json").read_text())
        if about["bytes"] == (folder / name).stat().st_size and about["sha256"] == file_digest(folder / name):
            return about
        announce(f"{folder / name} is damaged: doing it again")
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError):
        announce(f"{folder / name}.json is damaged: doing the part again")
    return None


def _work(folder: Path, config: DataConfig, seq_len: int, parts: list[dict], workers: int) -> Iterator[tuple[str, dict]]:
    settings = (str(folder), dataclasses.asdict(config), seq_len)
    try:
        if workers == 1 or len(parts) <= 1:
            for part in parts:
                yield part["name"], _part(settings, part)
            return
        # One process a core, each with a tokenizer of its own: a tokenizer's threads would wait for one interpreter.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        with ProcessPoolExecutor(min(workers, len(parts)), get_context("spawn"), initializer=_worker) as pool:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # workers are born deaf to Ctrl-C, see _worker
            futures = {pool.submit(_part, settings, part): part["name"] for part in parts}
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            try:
                for future in as_completed(futures):
                    yield futures[future], future.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)  # waits: a worker left behind would write under the next attempt
                raise
    except BaseException:
        for path in folder.glob(".*.tmp"):  # a full disk has no room for what is half-written
            path.unlink()
        raise


def _worker() -> None:
    """Ctrl-C ends a worker without a word (the parent has one); and one whose parent is killed would wait for ever."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=lambda: (parent_process().join(), os._exit(1)), daemon=True).start()


def _part(settings: tuple, part: dict) -> dict:
    """Make one part: its documents tokenized, packed, written, read back and renamed."""
    folder, config, seq_len = Path(settings[0]), DataConfig(**settings[1]), settings[2]
    tokenizer = _opened_tokenizer(folder)
    corpus = sources.open_corpus(sources.parse(config.source)[0], config)
    text_bytes = 0

    def texts() -> Iterator[str]:
        nonlocal text_bytes
        for text in corpus.documents(part["split"], part["start"], part["stop"]):
            text_bytes += len(text.encode())
            yield text

    stream = Stream.of(tokenizer.encode_many(texts()), tokenizer.bos_id, dtype(tokenizer.vocab_size))
    about: dict[str, Any] = {
        "name": part["name"],
        "documents": len(stream.starts),
        "text_bytes": text_bytes,
        "rows": 0,
        "tokens": 0,
    }
    path = folder / part["name"]
    temporary = path.with_name(f".{path.name}.tmp")
    packed = Packed(stream, seq_len, tokenizer.bos_id, config.bos) if len(stream.tokens) else None
    if packed:
        about |= {"rows": len(packed), "tokens": packed.num_tokens}
    _write(temporary, packed.windows(0, len(packed)) if packed else (), about["rows"])
    about |= {"bytes": temporary.stat().st_size, "sha256": file_digest(temporary)}
    os.replace(temporary, path)
    write_atomically(folder / f"{path.name}.json", json.dumps(about).encode())
    return about


def _write(path: Path, windows: Iterable[Integer[np.ndarray, "_"]], count: int) -> None:
    size = 0
    try:
        writer = ArrayRecordWriter(str(path), "group_size:1")
        for window in windows:
            size += window.nbytes
            writer.write(window.tobytes())
        writer.close()
        reader = ArrayRecordReader(str(path))
        if reader.num_records() != count:
            raise OSError(f"{path}: {reader.num_records()} of {count} rows were written")
        reader.close()
    except (OSError, RuntimeError):
        if shutil.disk_usage(path.parent).free < size:  # array_record may lose rows without a word of it
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from None
        raise
    with open(path, "rb") as file:
        os.fsync(file.fileno())


_tokenizers: dict[Path, Tokenizer] = {}


def _opened_tokenizer(folder: Path) -> Tokenizer:
    if folder not in _tokenizers:
        _tokenizers[folder] = tokenizers.load(folder)
    return _tokenizers[folder]


def _finish(folder: Path, plan: dict, parts: list[dict], done: dict[str, dict]) -> dict:
    splits: dict[str, dict] = {}
    for part in parts:
        split = splits.setdefault(part["split"], {"files": [], "documents": 0, "text_bytes": 0})
        about = done[part["name"]]
        split["files"].append({key: about[key] for key in ("name", "rows", "tokens", "bytes", "sha256")})
        for key in ("documents", "text_bytes"):
            split[key] += about[key]
    for split in ("train", "valid"):
        if not splits.get(split, {}).get("text_bytes"):
            raise ConfigError(f"data.source {plan['source']}: its {split} split holds no text")
    about = plan | {"splits": splits}
    write_atomically(folder / ABOUT, (json.dumps(about, indent=1) + "\n").encode())
    return about
