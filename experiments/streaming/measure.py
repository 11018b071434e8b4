"""What does a model lose when its cache lets go of the first tokens?

    python -m experiments.streaming.measure MODEL [MODEL ...] --text=GLOB --out=DIR [--names=a,a,b] [--cache=512] [--tokens=4096] [--rows=4]

Reads `rows` texts of `tokens` tokens, each after BOS, through caches of `cache` tokens: all tokens (no limit), the last ones (a window),
the first and the last ones, the first four and the last ones (StreamingLLM, arXiv 2309.17453). Models of one name are seeds of it. Writes
losses.json, table.md and streaming.png; a model that is in losses.json already is not read again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from experiments import command
from experiments.table import markdown
from gatedattn.config import ConfigError
from gatedattn.data.cache import write_atomically
from gatedattn.evaluation.perplexity import text_sets, texts
from gatedattn.inference.scoring import score
from gatedattn.interop import models

BINS = 32  # of the tokens, on the figure


def policies(cache: int) -> dict[str, str]:
    """What is kept -> the cache's policy."""
    return {
        "all tokens": "full",
        f"last {cache}": f"window:{cache}",
        f"first, last {cache - 1}": f"streaming:1+{cache - 1}",
        f"first 4, last {cache - 4}": f"streaming:4+{cache - 4}",
    }


def rows_of(tokenizer, files: list[Path], rows: int, tokens: int) -> np.ndarray:
    """[rows, tokens + 1] ids: the texts one after the other, cut into rows, BOS before each. Raises `ConfigError` if they are too short."""
    ids = np.concatenate([tokenizer.encode(text) for text in texts(files)])
    if len(ids) < rows * tokens:
        raise ConfigError(f"--text has {len(ids)} tokens for this model: {rows} rows of {tokens} need {rows * tokens}")
    ids = ids[: rows * tokens].reshape(rows, tokens)
    return np.concatenate([np.full((rows, 1), tokenizer.bos_id), ids], axis=1)


def measure(path: str, files: list[Path], cache: int, rows: int, tokens: int) -> dict:
    """Of each policy the loss (nats) of each token, averaged over rows."""
    model, tokenizer = models.load_model(path)
    if tokenizer is None:
        raise ConfigError(f"{path} has no tokenizer to read the text with")
    ids, found = rows_of(tokenizer, files, rows, tokens), {}
    for kept, policy in policies(cache).items():
        losses = np.concatenate([-score(model, row[None], policy) for row in ids])  # a row at a time: the cache of one
        found[kept] = losses.mean(0, dtype=np.float64).round(5).tolist()
        print(
            f"{path}: {kept}: {losses[:, :cache].mean():.4f} until the cache is full, {losses[:, cache:].mean():.4f} after",
            flush=True,
        )
    return found


def by_name(runs: list[dict]) -> dict[str, dict[str, np.ndarray]]:
    """Name -> what is kept -> losses [seeds, tokens]."""
    names = dict.fromkeys(run["name"] for run in runs)
    return {
        n: {kept: np.array([r["losses"][kept] for r in runs if r["name"] == n]) for kept in runs[0]["losses"]} for n in names
    }


def table(runs: list[dict], cache: int) -> str:
    """Markdown: loss of the tokens after the cache is full, and how much more it is than with all tokens, or with the first four."""
    columns = (
        "model",
        "seeds",
        "kept",
        "loss until the cache is full",
        "loss after",
        "more than with all",
        "more than with the first 4",
    )
    lines = []

    def cell(values: np.ndarray) -> str:
        return f"{values.mean():.3f}" + (f" ± {values.std(ddof=1):.3f}" if len(values) > 1 else "")

    for name, found in by_name(runs).items():
        for kept, losses in found.items():
            before, after = losses[:, :cache].mean(1), losses[:, cache:].mean(1)
            full, four = (found[key][:, cache:].mean(1) for key in ("all tokens", f"first 4, last {cache - 4}"))
            cells = (before, after, after - full, after - four)
            lines.append([name, str(len(losses)), kept, *map(cell, cells)])
    return markdown(columns, lines)


def draw(runs: list[dict], cache: int, path: Path) -> None:
    """A panel a model: how much more each token's loss is than with the first four kept, over bins of tokens, averaged over seeds."""
    from matplotlib.figure import Figure

    named = by_name(runs)
    figure = Figure(figsize=(4.2 * len(named), 3.2), layout="constrained")
    axes = figure.subplots(1, len(named), squeeze=False, sharey=True)[0]
    for axis, (name, found) in zip(axes, named.items(), strict=True):
        for (kept, losses), color in zip(found.items(), ("#222222", "#c44e52", "#dd8452", "#4c72b0"), strict=True):
            more = (losses - found[f"first 4, last {cache - 4}"]).mean(0)
            size = len(more) // BINS
            middle, means = (x[: size * BINS].reshape(BINS, size).mean(1) for x in (np.arange(len(more)), more))
            axis.plot(middle, means, color=color, label=kept, lw=1.3)
        axis.axvline(cache, color="gray", lw=0.8, ls=":")
        axis.set(xlabel="position (dotted: the cache is full)", title=name)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("loss more than with\nthe first 4 kept (nats)")
    axes[-1].legend(frameon=False, fontsize=7, title="kept", title_fontsize=7)
    figure.savefig(path, dpi=150)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--text", required=True, help="texts that the models have not seen")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--names", type=lambda text: text.split(","), help="one for each model; seeds have the same (their folders' names)"
    )
    for name, default in (("cache", 512), ("tokens", 4096), ("rows", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args(argv)
    names = args.names or [Path(path).name for path in args.models]
    if len(names) != len(args.models):
        raise ConfigError(f"{len(names)} names for {len(args.models)} models: give one for each")
    if not 8 <= args.cache < args.tokens:
        raise ConfigError(f"--cache={args.cache}: must be from 8 to below --tokens={args.tokens}")
    (files,) = text_sets([f"text={args.text}"]).values()
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "losses.json"
    about = {"cache": args.cache, "tokens": args.tokens, "rows": args.rows, "files": [file.name for file in files]}
    held = json.loads(path.read_text()) if path.exists() else about | {"runs": []}
    if {name: held[name] for name in about} != about:
        raise ConfigError(f"{path} holds other sizes or texts: use another --out")
    for name, model in zip(names, args.models, strict=True):
        if model not in [run["model"] for run in held["runs"]]:
            held["runs"].append(
                {"name": name, "model": model, "losses": measure(model, files, args.cache, args.rows, args.tokens)}
            )
            write_atomically(path, (json.dumps(held) + "\n").encode())
    (args.out / "table.md").write_text(table(held["runs"], args.cache))
    draw(held["runs"], args.cache, args.out / "streaming.png")
    print(table(held["runs"], args.cache))


if __name__ == "__main__":
    command.run(main)
