"""Loss spikes of any training curve, from a file of ours or of somebody else's."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow
import pyarrow.csv
from jaxtyping import Float64

from gatedattn.config import ConfigError, suggest

WINDOW, NATS, DEVIATIONS = 50, 0.1, 8.0
WARM_UP = 10  # finite points that a running median needs
STEPS = ("step", "_step", "global_step", "iteration", "iter", "tokens")
CLOCKS = ("wall time", "wall_time", "time", "timestamp", "_timestamp", "_runtime")
BLOCK = 1 << 24  # bytes of JSON lines parsed at a time


@dataclass(frozen=True)
class Curve:
    """A curve by ascending step, each step once, finite values only; and how many points were left out.

    missing: no value there (an empty cell, an absent key), or no step; nonfinite: NaN, infinite, or null in JSON, which is how
    JSON writes both; duplicates: the last of several values at a step is kept; unordered: steps that came after a larger one.
    """

    name: str
    steps: Float64[np.ndarray, "n"]
    values: Float64[np.ndarray, "n"]
    missing: int = 0
    nonfinite: int = 0
    duplicates: int = 0
    unordered: int = 0

    @classmethod
    def of(cls, name: str, steps, values, missing: int = 0, nonfinite: int = 0) -> Curve:
        """From points as they were logged. NaN values that are already counted as missing must be left out before."""
        steps, values = np.asarray(steps, float), np.asarray(values, float)
        placed, finite = np.isfinite(steps), np.isfinite(values)
        missing += int((~placed).sum())
        nonfinite += int((placed & ~finite).sum())
        steps, values = steps[placed & finite], values[placed & finite]
        unordered = int((steps[1:] < np.maximum.accumulate(steps)[:-1]).sum()) if len(steps) else 0
        if unordered:
            order = np.argsort(steps, kind="stable")
            steps, values = steps[order], values[order]
        last = np.append(steps[1:] != steps[:-1], True)[: len(steps)]
        return cls(name, steps[last], values[last], missing, nonfinite, int((~last).sum()), unordered)


@dataclass(frozen=True)
class Spike:
    """start, end: steps of its first and last point; height: its largest rise; length: its points."""

    start: float
    end: float
    height: float
    length: int


def rises(values: Float64[np.ndarray, "n"]) -> tuple[Float64[np.ndarray, "n"], Float64[np.ndarray, "n"]]:
    """By how much each value exceeds the running median, and how much of that is still noise.

        rise_t  = x_t - median(x_{t-50} .. x_{t-1})
        noise_t = |rise_t - median(rise_{t-50} .. rise_{t-1})|
        limit_t = max(0.1, 8 sigma_t),   sigma_t = 1.4826 median(noise_{t-50} .. noise_{t-1})

    1.4826 makes the median absolute deviation the standard deviation of a Gaussian. A loss that falls lies below its running
    median all the time: that is no noise, so the rises are centred first. The medians are of the last 50 points, of at least 10;
    before all exist (30 points in all) the limit is infinite.
    """

    def running(x: pd.Series) -> pd.Series:
        return x.rolling(WINDOW, min_periods=WARM_UP).median().shift(1)

    x = pd.Series(np.asarray(values, float))
    rise = x - running(x)
    noise = (rise - running(rise)).abs()
    limit = np.maximum(NATS, DEVIATIONS * 1.4826 * running(noise)).fillna(np.inf)
    return rise.to_numpy(), limit.to_numpy()


def detect(curve: Curve) -> list[Spike]:
    """The loss spikes of a curve: maximal runs of consecutive points whose rise exceeds the limit (see `rises`)."""
    rise, limit = rises(curve.values)
    above = rise > limit
    edges = np.flatnonzero(np.diff(np.concatenate([[False], above, [False]])))
    return [
        Spike(float(curve.steps[a]), float(curve.steps[b - 1]), float(rise[a:b].max()), int(b - a))
        for a, b in zip(edges[::2], edges[1::2])
    ]


def read(path: str | Path, columns: Sequence[str] = ()) -> list[Curve]:
    """The curves in a .jsonl or .csv file (also with ; or tabs).

    By default the column `loss`; without one, all whose name holds "loss"; without those, all columns of numbers. Steps
    come from the first of step, _step, global_step, iteration, iter and tokens that is there, otherwise points are counted.

    Raises ConfigError for a file that cannot be read as either, has no such column, or no numbers in it.
    """
    path = Path(path)
    try:
        with open(path, "rb") as file:
            start = file.read(4096).lstrip(b"\xef\xbb\xbf \r\n")
        if not start:
            raise ConfigError(f"{path} is empty")
        return (_read_jsonl if start.startswith(b"{") else _read_csv)(path, columns)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None


def _choose(path: Path, names: Sequence[str], columns: Sequence[str]) -> tuple[str | None, list[str]]:
    """The column of steps, if there is one, and those of the curves."""
    known = {name.strip().casefold(): name for name in reversed(names)}
    step = next((known[name] for name in STEPS if name in known), None)
    for name in columns:
        if name not in names:
            raise ConfigError(f"{path} has no column {name!r}{suggest(name, names)}; it has: {', '.join(names)}")
    # Weights & Biases exports add the extremes of each curve as columns of their own.
    others = [n for n in names if n != step and n.casefold() not in CLOCKS + STEPS and not n.endswith(("__MIN", "__MAX"))]
    chosen = list(columns) or ["loss"] * ("loss" in names) or [n for n in others if "loss" in n.casefold()] or others
    if not chosen:
        raise ConfigError(f"{path} has no column of numbers besides {', '.join(names)}")
    return step, chosen


def _title(path: Path, name: str, several: bool) -> str:
    return f"{path}:{name}" if several or name != "loss" else str(path)


def _read_csv(path: Path, columns: Sequence[str]) -> list[Curve]:
    with open(path, newline="", encoding="utf-8-sig") as file:
        header = file.readline()
        try:
            delimiter = csv.Sniffer().sniff(header, ",;\t").delimiter
        except csv.Error:  # one column
            delimiter = ","
    names = next(csv.reader([header], delimiter=delimiter))
    step, chosen = _choose(path, names, columns)
    wanted = list(dict.fromkeys([*([step] if step else []), *chosen]))
    options = pyarrow.csv.ConvertOptions(
        include_columns=wanted,
        column_types=dict.fromkeys(wanted, pyarrow.float64()),
        null_values=["", "NA", "N/A", "null", "None", "-"],  # "nan" and "inf" are numbers here
    )
    try:
        table = pyarrow.csv.read_csv(path, parse_options=pyarrow.csv.ParseOptions(delimiter=delimiter), convert_options=options)
    except pyarrow.ArrowInvalid as error:
        raise ConfigError(f"{path}: {str(error).splitlines()[0]}") from None
    at = table[step].to_numpy() if step else np.arange(table.num_rows, dtype=float)
    curves = []
    for name in chosen:
        there = table[name].is_valid().to_numpy()
        values = table[name].to_numpy()[there]
        curves.append(Curve.of(_title(path, name, len(chosen) > 1), at[there], values, int((~there).sum())))
    return curves


def _read_jsonl(path: Path, columns: Sequence[str]) -> list[Curve]:
    blocks = _objects(path)
    first = next(blocks, [])
    names = list(dict.fromkeys(key for record in first for key in record))
    numeric = [n for n in names if any(isinstance(r.get(n), (int, float)) for r in first)]
    if not numeric:
        raise ConfigError(f"{path} has no numbers in its lines")
    step, chosen = _choose(path, names if columns else numeric, columns)
    steps, values, missing = [], {name: [] for name in chosen}, dict.fromkeys(chosen, 0)
    count = 0
    for block in _chain(first, blocks):
        at = _numbers([record.get(step) for record in block]) if step else np.arange(count, count + len(block), dtype=float)
        steps.append(at)
        count += len(block)
        for name in chosen:
            found = [record.get(name) for record in block]
            there = np.ones(len(block), bool)
            if None in found:  # absent, or null?
                there[:] = [name in record for record in block]
            missing[name] += int((~there).sum())
            values[name].append((there, _numbers(found)))
    at = np.concatenate(steps)
    curves = []
    for name in chosen:
        there, found = (np.concatenate(parts) for parts in zip(*values[name]))
        curves.append(Curve.of(_title(path, name, len(chosen) > 1), at[there], found[there], missing[name]))
    return curves


def _chain(first: list[dict], rest: Iterator[list[dict]]) -> Iterator[list[dict]]:
    yield first
    yield from rest


def _objects(path: Path) -> Iterator[list[dict]]:
    """The objects of a .jsonl file, many at a time; lines that are none (one cut short by a crash) are left out."""
    with open(path, "rb") as file:
        while lines := [line for line in file.readlines(BLOCK) if not line.isspace()]:
            try:
                objects = json.loads(b"[" + b",".join(lines) + b"]")
            except ValueError:
                objects = list(filter(None, map(_object, lines)))
            yield [item for item in objects if isinstance(item, dict)]


def _object(line: bytes) -> dict | None:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _numbers(items: list) -> Float64[np.ndarray, "n"]:
    """None and what is not a number become NaN."""
    try:
        return np.array(items, float)
    except (ValueError, TypeError):
        return pd.to_numeric(pd.Series(items, dtype=object), errors="coerce").to_numpy(float)


def summary(curve: Curve, spikes: Sequence[Spike]) -> dict:
    """A curve's row in the table that compares curves."""
    return {
        "curve": curve.name,
        "points": len(curve.values),
        "missing": curve.missing,
        "non-finite": curve.nonfinite,
        "duplicates": curve.duplicates,
        "unordered": curve.unordered,
        "spikes": len(spikes),
        "highest": max((s.height for s in spikes), default=0.0),
        "longest": max((s.length for s in spikes), default=0),
        "share": sum(s.length for s in spikes) / max(len(curve.values), 1),
    }
