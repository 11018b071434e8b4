"""What the gates cost in a training step, and what the probe step costs at its default interval.

python -m benchmarks.costs [--repeats=5] [--out=benchmarks/results/costs.json]

The work of `benchmarks.step` with each gate and without, taking turns: the ratio of the seconds of a step in the same repeat, and the ratio of
the FLOPs by formula. The probe step (attention on BOS, gate statistics, activations: all that heads.jsonl and activations.jsonl
hold) is timed on `probe.rows` rows, and divided by `probe.every` steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import jax

from benchmarks.step import LENGTH, Stepper, random_batch, reference
from gatedattn import transformer
from gatedattn.training.evaluate import make_probe_step

GATES = ("none", "g1", "g1:headwise", "g1:shared", "g2", "g2:headwise", "g3", "g4", "g5")


def measure(repeats: int) -> dict:
    configs = {gates: reference(gates=gates) for gates in GATES}
    steppers = {}
    for gates, config in configs.items():
        print(f"{gates}: compiling", file=sys.stderr, flush=True)
        steppers[gates] = Stepper(config)
        steppers[gates].run(1)
    seconds: dict[str, list[float]] = {gates: [] for gates in GATES}
    for _ in range(repeats):
        for gates, stepper in steppers.items():
            seconds[gates].append(stepper.run(1))
    flops = {gates: transformer.flops_per_token(config.model, LENGTH) for gates, config in configs.items()}
    found: dict = {"jax": jax.__version__, "gates": {}}
    for gates in GATES:
        ratios = [a / b for a, b in zip(seconds[gates], seconds["none"], strict=True)]
        found["gates"][gates] = {
            "seconds": statistics.median(seconds[gates]),
            "over_none": statistics.median(ratios),
            "range": [min(ratios), max(ratios)],
            "flops_over_none": flops[gates] / flops["none"],
        }
    config = configs["g1"]
    rows = {name: value[: config.probe.rows] for name, value in random_batch(config).items()}
    probe = jax.jit(make_probe_step(config))
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        jax.block_until_ready(probe(steppers["g1"].state.params, rows))
        times.append(time.perf_counter() - began)
    took = statistics.median(times[1:])
    amortised = took / config.probe.every / found["gates"]["g1"]["seconds"]
    found["probe"] = {"seconds": took, "rows": len(rows["tokens"]), "every": config.probe.every, "share_of_a_step": amortised}
    return found


def table(result: dict) -> str:
    lines = ["| gate | step, over none | range | FLOPs, over none |\n", "| --- | --- | --- | --- |\n"]
    for gates, row in result["gates"].items():
        low, high = row["range"]
        lines.append(f"| {gates} | {row['over_none']:.3f} | {low:.2f} to {high:.2f} | {row['flops_over_none']:.3f} |\n")
    probe = result["probe"]
    lines.append(f"\nThe probe step on {probe['rows']} rows takes {probe['seconds']:.2f} s: every {probe['every']} steps, "
                 f"{100 * probe['share_of_a_step']:.2f} % of the training steps' time.\n")  # fmt: skip
    return "".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="keep the result as JSON")
    args = parser.parse_args()
    result = measure(args.repeats)
    print(table(result))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
