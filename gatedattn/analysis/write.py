"""What `python -m gatedattn analyze` leaves in its folder."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gatedattn.analysis import figures
from gatedattn.analysis.collect import Analysis, analyze_model
from gatedattn.config import ConfigError
from gatedattn.interop import models

SHOWN = 600  # tokens of coloured text


def analyze(
    paths: Sequence[str | Path],
    text: str | Path,
    out: str | Path,
    *,
    names: Sequence[str] = (),
    rows: int = 4,
    length: int = 512,
    layers: Sequence[int] = (),
    window: int = 24,
    rope: str = "",
) -> str:
    """Analyze models on a text, one in memory at a time, and write to `out`:

        analysis.json        {"text": ..., "models": [what `Analysis.mapping` holds]}
        NAME.npz             per model what is too long for JSON: attention maps, bos_by_position, each token's gate openness
        table.md             a row per model, in the form of the paper's Table 4
        *.png                heads, attention, layers, positions, activations, gates
        text.html            the text, coloured by how open the gates are

    Returns the table. `rope` as in `models.load_model`, the other arguments as `analyze_model`, which see. Raises `ConfigError` for a
    request that cannot be met.
    """
    text, out = Path(text), Path(out)
    if names and len(names) != len(paths):
        raise ConfigError(f"{len(names)} names for {len(paths)} models: give one for each, or none")
    try:
        content = text.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"--text={text} cannot be read: {error.strerror}") from None
    analyses = []
    for name, path in zip(names or name_apart(paths), paths):
        model, tokenizer = models.load_model(path, rope=rope)
        if tokenizer is None:
            raise ConfigError(f"{path} has no tokenizer to read the text with")
        options = dict(name=name, rows=rows, length=length, layers=layers, window=window)
        analyses.append(analyze_model(model, tokenizer, content, **options))
        del model
    out.mkdir(parents=True, exist_ok=True)
    about = {"text": text.name, "models": [a.mapping() for a in analyses]}
    (out / "analysis.json").write_text(json.dumps(about, allow_nan=False) + "\n")
    for a in analyses:
        np.savez_compressed(out / f"{a.name.replace('/', '_')}.npz", **a.arrays())
    (out / "table.md").write_text(table(analyses))
    figures.draw(analyses, out)
    if any(a.found.get("gates") for a in analyses):
        (out / "text.html").write_text(colored_page(analyses))
    return table(analyses)


def name_apart(paths: Sequence[str | Path]) -> list[str]:
    """The last parts of each path that tell it from the others."""
    parts = [Path(path).absolute().parts for path in paths]
    depth = next((d for d in range(1, max(map(len, parts))) if len({p[-d:] for p in parts}) == len(parts)), 1)
    names = ["/".join(p[-depth:]) for p in parts]
    return names if len(set(names)) == len(names) else [f"{name}-{i}" for i, name in enumerate(names)]


def table(analyses: Sequence[Analysis]) -> str:
    """Markdown, in the form of the paper's Table 4."""

    def cell(value) -> str:
        if isinstance(value, dict):
            return ", ".join(f"{v:.3f}" + f" {spec}" * (len(value) > 1) for spec, v in value.items()) or "-"
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    records = [a.row() for a in analyses]
    lines = [list(records[0]), ["---"] * len(records[0]), *([cell(v) for v in r.values()] for r in records)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Text coloured by gate openness</title>
<style>
:root {{ color-scheme: light dark }}
body {{ font: 15px/1.9 system-ui, sans-serif; margin: 1rem auto; max-width: 60rem; padding: 0 1rem }}
p {{ white-space: pre-wrap; overflow-wrap: anywhere }}
span {{ border-radius: 3px; padding: 1px 0 }}
</style>
{body}</html>
"""


def colored_page(analyses: Sequence[Analysis]) -> str:
    """The beginning of the first row for each gate: all layers and heads together, then the chosen layers."""
    body = []
    for a in analyses:
        for spec, gate in a.found.get("gates", {}).items():
            body.append(f"<h2>{html.escape(a.name)}: {html.escape(spec)}</h2>")
            if gate["openness"].shape[2] == 1 < a.tokens.shape[1]:
                body.append("<p>The gate does not look at its input: every token finds it equally open.</p>")
                continue
            openness = gate["openness"][:, 0, :SHOWN].mean(-1)  # [L, T]
            for title, values in [("all layers", np.nanmean(openness, 0)), *((f"layer {n}", openness[n]) for n in a.layers)]:
                if np.isnan(values).any():  # a layer without this gate
                    continue
                body.append(f"<h3>{title}: from {values.min():.3f} to {values.max():.3f}, mean {values.mean():.3f}</h3>")
                body.append(f"<p>{colored(a.labels, values)}</p>")
    return PAGE.format(body="\n".join(body))


def colored(labels: Sequence[str], values: np.ndarray) -> str:
    """Tokens as HTML, the deeper orange the larger the value among them; the value itself on hovering."""
    low, high = float(values.min()), float(values.max())
    spans = []
    for text, value in zip(labels, values):
        alpha = 0.75 * (float(value) - low) / max(high - low, 1e-9)
        shown = html.escape(text.replace("·", " ").replace("⏎", "⏎\n"))
        spans.append(f'<span style="background:rgba(230,120,20,{alpha:.2f})" title="{value:.3f}">{shown}</span>')
    return "".join(spans)
