"""A table of finished runs, seeds averaged: python -m experiments.table RUN_DIR [RUN_DIR ...]

Runs whose configs differ only in `train.seed` form a row: mean (and standard deviation) of the last held-out loss, bos_share, sink
rate, gate mean and largest activation.
"""

import collections
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

COLUMNS = ("held-out loss", "bos_share", "best head", "sink_rate", "gate mean", "max activation")


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *rows))


def last(path: Path) -> dict:
    return json.loads(path.read_text().splitlines()[-1])


def summary(run: Path) -> dict:
    """The numbers a run ends with. A layer with several gates: the mean over all of them."""
    heads, held_out = last(run / "heads.jsonl"), last(run / "eval.jsonl")
    gates = heads.get("gate_mean")
    gates = [np.mean(g) for g in gates.values()] if isinstance(gates, dict) else gates
    return {
        "held-out loss": held_out["loss"],
        "bos_share": np.mean(heads["bos_share"]),
        "best head": np.max(heads["bos_share"]),
        "sink_rate": heads["sink_rate"],
        "gate mean": np.nan if gates is None else np.mean(gates),
        "max activation": np.max(heads["activation_max"]),
    }


def main(runs: list[str]) -> None:
    groups = collections.defaultdict(list)
    for run in map(Path, runs):
        groups[json.loads((run / "config.json").read_text())["name"]].append(summary(run))
    lines = []
    for name, rows in groups.items():
        cells = [[row[column] for row in rows] for column in COLUMNS]
        texts = ["-" if np.isnan(c[0]) else f"{np.mean(c):.4g} ± {np.std(c, ddof=min(1, len(c) - 1)):.2g}" for c in cells]
        lines.append([name, str(len(rows)), *texts])
    print(markdown(["run", "seeds", *COLUMNS], lines), end="")


if __name__ == "__main__":
    main(sys.argv[1:])
