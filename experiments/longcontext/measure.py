"""How far does a model read beyond the length it was trained at? With RoPE as it is, and with YaRN.

    python -m experiments.longcontext.measure RUN [RUN ...] --out=DIR [--questions=128] [--speeches=8]

Of each run (of experiments/longcontext/config.py; seeds of one have the same `name`) at 1, 2, 4 and 8 times its training length: the share of
needles found (experiments/longcontext/needles.py), and the loss of the second half of windows of that length over held-out speeches. Writes
results.json, table.md and longcontext.png; a run that is in results.json already is not read again.
"""

from __future__ import annotations

import argparse
import functools
import json
from pathlib import Path
from random import Random

import jax
import numpy as np
from flax import nnx

from experiments import command
from experiments.longcontext import needles
from experiments.table import markdown
from gatedattn.config import ConfigError
from gatedattn.data.cache import write_atomically
from gatedattn.data.sotu import speeches
from gatedattn.data.tokenizers import Tokenizer
from gatedattn.evaluation.perplexity import measure, token_losses
from gatedattn.interop import models
from gatedattn.training import recorder
from gatedattn.transformer import Transformer

TIMES = (1, 2, 4, 8)
BATCH_TOKENS = 8192


@functools.partial(jax.jit, static_argnames="graphdef")
def _greedy(params, ids, *, graphdef):
    """Of each target, whether no token is likelier."""
    model = nnx.merge(graphdef, params)
    loss, least = token_losses(model.hidden(ids[:, :-1])[0], model.unembedding(), ids[:, 1:])
    return loss <= least


def found(model: Transformer, tokenizer: Tokenizer, filler: np.ndarray, length: int, questions: int) -> float:
    """The share of questions whose whole answer is the likeliest, token by token."""
    graphdef, params = nnx.split(model)
    asked = [needles.question(Random(f"{length} {i}"), tokenizer, filler, length) for i in range(questions)]
    size, right = max(1, BATCH_TOKENS // length), []
    for start in range(0, questions, size):
        batch = asked[start : start + size]
        ids = np.stack([ids for ids, _ in batch] + [batch[-1][0]] * (size - len(batch)))
        greedy = np.asarray(_greedy(nnx.as_pure(params), ids, graphdef=graphdef))
        right += [bool(row[-answer:].all()) for row, (_, answer) in zip(greedy, batch)]
    return float(np.mean(right))


def one(path: str, questions: int, texts: list[str]) -> dict:
    run = recorder.read_config(path)
    results: dict = {
        "run": path,
        "name": run.name,
        "gates": run.model.gates,
        "seed": run.train.seed,
        "length": run.train.seq_len,
    }
    filler = None
    for times in TIMES:
        length = times * run.train.seq_len
        for rope in ("plain", "yarn") if times > 1 else ("plain",):
            model, tokenizer = models.load_model(path, rope=f"yarn,factor={times}" if rope == "yarn" else "")
            filler = np.concatenate([tokenizer.encode(text) for text in texts]) if filler is None else filler
            read = measure(model, tokenizer, texts, length=length, batch=max(1, BATCH_TOKENS // length))
            last = [p for p in read["by_position"] if p["to"] > length // 2]
            loss = sum(p["loss"] * p["tokens"] for p in last) / sum(p["tokens"] for p in last)
            share = found(model, tokenizer, filler, length, questions)
            results[f"{rope} {times}"] = {"found": share, "loss": loss, "by_position": read["by_position"]}
            print(f"{path}: {times} x {run.train.seq_len} tokens, {rope}: found {share:.2f}, loss {loss:.3f}", flush=True)
    return results


def by_name(runs: list[dict]) -> dict[str, list[dict]]:
    return {name: [run for run in runs if run["name"] == name] for name in dict.fromkeys(run["name"] for run in runs)}


def table(runs: list[dict]) -> str:
    """Markdown, at each length: needles found, every seed by itself (a model has learned to look or it has not); the loss, mean and standard
    deviation over seeds."""
    length = runs[0]["length"]
    lines = []

    def cell(what: str, values: list[float]) -> str:
        if what == "found":
            return ", ".join(f"{value:.2f}" for value in values)
        return f"{np.mean(values):.3f}" + (f" ± {np.std(values, ddof=1):.3f}" if len(values) > 1 else "")

    for what in ("found", "loss"):
        for name, seeds in by_name(runs).items():
            for rope in ("plain", "yarn"):
                cells = [cell(what, [s.get(f"{rope} {t}", s[f"plain {t}"])[what] for s in seeds]) for t in TIMES]
                lines.append([f"{name}, {what}", str(len(seeds)), rope, *cells])
    return markdown(["model", "seeds", "RoPE", *(f"{t * length} tokens" for t in TIMES)], lines)


def draw(runs: list[dict], path: Path) -> None:
    """Left: needles found by length, a line for each seed. Right: loss by position, windows of the greatest length. Dashed: YaRN."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.3), layout="constrained")
    left, right = figure.subplots(1, 2)
    length = runs[0]["length"]
    for (name, seeds), color in zip(by_name(runs).items(), ("#c44e52", "#4c72b0", "#55a868", "#8172b2")):
        for rope, dash in (("plain", "-"), ("yarn", "--")):
            for number, seed in enumerate(seeds):
                shares = [seed.get(f"{rope} {t}", seed[f"plain {t}"])["found"] for t in TIMES]
                label = None if number else f"{name}, {rope}"
                left.plot(np.array(TIMES) * length, shares, dash, color=color, marker=".", lw=1, label=label)
            parts = [s[f"{rope} {TIMES[-1]}"]["by_position"] for s in seeds]
            at = [np.sqrt(p["from"] * p["to"]) for p in parts[0]]
            right.plot(
                at,
                np.mean([[p["loss"] for p in part] for part in parts], 0),
                dash,
                color=color,
                marker=".",
                label=f"{name}, {rope}",
            )
    left.set(xlabel="tokens", ylabel="needles found", ylim=(0, 1.03), xscale="log", xticks=[t * length for t in TIMES])
    left.set_xticklabels([str(t * length) for t in TIMES])
    left.minorticks_off()
    right.set(xlabel="position", ylabel="loss (nats)", xscale="log")
    for axis in (left, right):
        axis.axvline(length, color="gray", lw=0.8, ls=":")
        axis.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False, fontsize=7, loc=(0.02, 0.2))
    figure.savefig(path, dpi=150)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--questions", type=int, default=128)
    parser.add_argument("--speeches", type=int, default=8, help="held-out speeches that are read")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "results.json"
    about = {"questions": args.questions, "speeches": args.speeches}
    held = json.loads(path.read_text()) if path.exists() else about | {"runs": []}
    if {name: held[name] for name in about} != about:
        raise ConfigError(f"{path} holds other sizes: use another --out")
    texts = [text for *_, text in speeches(held_out=True)][-args.speeches :]
    for run in args.runs:
        if run not in [r["run"] for r in held["runs"]]:
            held["runs"].append(one(run, args.questions, texts))
            write_atomically(path, (json.dumps(held) + "\n").encode())
    (args.out / "table.md").write_text(table(held["runs"]))
    draw(held["runs"], args.out / "longcontext.png")
    print(table(held["runs"]))


if __name__ == "__main__":
    command.run(main)
