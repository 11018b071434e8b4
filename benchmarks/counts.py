"""What a training step costs, counted rather than timed: a guard against growth that nobody meant.

python -m benchmarks.counts             compare with benchmarks/results/counts.json; exit code 1 if anything grew by more than 5 %
python -m benchmarks.counts --update    write it: commit it with the change that made the step dearer, and say why

Of small models, on one CPU device: the FLOPs of all matrix products as traced, loops as often as they run, recomputation included; and
the bytes of temporaries of the program that XLA made of it, which depend on its version (one it does not know is told, not compared).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from pathlib import Path

import jax
from jax.extend import core

from benchmarks.step import random_batch, reference
from gatedattn.config import MoEConfig, RunConfig, TrainConfig
from gatedattn.training import step as steps

BASELINE = Path(__file__).parent / "results" / "counts.json"
TOLERANCE = 0.05


def cases() -> dict[str, RunConfig]:
    """Name -> config: the reference work with two layers and fewer tokens, and what changes its program most."""
    small = dict(num_layers=2, vocab_size=2048)

    def case(gates: str = "g1", **changes) -> RunConfig:
        config = reference(gates=gates, **small | changes)
        return dataclasses.replace(config, train=TrainConfig(batch_size=4, seq_len=512))

    moe = MoEConfig(num_experts=8, top_k=2, expert_dim=256)
    return {
        "baseline": case("none"),
        "g1": case(),
        "g2+g5": case("g2+g5"),
        "full remat": case(remat="full"),
        "experts": case(moe=moe),
    }


def flops(jaxpr: core.Jaxpr) -> int:
    """2 x multiplications of every dot_general, a loop's body as often as it runs; of branches the dearest; of a loop without
    a known number of rounds, one."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            total += 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(eqn.invars[0].aval.shape[d] for d in contracted)
            continue
        inner = [flops(j) for value in eqn.params.values() for j in _jaxprs(value)]
        total += max(inner, default=0) if eqn.primitive.name == "cond" else eqn.params.get("length", 1) * sum(inner)
    return total


def _jaxprs(value) -> list[core.Jaxpr]:
    if isinstance(value, core.ClosedJaxpr):
        return [value.jaxpr]
    if isinstance(value, core.Jaxpr):
        return [value]
    return [j for item in value for j in _jaxprs(item)] if isinstance(value, (tuple, list)) else []


def count(config: RunConfig) -> dict[str, int]:
    state = jax.eval_shape(steps.make_init(config))
    batch = jax.eval_shape(lambda: random_batch(config))
    traced = jax.jit(steps.make_train_step(config), donate_argnums=0).trace(state, batch)
    return {"flops": flops(traced.jaxpr.jaxpr), "temp_bytes": traced.lower().compile().memory_analysis().temp_size_in_bytes}


def compare(found: dict[str, dict], baseline: dict) -> tuple[list[str], list[str]]:
    """(what grew, what else is to be said)."""
    grew, notes = [], []
    known = baseline["temp_bytes"].get(jax.__version__)
    if known is None:
        notes.append(
            f"temporaries not compared: the baseline knows jax {', '.join(baseline['temp_bytes'])}, not {jax.__version__}"
        )
    for name, counts in found.items():
        for what, before in (("flops", baseline["flops"].get(name)), ("temp_bytes", (known or {}).get(name))):
            if before is None:
                if known or what == "flops":
                    notes.append(f"{name}: no {what} in the baseline")
                continue
            change = counts[what] / before - 1
            line = f"{name}: {what} {before:,} -> {counts[what]:,} ({change:+.1%})"
            if change > TOLERANCE:
                grew.append(line)
            elif change < -TOLERANCE:
                notes.append(f"{line}: less; --update keeps it so")
    return grew, notes


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true")
    args = parser.parse_args(argv)
    found = {name: count(config) for name, config in cases().items()}
    baseline = json.loads(BASELINE.read_text()) if BASELINE.exists() else {"temp_bytes": {}}
    for name, counts in found.items():
        print(f"{name:12} {counts['flops'] / 1e9:8.3f} GFLOP {counts['temp_bytes'] / 1e6:8.2f} MB of temporaries")
    if args.update:
        baseline["flops"] = {name: counts["flops"] for name, counts in found.items()}
        baseline["temp_bytes"][jax.__version__] = {name: counts["temp_bytes"] for name, counts in found.items()}
        BASELINE.write_text(json.dumps(baseline, indent=1, sort_keys=True) + "\n")
        return 0
    grew, notes = compare(found, baseline)
    for note in notes:
        print(f"note: {note}")
    for line in grew:
        print(f"GREW: {line}", file=sys.stderr)
    return 1 if grew else 0


if __name__ == "__main__":
    sys.exit(main())
