"""The paper's figures, one or several models side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from gatedattn.analysis.collect import Analysis
from gatedattn.probes import gates as gate_probes

STYLE = {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25, "font.size": 9}
SUB_LAYERS = {"attention": "added by attention", "mlp": "added by the MLP", "block": "residual stream after the layer"}


def draw(analyses: Sequence[Analysis], folder: Path) -> list[Path]:
    """Every figure that these models have something to show in."""
    makers = [heads, attention, layers, positions, activations]
    if any(a.found.get("gates") for a in analyses):
        makers.append(gates)
    paths = []
    with matplotlib.rc_context(STYLE):
        for maker in makers:
            paths.append(folder / f"{maker.__name__}.png")
            maker(analyses).savefig(paths[-1], dpi=130)
    return paths


def _panels(count: int, width: float, height: float, **options):
    figure = Figure(figsize=(width * count + 0.8, height), layout="constrained")
    return figure, figure.subplots(1, count, squeeze=False, **options)[0]


def heads(analyses: Sequence[Analysis]) -> Figure:
    """bos_share of every head, layers downwards."""
    deepest = max(a.config.num_layers for a in analyses)
    widest = max(a.config.num_heads for a in analyses)
    figure, axes = _panels(len(analyses), max(3.2, 0.16 * widest), max(2.6, 0.17 * deepest + 1))
    for axis, a in zip(axes, analyses):
        image = axis.imshow(a.found["bos_share"], vmin=0, vmax=1, cmap="viridis", aspect="auto", interpolation="nearest")
        axis.set(title=a.name, xlabel="head", ylabel="layer")
        axis.grid(False)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.yaxis.get_major_locator().set_params(integer=True)
    figure.colorbar(image, ax=list(axes), label="bos_share", shrink=0.9)
    return figure


def attention(analyses: Sequence[Analysis]) -> Figure:
    """Attention maps averaged over heads, a row of layers per model (the paper's Figure 2)."""
    columns = max(len(a.layers) for a in analyses)
    size = max(2.6, 0.14 * analyses[0].maps.shape[-1])
    figure = Figure(figsize=(size * columns + 1, size * len(analyses) + 0.4), layout="constrained")
    grid = figure.subplots(len(analyses), columns, squeeze=False)
    for axes, a in zip(grid, analyses):
        for axis, layer, maps in zip(axes, a.layers, a.maps):
            image = axis.imshow(maps.mean(0), vmin=0, vmax=1, cmap="viridis", interpolation="nearest")
            labels = a.labels[: maps.shape[-1]]
            axis.set_xticks(range(len(labels)), labels, rotation=90, fontsize=5, parse_math=False)
            axis.set_yticks(range(len(labels)), labels, fontsize=5, parse_math=False)
            axis.set_title(f"{a.name}, layer {layer}", fontsize=8)
            axis.grid(False)
        for axis in axes[len(a.layers) :]:
            axis.axis("off")
    figure.colorbar(image, ax=grid.ravel().tolist(), label="attention, mean over heads", shrink=0.8)
    return figure


def layers(analyses: Sequence[Analysis]) -> Figure:
    """bos_share by layer: the mean over heads, and from the least to the most in any head."""
    figure, (axis,) = _panels(1, 5.2, 3)
    for a in analyses:
        share = a.found["bos_share"]
        at = np.arange(len(share))
        (line,) = axis.plot(at, share.mean(1), marker=".", label=a.name)
        axis.fill_between(at, share.min(1), share.max(1), color=line.get_color(), alpha=0.15, linewidth=0)
    axis.set(xlabel="layer", ylabel="attention on the first token", ylim=(0, 1), title="mean over heads; band: all heads")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.legend(frameon=False)
    return figure


def positions(analyses: Sequence[Analysis]) -> Figure:
    """bos_share by the query's place, mean over heads, of the chosen layers; dotted: attention spread evenly."""
    figure, axes = _panels(len(analyses), 4.2, 3, sharey=True)
    for axis, a in zip(axes, analyses):
        share = a.found["bos_by_position"].mean(-1)  # [L, T]
        # Equal steps on the logarithmic axis: neighbouring places are averaged.
        edges = np.unique(np.geomspace(1, share.shape[1], 25).astype(int))
        at = (edges[:-1] + edges[1:] - 1) / 2
        for number, layer in enumerate(a.layers):
            means = [np.mean(share[layer, low:high]) for low, high in zip(edges[:-1], edges[1:])]
            color = matplotlib.colormaps["viridis"](number / max(len(a.layers) - 1, 1) * 0.9)
            axis.plot(at, means, marker=".", color=color, label=f"layer {layer}")
        axis.plot(at, 1 / (at + 1), ":", color="gray", label="spread evenly")
        axis.set(xscale="log", xlabel="query position", ylim=(0, 1), title=a.name)
        axis.legend(frameon=False, fontsize=7)
    axes[0].set_ylabel("attention on the first token")
    return figure


def activations(analyses: Sequence[Analysis]) -> Figure:
    """The largest |activation| by layer and sub-layer."""
    figure, axes = _panels(len(analyses), 4.2, 3, sharey=True)
    for axis, a in zip(axes, analyses):
        for name, text in SUB_LAYERS.items():
            axis.plot(a.found["activations"][name]["max"], marker=".", label=text)
        axis.set(yscale="log", xlabel="layer", title=a.name)
        axis.xaxis.get_major_locator().set_params(integer=True)
    axes[0].set_ylabel("largest |activation|")
    axes[0].legend(frameon=False, fontsize=7)
    return figure


def gates(analyses: Sequence[Analysis]) -> Figure:
    """How often each gate score occurs, layers downwards, all heads together."""
    pairs = [(a, spec, gate) for a in analyses for spec, gate in a.found.get("gates", {}).items()]
    figure, axes = _panels(len(pairs), 3.6, max(2.6, 0.17 * max(len(g["mean"]) for _, _, g in pairs) + 1))
    for axis, (a, spec, gate) in zip(axes, pairs):
        edges, shares = gate_probes.edges(spec), gate["histogram"].mean(1)
        norm = matplotlib.colors.LogNorm(1e-4, 1)
        extent = (edges[0], edges[-1], len(shares) - 0.5, -0.5)
        image = axis.imshow(np.maximum(shares, 1e-4), norm=norm, cmap="magma", aspect="auto", extent=extent)
        axis.plot(gate["mean"].mean(1), np.arange(len(shares)), "w.-", linewidth=1, markersize=4)
        axis.set(title=f"{a.name}: {spec}", xlabel="gate score (white: mean)", ylabel="layer")
        axis.grid(False)
        axis.yaxis.get_major_locator().set_params(integer=True)
    figure.colorbar(image, ax=list(axes), label="share of scores per bin", shrink=0.9)
    return figure
