"""The sweep's results in the form of the paper's Tables 1 to 4, ours and its figures side by side; the ladder of sizes; the picture."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np

from experiments.table import markdown
from experiments.variants.rows import LADDER, ROWS, SMALLER, TIMES
from gatedattn import variants


def interval(values: list[float]) -> str:
    """Mean and the half width of its 95 % confidence interval (Student's t over seeds)."""
    from scipy import stats

    values = [value for value in values if value is not None]
    if not values:
        return "-"
    if len(values) == 1:
        return f"{values[0]:.4g}"
    half = stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values))
    return f"{np.mean(values):.4g} ± {half:.2g}"


def tables(results: list[dict]) -> str:
    """The paper's Tables 1 and 3, 4, and 2, ours and its figures side by side."""
    plain = {row: [r for r in results if r["row"] == row and r["times"] == 1 and r["loss"] is not None] for row in ROWS}
    plain = {row: found for row, found in plain.items() if found and row not in SMALLER}
    paper = {row: variants.VARIANTS[ROWS[row].paper] if ROWS[row].paper else None for row in plain}

    def printed(row: str, name: str) -> str:
        value = getattr(paper[row], name) if paper[row] else None
        return "-" if value is None else f"{value:g}"

    first = []
    for row, found in plain.items():
        by_seed = {r["seed"]: r["loss"] for r in plain.get("baseline", [])}
        gains = [r["loss"] - by_seed[r["seed"]] for r in found if r["seed"] in by_seed] if row != "baseline" else []
        reported = paper[row] and paper[row].ppl and row != "baseline"
        nats = f"{math.log(paper[row].ppl / variants.VARIANTS['baseline'].ppl):+.4f}" if reported else "-"
        losses = [r["loss"] for r in found]
        cells = [
            row,
            str(len(found)),
            interval(losses),
            f"{math.exp(np.mean(losses)):.2f}",
            interval(gains),
            printed(row, "ppl"),
            nats,
        ]
        first.append(cells)
    head = ["variant", "seeds", "loss", "perplexity", "over the baseline, nats", "the paper's PPL", "the paper's, nats"]
    text = "Tables 1 and 3:\n\n" + markdown(head, first) + noise(plain)

    fourth = []
    for row, found in plain.items():
        cells = [interval([r[name] for r in found]) for name in ("mean_gate", "m_act", "f_attn", "best_head")]
        fourth.append([row, *cells, *(printed(row, name) for name in ("mean_gate", "m_act", "f_attn"))])
    head = ["variant", "gate mean", "M-Act", "F-Attn", "best head", "the paper's gate", "M-Act", "F-Attn"]
    text += f"\nTable 4 (a model that attends evenly has F-Attn {results[0]['floor']:.3f}):\n\n" + markdown(head, fourth)
    text += correlations(plain, paper)

    second = []
    for row, all_times in TIMES.items():
        for times in all_times:
            if found := [r for r in results if (r["row"], r["times"]) == (row, times)]:
                diverged = sum(r["diverged"] for r in found)
                columns = ([r["loss"] for r in found], [r["spikes"] for r in found], [r.get("gradient_spikes") for r in found])
                second.append([row, f"x{times}", str(len(found)), *(interval(column) for column in columns), str(diverged)])
    return (
        text
        + "\nTable 2, learning rates:\n\n"
        + markdown(["variant", "rate", "seeds", "loss", "spikes", "gradient spikes", "diverged"], second)
        + ladder(results)
    )


def noise(plain: dict[str, list[dict]]) -> str:
    """What a difference of two rows is sure to, from what is left of loss[row, seed] = row + seed (an analysis of variance in two ways).

    A row's own interval has so few seeds that it says little; this one takes the noise to be the same in all rows, and so learns it from all.
    """
    from scipy import stats

    losses = [found for row in plain.values() if len(found := {r["seed"]: r["loss"] for r in row}) > 1]
    seeds = sorted(set.intersection(*map(set, losses))) if losses else []
    if len(losses) < 2 or len(seeds) < 2:
        return ""
    table = np.array([[row[seed] for seed in seeds] for row in losses])
    left = table - table.mean(0) - table.mean(1, keepdims=True) + table.mean()
    freedom = (len(losses) - 1) * (len(seeds) - 1)
    sd = math.sqrt((left**2).sum() / freedom)
    half = stats.t.ppf(0.975, freedom) * sd * math.sqrt(2 / len(seeds))
    return (
        f"\nWhat row and seed do not explain has a standard deviation of {sd:.3f} nats ({len(losses)} rows, {len(seeds)} seeds): the "
        f"difference of two such rows is sure to ± {half:.3f} (95 %).\n"
    )


