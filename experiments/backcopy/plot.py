"""Draw the sink of Bigram-Backcopy runs: python -m experiments.backcopy.plot RUN_DIR [RUN_DIR ...] --out=sink.png

Left: share of attention on BOS over non-trigger queries (heads.jsonl) by step, a line per run, coloured by gate. Right: training
loss (metrics.jsonl) of the same runs.
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

COLORS = {"none": "#c44e52", "g1": "#4c72b0"}
LABELS = {"none": "baseline", "g1": "with the G1 gate"}


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path("sink.png"))
    args = parser.parse_args()

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    seen = set()
    for run in args.runs:
        gates = json.loads((run / "config.json").read_text())["model"]["gates"]
        style = dict(
            color=COLORS.get(gates, "gray"), label=None if gates in seen else LABELS.get(gates, gates), lw=1.8, alpha=0.85
        )
        seen.add(gates)
        heads = lines(run / "heads.jsonl")
        left.plot([h["step"] for h in heads], [np.mean(h["bos_share"]) for h in heads], marker=".", **style)
        metrics = lines(run / "metrics.jsonl")
        right.plot([m["step"] for m in metrics], [m["loss"] for m in metrics], **style)
    left.set(xlabel="training step", ylabel="attention on BOS", ylim=(-0.02, 1.02), title="The attention sink")
    left.legend(loc="center right", frameon=False)
    right.set(xlabel="training step", ylabel="loss (nats)", title="Training loss")
    right.set_yscale("log")
    right.set_yticks([1.2, 1.5, 2, 3, 4], ["1.2", "1.5", "2", "3", "4"])
    right.minorticks_off()
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    figure.savefig(args.out, dpi=150)
    print(args.out)


if __name__ == "__main__":
    main()
