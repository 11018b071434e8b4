"""The recipes' training steps compiled for pods that are not here: the tables of docs/scaling.md.

    pip install -e ".[tpu]"
    JAX_PLATFORMS=cpu JAX_OPTIMIZATION_LEVEL=O1 python -m benchmarks.pods [--only=v5p] > pods.md

One `python run.py --mode=aot` a row, which is printed beside it; a minute or two each. The JSON of each is kept in
benchmarks/results/pods/.
"""

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "pods"
DENSE, MOE = "configs/dense1b7.py:gate=g1", "configs/moe15b.py:gate=g1"
# Recipe, topology, sequences in a step (of 4096 tokens), further options. Four sequences a device at a time.
ROWS = [
    (DENSE, "v5e-256", 1024, ""),
    (DENSE, "v5p-128", 1024, "--config.train.microbatches=4"),
    (DENSE, "v5p-512", 1024, ""),
    (DENSE, "v6e-256", 1024, ""),
    (DENSE, "tpu7x-256", 1024, ""),
    (DENSE, "v5p-512", 2048, "--config.train.microbatches=2"),
    (DENSE, "2xv5p-128", 1024, "--config.train.microbatches=2 --config.mesh.data=2"),
    (MOE, "v5e-256", 1024, "--config.train.microbatches=2"),
    (MOE, "v5p-128", 1024, "--config.train.microbatches=4"),
    (MOE, "v5p-512", 1024, ""),
    (MOE, "v6e-256", 1024, ""),
    (MOE, "tpu7x-256", 1024, ""),
    # 32,768 tokens to a sequence, cut over 4 chips
    (DENSE, "v5p-128", 128, "--config.train.seq_len=32768 --config.mesh.context=4 --config.train.microbatches=8"),
]


def row(recipe: str, topology: str, batch: int, options: str) -> str:
    name = recipe.partition("/")[2].partition(".")[0]
    report = RESULTS / f"{name}-{topology}-{batch}.json"
    command = f"run.py --config={recipe} --config.train.batch_size={batch} {options} --mode=aot --topology={topology}".split()
    done = subprocess.run([sys.executable, *command, f"--report={report}"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        return f"| {name} | {topology} | {batch} | {(done.stdout + done.stderr).strip().splitlines()[-1]} |"
    r = json.loads(report.read_text())
    gb, roof = 1e9, r["roofline"]
    moved = sum(c["bytes"] for c in r["collectives"].values()) / gb
    cells = [
        f"{name}, {batch} x {r['seq_len']}", topology, ", ".join(f"{k} {v}" for k, v in r["mesh"].items()), r["microbatches"],
        f"{r['argument_bytes'] / gb:.2f}", f"{r['temp_bytes'] / gb:.2f}", f"{r['hbm_bytes'] / gb:.0f}", f"{moved:.1f}",
        f"{roof['step_seconds']:.2f} ({roof['bound_by']})", f"{roof['mfu_bound']:.0%}", f"`{shlex.join(command[2:-2])}`",
    ]  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a part of a row's recipe or topology")
    only = parser.parse_args().only
    RESULTS.mkdir(parents=True, exist_ok=True)
    head = "step|topology|mesh|microbatches|arguments GB|temporaries GB|of GB|collectives GB|least s|MFU <=|options".split("|")
    print("| " + " | ".join(head) + " |\n" + "|" + " --- |" * len(head), flush=True)
    for spec in ROWS:
        if only in spec[0] or only in spec[1]:
            print(row(*spec), flush=True)


if __name__ == "__main__":
    main()
