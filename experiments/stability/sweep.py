"""What steadies training: norms, clips and the gate at rising learning rates, in float32 and bfloat16.

    python -m experiments.variants.corpus --out=runs/variants/text
    python -m experiments.stability.sweep --out=experiments/stability/results [--jobs=2] [--minutes=60]
    python -m experiments.stability.sweep --out=runs/smoke --runs=runs/smoke/runs --smoke

The recipe of experiments/variants without its scaled embeddings, for 500 steps (of which the first 50 warm up), at 1, 4 and 16 times its
learning rate of 3e-3; how runs are made and resumed: there. From them: loss, spikes of the loss curve and what comes nearest to one (nats
above the median of 50 steps, and what would be a spike: `gatedattn.probes.spikes`), gradient norms after the warm-up and before clipping,
and the largest |residual stream| after each block.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from experiments import command
from experiments.table import markdown
from experiments.variants.rows import Row
from experiments.variants.sweep import Study
from experiments.variants.sweep import main as sweep
from experiments.variants.tables import interval

TIMES = (1, 4, 16)
SHORT = (
    "--config.train.steps=500", "--config.optimizer.warmup_steps=50", "--config.probe.every=50", "--config.eval.every=250",
    "--config.model.embedding_scale=1",  # a start that is easily upset: see experiments/variants/config.py
)  # fmt: skip
ROWS = {
    "baseline": Row(options=SHORT),
    "QK-norm": Row(options=(*SHORT, "--config.model.qk_norm=True")),
    "sandwich norm": Row(options=(*SHORT, "--config.model.sandwich_norm=True")),
    "G1": Row("g1", SHORT),
    "gradients clipped at 0.1": Row(options=(*SHORT, "--config.optimizer.clip_norm=0.1")),
    "activations clipped at 10": Row(options=(*SHORT, "--config.model.activation_clip=10")),
    "activations clipped at 100": Row(options=(*SHORT, "--config.model.activation_clip=100")),
}
AGAIN = {"bfloat16": "--config.model.dtype=bfloat16", "scaled embedding": "--config.model.embedding_scale=14"}  # of two rows
for change, option in AGAIN.items():
    for name in ("baseline", "G1"):
        ROWS[f"{name}, {change}"] = dataclasses.replace(ROWS[name], options=(*ROWS[name].options, option))


def tables(results: list[dict]) -> str:
    lines, depth = [], []
    for row in ROWS:
        for times in TIMES:
            found = [r for r in results if (r["row"], r["times"]) == (row, times)]
            if not found:
                continue
            rise, limit = ([r["rise"][i] if r["rise"] else None for r in found] for i in range(2))
            norms = [[r["grad_norm"][i] if r["grad_norm"] else None for r in found] for i in range(3)]
            loss, spikes, gradients = ([r[name] for r in found] for name in ("loss", "spikes", "gradient_spikes"))
            cells = [interval(column) for column in (loss, spikes, rise, limit, gradients, *norms)]
            lines.append([row, f"x{times}", str(len(found)), *cells, str(sum(r["diverged"] for r in found))])
            layers = [r["activation_by_layer"] for r in found if r["activation_by_layer"]]
            if layers:
                depth.append([row, f"x{times}", *(interval(column) for column in zip(*layers))])
    curve, norm = ["loss", "spikes", "largest rise", "a spike is above"], ["gradient spikes", "norm, median", "99 %", "largest"]
    head = ["variant", "rate", "seeds", *curve, *norm, "diverged"]
    text = markdown(head, lines)
    if depth:
        blocks = [f"after block {n}" for n in range(len(depth[0]) - 2)]
        text += "\nLargest |residual stream|:\n\n" + markdown(["variant", "rate", *blocks], depth)
    return text


def draw(results: list[dict], path: Path) -> None:
    """Left: loss against the learning rate; a cross where a run diverged, at the top without a loss. Right: largest activation by depth."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    rates = sorted({r["times"] for r in results})
    figure = Figure(figsize=(6 + 3 * len(rates), 3.6), layout="constrained")
    left, *right = figure.subplots(1, 1 + len(rates), width_ratios=[1.4] + [1] * len(rates))
    for axis in right[1:]:
        axis.sharey(right[0])
    for row in ROWS:
        plain, _, change = row.partition(", ")
        style, color = {"": "-", "bfloat16": "--", "scaled embedding": ":"}[change], colormaps["tab10"](list(ROWS).index(plain))
        mine = [r for r in results if r["row"] == row]
        means = [
            (t, np.mean(x)) for t in rates if (x := [r["loss"] for r in mine if r["times"] == t and r["loss"] is not None])
        ]
        left.plot(*zip(*means), style, color=color, marker=".", label=row) if means else None
        for r in mine:
            if r["diverged"] and r["loss"] is None:  # at the top
                left.plot([r["times"]], [1], "x", color=color, transform=left.get_xaxis_transform(), clip_on=False)
            elif r["diverged"]:
                left.plot([r["times"]], [r["loss"]], "x", color=color)
        for times, axis in zip(rates, right):
            layers = [r["activation_by_layer"] for r in mine if r["times"] == times and r["activation_by_layer"]]
            if layers:
                axis.plot(np.arange(len(layers[0])), np.mean(np.array(layers, float), 0), style, color=color, marker=".")
    left.set(xscale="log", xlabel="learning rate, of 3e-3", ylabel="held-out loss (nats)")
    left.set_xticks(rates, [f"x{times}" for times in rates])
    left.minorticks_off()
    figure.legend(*left.get_legend_handles_labels(), frameon=False, fontsize=7, handlelength=3.5, loc="outside right upper")
    for times, axis in zip(rates, right):
        axis.set(yscale="log", xlabel="block", title=f"x{times}")
        axis.xaxis.get_major_locator().set_params(integer=True)
    right[0].set(ylabel="largest |residual stream|")
    for axis in (left, *right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def write(results: list[dict], folder: Path) -> str:
    draw(results, folder / "stability.png")
    return tables(results)


STUDY = Study(__doc__, ROWS, dict.fromkeys(ROWS, TIMES), write, runs=Path("runs/stability"))


def main(argv: list[str] | None = None) -> None:
    sweep(argv, STUDY)


if __name__ == "__main__":
    command.run(main)
