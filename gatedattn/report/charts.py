"""The curves of a report, as plotly figures; tokens seen are on the x axis throughout."""

from __future__ import annotations

import html
import itertools
from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
from plotly.colors import qualitative

from gatedattn.report.runs import Run, thin

DASHES = ("solid", "dash", "dot", "dashdot")


def charts(runs: Sequence[Run]) -> dict[str, go.Figure]:
    """Title -> figure; those without anything to show are left out."""
    made = {
        "Training loss (nats); crosses: loss spikes": loss(runs),
        "Held-out loss (nats)": held_out(runs),
        "Other evaluations": tasks(runs),
        "Attention on the first token: mean over heads, dashed: the head with most": sinks(runs),
        "Gate score: mean, dashed: share below 0.1, dotted: share above 0.9": gates(runs),
        "Largest |activation| of any layer": activations(runs),
        "Gradient norm": curve(runs, "grad_norm"),
    }
    return {title: figure for title, figure in made.items() if figure.data}


def _figure(**axes) -> go.Figure:
    figure = go.Figure()
    figure.update_layout(
        height=380,
        margin=dict(l=50, r=10, t=10, b=40),
        legend=dict(orientation="h", y=-0.2),
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        template="none",
        hovermode="closest",
        xaxis=dict(title="tokens", gridcolor="rgba(128,128,128,0.25)", zeroline=False),
        yaxis=dict(gridcolor="rgba(128,128,128,0.25)", zeroline=False) | axes,
    )
    return figure


def color(number: int) -> str:
    return qualitative.Plotly[number % len(qualitative.Plotly)]


def _line(figure: go.Figure, x, y, name: str, number: int, dash: str = "solid", **options) -> None:
    x, y = thin(x, y)
    name = html.escape(name)  # plotly reads some HTML
    line = dict(color=color(number), dash=dash, width=1.6)
    figure.add_trace(go.Scatter(x=x, y=y, name=name, line=line, mode="lines", legendgroup=name, **options))


def loss(runs: Sequence[Run]) -> go.Figure:
    figure = _figure()
    for number, run in enumerate(runs):
        if not len(run.curve.steps):
            continue
        x, y = run.curve.steps * run.tokens_per_step, run.curve.values
        _line(figure, x, y, run.name, number)
        peaks = [
            a + int(np.argmax(y[a:b])) for a, b in (np.searchsorted(run.curve.steps, (e.start, e.end + 1)) for e in run.events)
        ]
        if peaks:
            marker = dict(symbol="x", size=9, color=color(number), line=dict(width=1, color="white"))
            text = [f"spike: {e.height:.3g} above the median, {e.length} points" for e in run.events]
            figure.add_trace(
                go.Scatter(
                    x=x[peaks], y=y[peaks], text=text, mode="markers", marker=marker, name=html.escape(f"{run.name}: {len(peaks)} spikes"),
                )
            )  # fmt: skip
    return figure


def held_out(runs: Sequence[Run]) -> go.Figure:
    figure = _figure()
    for number, run in enumerate(runs):
        for dash, name in zip(DASHES, dict.fromkeys(line["set"] for line in run.evals)):
            lines = [line for line in run.evals if line["set"] == name]
            label = run.name if dash == "solid" else f"{run.name}, {name}"
            _line(figure, *run.series(lines, "loss"), label, number, dash)
    figure.update_traces(mode="lines+markers")
    return figure


def tasks(runs: Sequence[Run]) -> go.Figure:
    """What `eval.tasks` measured: a line for each metric of each task, standard errors and what follows from the loss left out."""
    figure = _figure()
    besides = ("step", "seconds", "tokens", "samples", "perplexity", "bits_per_byte")
    for number, run in enumerate(runs):
        found = {(line["task"], key) for line in run.tasks for key, value in line.items() if isinstance(value, (int, float))}
        found = sorted((t, k) for t, k in found if k not in besides and "stderr" not in k)
        for (task, key), dash in zip(found, itertools.cycle(DASHES)):
            lines = [line for line in run.tasks if line["task"] == task]
            _line(figure, *run.series(lines, key), f"{run.name}, {task}, {key}", number, dash)
    figure.update_traces(mode="lines+markers")
    return figure


def sinks(runs: Sequence[Run]) -> go.Figure:
    figure = _figure(range=[0, 1])
    for number, run in enumerate(runs):
        tokens = [line["step"] * run.tokens_per_step for line in run.heads]
        for dash, reduce in (("solid", np.mean), ("dash", np.max)):
            values = [reduce(np.array(line["bos_share"], float)) for line in run.heads]
            _line(figure, tokens, values, run.name, number, dash, showlegend=dash == "solid")
    return figure


def gates(runs: Sequence[Run]) -> go.Figure:
    figure = _figure(rangemode="tozero")
    number = 0
    for run in runs:
        shares = {name: run.gate(name) for name in ("mean", "below_0.1", "above_0.9")}
        for spec in shares["mean"]:
            for dash, by_spec in zip(DASHES, shares.values()):
                steps, values = zip(*by_spec[spec])
                label = f"{run.name}: {spec}"
                tokens = [s * run.tokens_per_step for s in steps]
                _line(figure, tokens, [np.nanmean(v) for v in values], label, number, dash, showlegend=dash == "solid")
            number += 1
    return figure


def activations(runs: Sequence[Run]) -> go.Figure:
    figure = _figure(type="log", nticks=6)
    for number, run in enumerate(runs):
        tokens = [line["step"] * run.tokens_per_step for line in run.heads]
        _line(figure, tokens, [np.max(np.array(line["activation_max"], float)) for line in run.heads], run.name, number)
    return figure


def curve(runs: Sequence[Run], key: str) -> go.Figure:
    figure = _figure(type="log", nticks=6)
    for number, run in enumerate(runs):
        x, y = run.series(run.metrics, key)
        if x:
            _line(figure, x, y, run.name, number)
    return figure