def correlations(plain: dict[str, list[dict]], paper: dict) -> str:
    """Spearman's rank correlations of the gate's mean with M-Act and F-Attn, over the rows of the paper's Table 4."""
    from scipy import stats

    rows = [row for row in plain if paper[row] and paper[row].mean_gate is not None]
    if len(rows) < 3:
        return ""
    told = []
    for name, title in (("m_act", "M-Act"), ("f_attn", "F-Attn")):
        ours = stats.spearmanr(
            *([np.mean([r[key] for r in plain[row]]) for row in rows] for key in ("mean_gate", name))
        ).statistic
        theirs = stats.spearmanr(*([getattr(paper[row], key) for row in rows] for key in ("mean_gate", name))).statistic
        told.append(f"with {title} {ours:.2f} (the paper's {theirs:.2f})")
    return f"\nRank correlation of the gate's mean over {len(rows)} gated rows {' and '.join(told)}.\n"


def ladder(results: list[dict]) -> str:
    """Loss with and without the gate by parameters, the gain by tokens too; by least squares, how each changes with ln(parameters)."""
    from scipy import stats

    def of(row: str) -> dict[int, dict]:
        return {r["seed"]: r for r in results if (r["row"], r["times"]) == (row, 1) and r["loss"] is not None}

    def gain(pair: tuple[dict, dict], step: int) -> float:
        without, gated = (dict(r["loss_by_step"])[step] for r in pair)
        return gated - without

    pairs = {d: [(of(a)[seed], of(b)[seed]) for seed in of(a) if seed in of(b)] for d, (a, b) in LADDER.items()}
    pairs = {d: found for d, found in pairs.items() if found}
    if len(pairs) < 2:
        return ""
    found = list(itertools.chain(*pairs.values()))
    steps = sorted(set.intersection(*({step for step, _ in r["loss_by_step"]} for pair in found for r in pair)))
    lines = []
    for d, mine in pairs.items():
        sizes = [f"{mine[0][i]['params'] / 1e6:.2f}M" for i in (0, 1)]
        columns = [[pair[i]["loss"] for pair in mine] for i in (0, 1)] + [[gain(pair, step) for pair in mine] for step in steps]
        lines.append([str(d), *sizes, *map(interval, columns)])
    per_step = found[0][0]["tokens"] / found[0][0]["steps"] / 1e6
    head = [
        "d",
        "parameters",
        "with G1",
        "loss",
        "with G1",
        *(f"difference at {step * per_step:.2g}M tokens" for step in steps),
    ]
    text = "\nA ladder of sizes, the same tokens, nats:\n\n" + markdown(head, lines)
    if len(found) < 3:
        return text

    def slope(losses: list[float]) -> str:
        fit = stats.linregress([math.log(without["params"]) for without, _ in found], losses)
        return f"{fit.slope:+.4f} ± {stats.t.ppf(0.975, len(found) - 2) * fit.stderr:.2g}"

    without, gated = ([pair[i]["loss"] for pair in found] for i in (0, 1))
    difference = slope([b - a for a, b in zip(without, gated)])
    return (
        text
        + f"\nFor e times the parameters: loss {slope(without)} nats, with G1 {slope(gated)}, the difference {difference}.\n"
    )


def draw(results: list[dict], path: Path) -> None:
    """Of the plain learning rate. Left: loss. Middle: attention on BOS against the gate's mean. Right: attention on BOS over training."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    results = [r for r in results if r["times"] == 1 and not r["diverged"] and r["row"] not in SMALLER]
    rows = [row for row in ROWS if any(r["row"] == row for r in results)]
    figure = Figure(figsize=(13, 0.24 * len(rows) + 2.2), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    colors = [*colormaps["tab20"].colors, "black", "gold"]
    for number, (row, color) in enumerate(zip(rows, itertools.cycle(colors))):
        found = [r for r in results if r["row"] == row]
        left.plot([r["loss"] for r in found], [number] * len(found), "o", color=color, ms=4)
        if found[0]["mean_gate"] is not None:
            middle.plot([r["mean_gate"] for r in found], [r["f_attn"] for r in found], "o", color=color, ms=4)
        steps = [step for step, _ in found[0]["f_attn_by_step"]]
        curves = [[value for _, value in r["f_attn_by_step"]] for r in found]
        right.plot(steps, np.mean(np.array(curves, float), 0), color=color, lw=1.2, label=row)
    left.set(xlabel="held-out loss (nats)", yticks=range(len(rows)), yticklabels=rows)
    left.invert_yaxis()
    middle.set(xlabel="mean gate", ylabel="attention on BOS", ylim=(0, None))
    right.set(xlabel="training step", ylabel="attention on BOS", ylim=(0, None))
    if results:
        right.axhline(results[0]["floor"], color="gray", ls=":", lw=0.8)
        figure.legend(*right.get_legend_handles_labels(), frameon=False, fontsize=7, loc="outside right upper")
    for axis in (left, middle, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def write(results: list[dict], folder: Path) -> str:
    draw(results, folder / "variants.png")
    return tables(results)
