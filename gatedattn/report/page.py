"""The page: tables in HTML, figures by the plotly library inside it, nothing from the network."""

from __future__ import annotations

import html
import importlib.resources
import json
import string
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import plotly.io
import plotly.offline

from gatedattn.config import ConfigError
from gatedattn.report.charts import charts
from gatedattn.report.runs import Run, differences
from gatedattn.training.recorder import finite


def build(folders: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Write the report of one or several run directories and return where it is.

    By default DIR/report.html for a run, report.html in the runs' common parent for several. Raises `ConfigError` if a folder
    is not a run's.
    """
    folders = [Path(folder) for folder in folders]
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"{folder} is not a folder: give the --workdir of a training run")
    runs = [Run.read(folder, name) for folder, name in zip(folders, _names(folders))]
    out = Path(out) if out else (folders[0] if len(folders) == 1 else folders[0].absolute().parent) / "report.html"
    template = string.Template(importlib.resources.files(__package__).joinpath("page.html").read_text())
    title = f"Run {runs[0].name}" if len(runs) == 1 else f"{len(runs)} runs"
    text = template.substitute(
        title=html.escape(title),
        plotly=plotly.offline.get_plotlyjs(),
        results=_results(runs),
        charts="\n".join(_chart(number, name, figure) for number, (name, figure) in enumerate(charts(runs).items())),
        heads=_script(head_maps(runs)),
        differences=_differences(runs),
        configs="\n".join(map(_config, runs)),
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text)
    return out


def _names(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart."""
    parts = [folder.absolute().parts for folder in folders]
    if len(set(parts)) < len(parts):
        raise ConfigError("a run is given twice")
    depth = next(d for d in range(1, max(map(len, parts)) + 1) if len({p[-d:] for p in parts}) == len(parts))
    return ["/".join(p[-depth:]) for p in parts]


def head_maps(runs: Sequence[Run]) -> dict[str, list[dict]]:
    """Quantity -> a heat map for each run that knows it: its name, the probed steps, and per step the values [L][N]."""
    maps: dict[str, list[dict]] = {}
    for run in runs:
        found = {"bos_share": [(line["step"], line["bos_share"]) for line in run.heads]}
        for name in ("mean", "below_0.1", "above_0.9"):
            found |= {f"gate_{name}: {spec}": values for spec, values in run.gate(name).items()}
        for name in ("attention_self", "attention_previous"):
            found[name] = [(line["step"], line[name]) for line in run.heads if name in line]
        for quantity, values in found.items():
            if values:
                steps, z = zip(*values)
                z = [np.round(np.array(value, float), 4).tolist() for value in z]
                maps.setdefault(quantity, []).append({"run": html.escape(run.name), "steps": list(steps), "z": finite(z)})
    return maps


def _script(data) -> str:
    """JSON that may stand in a script element."""
    return json.dumps(data, allow_nan=False).replace("<", "\\u003c")


def _chart(number: int, title: str, figure) -> str:
    data = plotly.io.to_json(figure, validate=True).replace("<", "\\u003c")
    return (
        f"<section><h3>{html.escape(title)}</h3><div class=chart id=chart{number}></div>"
        f"<script>draw('chart{number}', {data})</script></section>"
    )


def _cell(value) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return html.escape(str(value))
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _table(head: Sequence, rows: Sequence[Sequence]) -> str:
    top = "".join(f"<th>{_cell(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{_cell(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class=wide><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"


def _results(runs: Sequence[Run]) -> str:
    rows = [run.summary() for run in runs]
    keys = [key for key in rows[0] if any(row[key] is not None for row in rows)]
    table = _table(keys, [[row[key] for key in keys] for row in rows])
    spikes = [
        [run.name, int(e.start), int(e.end), e.length, e.height]
        for run in runs
        for e in sorted(run.events, key=lambda e: -e.height)[:20]
    ]
    if not spikes:
        return table
    return (
        table
        + "<h3>Loss spikes (the 20 highest of each run)</h3>"
        + _table(["run", "from step", "to step", "points", "height"], spikes)
    )


def _differences(runs: Sequence[Run]) -> str:
    if len(runs) == 1:
        return ""
    found = differences([run.config for run in runs])
    if not found:
        return "<h2>Differences</h2><p>All runs have the same configuration.</p>"
    return "<h2>Differences</h2>" + _table(
        ["setting", *(run.name for run in runs)], [[key, *values] for key, values in found.items()]
    )


def _config(run: Run) -> str:
    settings = "\n".join(f"{key} = {value!r}" for key, value in (run.config | run.about).items() if not isinstance(value, list))
    return f"<details><summary>{html.escape(run.name)}</summary><pre>{html.escape(settings)}</pre></details>"
