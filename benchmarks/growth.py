"""Speed, memory and compile time of the training step as one size grows.

python -m benchmarks.growth [--axes=length,batch,depth,vocabulary] [--timed=8192] [--out=benchmarks/results/growth.json]

The work of `benchmarks.step`, but one row of T tokens for the length, two rows for the depth. Memory is XLA's own figure for the compiled
program: temporaries (activations kept for the backward pass, gradients, scratch) and arguments (parameters, optimiser, batch).
Tokens/s: of the faster of two steps, for rows of up to `--timed` tokens. Beside the JSON a figure is drawn.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

import jax

from benchmarks.step import LENGTH, REFERENCE, Stepper, reference

AXES = {
    "length": (512, 1024, 2048, 4096, 8192, 16384, 32768),
    "batch": (1, 2, 4, 8, 16, 32),
    "depth": (6, 12, 24, 48),
    "vocabulary": (8192, 32768, 151936),
}


def case(axis: str, size: int):
    changes = {"depth": {"num_layers": size}, "vocabulary": {"vocab_size": size}}.get(axis, {})
    config = reference(**changes, max_seq_len=max(size if axis == "length" else 0, 4096))
    rows, length = {"length": (1, size), "batch": (size, LENGTH), "depth": (2, LENGTH), "vocabulary": (8, LENGTH)}[axis]
    return dataclasses.replace(config, train=dataclasses.replace(config.train, batch_size=rows, seq_len=length))


def measure(axis: str, size: int, timed: int) -> dict:
    config = case(axis, size)
    stepper = Stepper(config)
    memory = stepper.program.memory_analysis()
    found = {
        "size": size,
        "tokens": stepper.tokens,
        "compile_seconds": stepper.compile_seconds,
        "temp_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "tok_s": stepper.tokens / min(stepper.run(1), stepper.run(1)) if config.train.seq_len <= timed else None,
    }
    jax.clear_caches()
    return found


def table(result: dict) -> str:
    """Markdown: a row per size; `growth` is how many times the temporaries of the row before."""
    lines = [
        "| what grows | size | tokens/s | temporaries MB | growth | arguments MB | compiled in s |\n",
        "| --- " * 7 + "|\n",
    ]
    for axis, rows in result["axes"].items():
        for before, row in zip([None, *rows], rows):
            speed = f"{row['tok_s']:,.0f}" if row["tok_s"] else "-"
            growth = f"{row['temp_bytes'] / before['temp_bytes']:.2f}" if before else ""
            sizes = [f"{row[name] / 1e6:,.0f}" for name in ("temp_bytes", "argument_bytes")]
            cells = [axis, f"{row['size']:,}", speed, sizes[0], growth, sizes[1], f"{row['compile_seconds']:.1f}"]
            lines.append(f"| {' | '.join(cells)} |\n")
    return "".join(lines) + "\n![Temporaries and speed](results/growth.png)\n"


def draw(result: dict, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3 * len(result["axes"]), 4.6), layout="constrained")
    grid = figure.subplots(2, len(result["axes"]), squeeze=False)
    for (axis, rows), top, bottom in zip(result["axes"].items(), *grid, strict=True):
        sizes = [row["size"] for row in rows]
        top.plot(sizes, [row["temp_bytes"] / 1e6 for row in rows], marker=".", color="#4c72b0")
        top.plot(sizes, [rows[0]["temp_bytes"] / 1e6 * size / sizes[0] for size in sizes], ":", color="gray", label="linear")
        top.set(xscale="log", yscale="log", ylabel="temporaries, MB")
        top.legend(frameon=False, fontsize=7)
        timed = [row for row in rows if row["tok_s"]]
        bottom.plot([row["size"] for row in timed], [row["tok_s"] for row in timed], marker=".", color="#c44e52")
        bottom.set(xscale="log", xlabel=axis, ylabel="tokens/s", ylim=(0, None), xlim=top.get_xlim())
        for part in (top, bottom):
            part.minorticks_off()
            part.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=45)
            part.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--axes", default=",".join(AXES))
    parser.add_argument("--timed", type=int, default=8192, help="rows longer than this are compiled, not run")
    parser.add_argument("--out", type=Path, help="keep the result as JSON, and a figure beside it")
    args = parser.parse_args()
    if unknown := set(args.axes.split(",")) - set(AXES):
        parser.error(f"--axes={','.join(sorted(unknown))}: must be among {', '.join(AXES)}")
    measured = json.loads(args.out.read_text())["axes"] if args.out and args.out.exists() else {}  # other axes stay
    result: dict = {"work": REFERENCE, "jax": jax.__version__, "axes": measured}
    for axis in args.axes.split(","):
        rows = result["axes"][axis] = []
        for size in AXES[axis]:
            rows.append(measure(axis, size, args.timed))
            print(f"{axis} {size}: {rows[-1]['temp_bytes'] / 1e6:,.0f} MB of temporaries", file=sys.stderr, flush=True)
    print(table(result))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
        draw(result, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
