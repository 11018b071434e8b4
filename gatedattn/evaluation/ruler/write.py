"""RULER results as a table in the form of the paper's Table 5, and as a figure."""

from __future__ import annotations

import matplotlib
from matplotlib.figure import Figure

from gatedattn.evaluation.ruler.tasks import TASKS

STYLE = {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25, "font.size": 9}


def table(models: dict) -> str:
    """Markdown: a row a model with its mean at each length, then a row a task of each model."""
    models = {name: entry for name, entry in models.items() if entry["scores"]}
    lengths = sorted({int(length) for entry in models.values() for cells in entry["scores"].values() for length in cells})
    tasks = [task for task in TASKS if any(task in entry["scores"] for entry in models.values())]

    def cell(entry: dict, length: int) -> str:
        if (value := entry["mean"].get(str(length))) is None:
            return "-"
        count = sum(str(length) in cells for cells in entry["scores"].values())
        return f"{value:.2f}" + ("" if count == len(tasks) else f" ({count} of {len(tasks)} tasks)")

    def row(*cells) -> str:
        return f"| {' | '.join(map(str, cells))} |\n"

    counts = [cell["samples"] for entry in models.values() for cells in entry["scores"].values() for cell in cells.values()]
    samples = f"{min(counts)} to {max(counts)}" if min(counts) < max(counts) else counts[0]
    missing = [task for task in TASKS if task not in tasks]
    text = f"RULER: mean of {len(tasks)} tasks" + (f" of 13 (without {', '.join(missing)})" if missing else "")
    text += f", {samples} samples a task and length. Effective: the longest with a mean of 85.6 or more over all of them.\n\n"
    text += row("", *map(label, lengths), "effective") + row(*["---"] * (len(lengths) + 2))
    for name, entry in models.items():
        effective = entry["effective_length"]
        text += row(name, *(cell(entry, length) for length in lengths), label(effective) if effective else "-")
    text += "\n" + row("model", "task", *map(label, lengths)) + row(*["---"] * (len(lengths) + 2))
    for name, entry in models.items():
        for task in filter(entry["scores"].get, tasks):
            cells = [entry["scores"][task].get(str(length)) for length in lengths]
            text += row(name, task, *(f"{cell['score']:.2f}" if cell else "-" for cell in cells))
    return text


def complete(entry: dict) -> list[int]:
    """The lengths at which all tasks of a model were done, so that their means can be compared."""
    found = [{int(length) for length in cells} for cells in entry["scores"].values()]
    return sorted(set.intersection(*found)) if found else []


def label(length: int) -> str:
    """4096 as "4k"."""
    return str(length) if length % 1024 else f"{length // 1024}k"


def figure(models: dict) -> Figure:
    """The mean and each task by length, a line a model."""
    tasks = [task for task in TASKS if any(task in entry["scores"] for entry in models.values())]
    panels, columns = ["mean", *tasks], min(len(tasks) + 1, 5)
    rows = -(-len(panels) // columns)
    with matplotlib.rc_context(STYLE):
        drawing = Figure(figsize=(2.2 * columns + 0.6, 1.9 * rows + 0.6), layout="constrained")
        axes = drawing.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).ravel()
        for panel, axis in zip(panels, axes):
            for number, (name, entry) in enumerate(models.items()):
                found = {int(length): cell["score"] for length, cell in entry["scores"].get(panel, {}).items()}
                if panel == "mean":
                    found = {length: entry["mean"][str(length)] for length in complete(entry)}
                points = sorted(found.items())
                axis.plot(*zip(*points) if points else ((), ()), marker=".", color=f"C{number}", label=name)
            axis.set_title(panel, fontsize=9)
        ticks = sorted({int(length) for entry in models.values() for cells in entry["scores"].values() for length in cells})
        axes[0].set(xscale="log", ylim=(-4, 104))
        axes[0].set_xticks(ticks, map(label, ticks))
        axes[0].minorticks_off()
        for axis in axes[len(panels) :]:
            axis.axis("off")
        for axis in axes[len(panels) - columns : len(panels)]:  # some have no panel below them
            axis.tick_params(labelbottom=True)
        axes[0].legend(frameon=False, fontsize=7)
        drawing.supxlabel("tokens", fontsize=9)
        drawing.supylabel("score", fontsize=9)
    return drawing
