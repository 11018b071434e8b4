"""Folders that are built once and then reused: checked when they are opened, swapped in with one rename."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from gatedattn.config import ConfigError

MANIFEST = "manifest.json"
DISK_FAULTS = ("No space left on device", "Permission denied", "Read-only file system", "File too large", "Disk quota exceeded")


def announce(line: str) -> None:
    print(f"[data] {line}", file=sys.stderr, flush=True)


def digest(*parts: str | bytes) -> str:
    """sha256 over the parts; lengths are hashed too, so that no two lists of parts collide."""
    total = hashlib.sha256()
    for part in parts:
        raw = part.encode(errors="surrogateescape") if isinstance(part, str) else part
        total.update(len(raw).to_bytes(8, "little") + raw)
    return total.hexdigest()


def file_digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def writing(path: Path, remedy: str) -> Iterator[None]:
    """Raises `ConfigError` where a disk cannot be written, whatever a library makes of it (array_record: a RuntimeError)."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        if not (reason := next((fault for fault in DISK_FAULTS if fault in str(error)), None)):
            raise
        raise ConfigError(f"{path} cannot be written ({reason}): {remedy}") from None


def write_atomically(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            file.write(content)
            file.flush()
            os.chmod(file.name, 0o644)  # temporary files are private; a run's folder may be shared
            os.replace(file.name, path)
        except OSError:
            os.unlink(file.name)
            raise


def folder(path: Path, build: Callable[[Path], None]) -> Path:
    """`path`, built by `build(empty_folder)` unless an intact copy is there.

    A manifest of sizes and sha256 sums decides what is intact; anything else is rebuilt and said so. Two processes may build at
    the same time: each works in a folder of its own, the first rename wins and the other's copy is thrown away.
    """
    path = Path(path)
    if path.exists():
        if fault := _fault(path):
            announce(f"{path} is damaged ({fault}): rebuilding it")
        else:
            return path
    with writing(path.parent, "make room, or give another data.cache_dir"):
        return _built(path, build)


def _built(path: Path, build: Callable[[Path], None]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    try:
        os.chmod(work, 0o755)
        build(work)
        (work / MANIFEST).write_text(json.dumps(_sums(work), indent=1))
        if path.exists() and _fault(path):
            _discard(path)
        try:
            os.rename(work, path)
        except OSError:  # another process was first; its copy has the same content
            if fault := _fault(path):
                raise OSError(f"{path}: cannot be replaced ({fault}); delete it and start again") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return path


def _discard(path: Path) -> None:
    """Move a damaged folder out of the way before deleting it, so that nobody opens half of it."""
    grave = tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.damaged.")
    try:
        os.rename(path, Path(grave) / "old")
    except FileNotFoundError:
        pass  # another process has just done it
    shutil.rmtree(grave, ignore_errors=True)


def _sums(path: Path) -> dict[str, list]:
    files = sorted(p for p in path.rglob("*") if p.is_file() and p.name != MANIFEST)
    return {str(p.relative_to(path)): [p.stat().st_size, file_digest(p)] for p in files}


def _fault(path: Path) -> str | None:
    """What is wrong with a built folder, or None."""
    try:
        expected = json.loads((path / MANIFEST).read_text())
        for name, (size, sha256) in expected.items():
            if (path / name).stat().st_size != size:
                return f"{name} has the wrong size"
            if file_digest(path / name) != sha256:
                return f"{name} has the wrong sha256"
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return str(error) or type(error).__name__
    return None
