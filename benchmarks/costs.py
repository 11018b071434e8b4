"""What the gates cost in a training step, and what probes, evaluation, checkpoints and records cost at their default intervals.

python -m benchmarks.costs [--repeats=5] [--out=benchmarks/results/costs.json]

The work of `benchmarks.step` with each gate and without, taking turns: the ratio of the seconds of a step in the same repeat, and the ratio of
the FLOPs by formula. The probe step (attention on BOS, gate statistics, activations: all that heads.jsonl holds) is timed on
`probe.rows` rows, and divided by `probe.every` steps; so are an evaluation's `eval.batches` batches, what a checkpoint keeps training
waiting (it is written in the background), and a line of metrics.jsonl with its TensorBoard scalars.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import jax

from benchmarks.step import LENGTH, Stepper, random_batch, reference
from gatedattn import transformer
from gatedattn.config import RunConfig
from gatedattn.training import step as steps
from gatedattn.training.checkpoint import Checkpoints
from gatedattn.training.evaluate import make_probe_step
from gatedattn.training.recorder import Recorder

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
    found["around"] = around(configs["g1"], steppers["g1"].state, repeats, found["gates"]["g1"]["seconds"])
    return found


def around(config: RunConfig, state, repeats: int, step_seconds: float) -> dict:
    """What is done -> its seconds, how often, and its share of the training steps' time. The first time, which compiles, is left out."""
    batch = random_batch(config)
    rows = {name: value[: config.probe.rows] for name, value in batch.items()}
    probe, evaluate = jax.jit(make_probe_step(config)), jax.jit(steps.make_eval_step(config))
    line = {"step": 1} | dict.fromkeys(
        "tokens loss ce z_loss perplexity grad_norm lr tokens_per_second epoch accuracy".split(), 1.0
    )
    found = {}
    with tempfile.TemporaryDirectory() as folder, Checkpoints(folder) as checkpoints:
        recorder, saves = Recorder(folder, config, {}), itertools.count(1)

        def save() -> None:
            checkpoints.save(state._replace(step=state.step + next(saves)), config)

        for name, every, times, do in (
            ("probe", config.probe.every, 1, lambda: jax.block_until_ready(probe(state.params, rows))),
            (
                "evaluation",
                config.eval.every,
                config.eval.batches,
                lambda: jax.block_until_ready(evaluate(state.params, batch)),
            ),
            ("checkpoint", config.checkpoint.every, 1, save),
            ("metrics.jsonl", config.train.log_every, 1, lambda: recorder.metrics(line)),
        ):
            seconds = []
            for _ in range(repeats + 1):
                began = time.perf_counter()
                do()
                seconds.append(time.perf_counter() - began)
                checkpoints.finish()
            took = times * statistics.median(seconds[1:])
            found[name] = {"seconds": took, "every": every, "share": took / every / step_seconds}
        recorder.close()
    return found


def table(result: dict) -> str:
    lines = ["| gate | step, over none | range | FLOPs, over none |\n", "| --- | --- | --- | --- |\n"]
    for gates, row in result["gates"].items():
        low, high = row["range"]
        lines.append(f"| {gates} | {row['over_none']:.3f} | {low:.2f} to {high:.2f} | {row['flops_over_none']:.3f} |\n")
    lines.append("\n| besides training | s | every ... steps | of the steps' time |\n| --- | --- | --- | --- |\n")
    for name, row in result["around"].items():
        lines.append(f"| {name} | {row['seconds']:.3g} | {row['every']} | {100 * row['share']:.2g} % |\n")
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
