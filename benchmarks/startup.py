"""From the command to the first step, and the import of the package.

python -m benchmarks.startup [--repeats=3] [--maxtext=PYTHON] [--out=benchmarks/results/startup.json]

`run.py` for one step, until its line is printed: with empty caches (the corpus is tokenized, the step compiled), with the corpus prepared,
and with the step compiled before. Of the tiny config, and of it at the size of `benchmarks.step`, which MaxText gets as well (see
`benchmarks.peers`).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.peers import MaxText
from benchmarks.step import BATCH, LENGTH, REFERENCE

REFERENCE_SIZE = [f"--config.model.{name}={value}" for name, value in REFERENCE.items() if name != "vocab_size"]
REFERENCE_SIZE += [f"--config.train.batch_size={BATCH}", f"--config.train.seq_len={LENGTH}", "--config.model.max_seq_len=1024"]
SIZES = {"tiny": [], "reference": REFERENCE_SIZE}


def until(command: list, mark: str, environment: dict) -> float:
    """Seconds until a line of the output has `mark` in it; the rest is waited for, not counted."""
    began, found, lines = time.perf_counter(), None, []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment) as process:
        for line in process.stdout:
            lines.append(line)
            if found is None and mark in line:
                found = time.perf_counter() - began
    if found is None:
        raise SystemExit("".join(lines[-20:]) + f"{command}: no line with {mark!r}")
    return found


def ours(size: str, cache: Path, empty: bool, compiled: bool) -> float:
    if empty:
        shutil.rmtree(cache, ignore_errors=True)
    elif not compiled:
        shutil.rmtree(cache / "gatedattn" / "compiled", ignore_errors=True)
    environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    with tempfile.TemporaryDirectory() as folder:
        options = [f"--workdir={folder}/run", f"--config.data.cache_dir={cache}/data", "--config.train.steps=1", *SIZES[size]]
        command = [sys.executable, "run.py", "--config=configs/tiny.py", *options]
        return until(command, "step 1/1", environment | {"XDG_CACHE_HOME": str(cache), "PYTHONUNBUFFERED": "1"})


def measure(repeats: int, maxtext: Path | None) -> dict:
    found: dict = {}
    with tempfile.TemporaryDirectory() as cache:
        for size in SIZES:
            for state, options in (
                ("empty caches", {"empty": True, "compiled": False}),
                ("corpus prepared", {"empty": False, "compiled": False}),
                ("compiled before", {"empty": False, "compiled": True}),
            ):
                found[f"{size}, {state}"] = [ours(size, Path(cache), **options) for _ in range(repeats)]
                print(f"{size}, {state}: {found[f'{size}, {state}']}", file=sys.stderr, flush=True)
    if maxtext:
        peer = MaxText(maxtext, "float32")
        command = [*peer.command, "steps=2"]
        found[f"reference, {peer.about['version']}"] = [
            until(command, "completed step: 0", peer.environment) for _ in range(repeats)
        ]
        peer.close()
    command = [sys.executable, "-c", "import gatedattn; print('imported')"]
    found["import gatedattn"] = [until(command, "imported", dict(os.environ)) for _ in range(repeats)]
    return {"seconds": {name: {"median": statistics.median(times), "all": times} for name, times in found.items()}}


def table(result: dict) -> str:
    lines = ["| until the first step | s | all |\n", "| --- | --- | --- |\n"]
    for name, row in result["seconds"].items():
        lines.append(f"| {name} | {row['median']:.1f} | {', '.join(f'{s:.1f}' for s in row['all'])} |\n")
    return "".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--maxtext", type=Path, help="the Python of an environment with MaxText")
    parser.add_argument("--out", type=Path, help="keep the result as JSON")
    args = parser.parse_args()
    result = measure(args.repeats, args.maxtext)
    print(table(result))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
