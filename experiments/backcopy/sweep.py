"""Every gate on Bigram-Backcopy: does the sink vanish, where does its mass go, and what does it cost?

    python -m experiments.backcopy.sweep --out=runs/sweep ["--arms=baseline;rope, g1"] [--seeds=3] [--steps=900]
    python -m experiments.backcopy.sweep --out=runs/smoke --smoke          two arms, one seed, and a check of what they show

Writes ARM.json as each arm ends, leaves out arms whose file is there (so the same command goes on after an interruption), and then
writes table.md and sweep.png from all that are. The seeds of an arm train side by side in one compiled step.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from configs import backcopy as recipe
from experiments import command
from experiments.table import markdown
from gatedattn import probes
from gatedattn.config import ConfigError, RunConfig, from_mapping, suggest, to_mapping
from gatedattn.data.backcopy import Backcopy, from_speeches
from gatedattn.data.cache import write_atomically
from gatedattn.training import guard, optimizer
from gatedattn.training import step as steps
from gatedattn.training.recorder import finite
from gatedattn.transformer import Transformer

ROWS = 64  # held-out rows for the probes and the loss
PROBES = 12  # over a run
SMOKE = ("baseline", "g1")

GATES = (
    "g1", "g2", "g3", "g4", "g5", "g1:headwise", "g2:headwise", "g1:add:silu", "g1:silu", "g1:ns_sigmoid", "g1:none", "g1:query",
    "g1+g2",
)  # fmt: skip
FOUR_HEADS = {"num_heads": 4, "num_kv_heads": 4, "head_dim": 32}  # sharing a gate over heads needs several
MUON = {"name": "muon", "learning_rate": 1e-3, "muon_learning_rate": 0.02, "weight_decay": 0.0}
# Arm -> what differs from configs/backcopy.py, in its model and (under "optimizer") in its optimizer.
ARMS = (
    {"baseline": {}}
    | {gate: {"gates": gate} for gate in GATES}
    | {
        "learned sink": {"sink": "learned"},
        "off by one": {"sink": "off_by_one"},
        "rope": {"position": "rope"},
        "rope, g1": {"position": "rope", "gates": "g1"},
        "qk-norm": {"qk_norm": True},
        "qk-norm, g1": {"qk_norm": True, "gates": "g1"},
        "4 heads": FOUR_HEADS,
    }
    | {f"4 heads, {gate}": FOUR_HEADS | {"gates": gate} for gate in ("g1", "g1:headwise", "g1:mean", "g1:shared")}
    | {"muon, 4 heads": FOUR_HEADS | {"optimizer": MUON}, "muon, 4 heads, g1": FOUR_HEADS | {"gates": "g1", "optimizer": MUON}}
)


def config_of(arm: str, steps: int) -> RunConfig:
    """configs/backcopy.py with half the FFN, which saves a third of the time, changed as the arm says."""
    config = from_mapping(RunConfig, recipe.get_config().to_dict())
    changes = dict(ARMS[arm])
    optimizer = dataclasses.replace(config.optimizer, **changes.pop("optimizer", {}))
    model = dataclasses.replace(config.model, ffn_dim=256, **changes)
    return dataclasses.replace(
        config, name=arm, model=model, optimizer=optimizer, train=dataclasses.replace(config.train, steps=steps)
    )


def watch(config: RunConfig) -> Callable:
    """(params, held-out batch) -> what a probe step records of one seed."""
    graphdef = steps.graph(config.model)
    evaluate = steps.make_eval_step(config)

    def look(params, batch):
        model = nnx.merge(graphdef, params)
        found, _ = probes.inspect(model, batch["tokens"], query_mask=~batch["trigger"])
        sums = evaluate(params, batch)
        copies = evaluate(params, batch | {"loss_mask": batch["trigger"]})

        def values(kind, **captured):
            return {"v": captured["v"]} if kind == "attention" else {}

        # The norm of what a head adds to the stream when it looks at one token only: W_O v, of BOS and of the others.
        v = model.hidden(batch["tokens"], probe=values)[1]["probe"]["v"]
        group = config.model.num_heads // config.model.num_kv_heads
        out = jnp.einsum("lbtnh,lnhd->lbtnd", jnp.repeat(v, group, axis=3), model.layers.attention.output.kernel[...])
        norm = jnp.linalg.norm(out, axis=-1)
        return {
            "loss": sums["ce_sum"] / sums["count"],
            "copy_loss": copies["ce_sum"] / copies["count"],
            "bos_share": found["bos_share"],
            "attention_self": found["attention_self"],
            "attention_previous": found["attention_previous"],
            "gate_mean": {spec: gate["mean"].mean() for spec, gate in found.get("gates", {}).items()},
            "value_norm_bos": norm[:, :, 0].mean((1, 2)),
            "value_norm": norm[:, :, 1:].mean((1, 2, 3)),
            "activations": found["activations"],
            "kurtosis": found["kurtosis"],
        }

    return look


def run_arm(arm: str, task: Backcopy, seeds: int, count: int) -> dict:
    """Train the arm with every seed; each recorded value has a leading dimension for the seeds."""
    config = config_of(arm, count)
    length, size = config.train.seq_len, config.train.batch_size

    def init(seed):
        params = nnx.as_pure(nnx.state(Transformer(config.model, rngs=nnx.Rngs(jax.random.key(seed))), nnx.Param))
        opt_state = optimizer.build(config.optimizer, count).init(params)
        return steps.TrainState(params, opt_state, jnp.zeros((), jnp.int32), guard.init(config.guard))

    quick = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    state = jax.jit(jax.vmap(init), compiler_options=quick)(jnp.arange(seeds))
    train = jax.jit(jax.vmap(steps.make_train_step(config)), donate_argnums=0)
    look = jax.jit(jax.vmap(watch(config), in_axes=(0, None)))
    held_out = task.rows(0, "valid", np.arange(ROWS), length)

    def batch(step):
        numbers = np.arange(step * size, (step + 1) * size)
        rows = [task.rows(seed, "train", numbers, length) for seed in range(seeds)]
        return {
            name: np.stack([row[name] for row in rows])
            for name in ("tokens", "targets", "loss_mask", "segment_ids", "positions")
        }

    record, losses, began = [], [], time.process_time()
    for step in range(1, count + 1):
        state, metrics = train(state, batch(step - 1))
        if step % max(count // 100, 1) == 0:
            losses.append({"step": step, "loss": metrics["loss"]})
        if step % max(count // PROBES, 1) == 0 or step == count:
            record.append({"step": step} | jax.device_get(look(state.params, held_out)))
            line = record[-1]
            print(f"{arm}: step {step}, loss {line['loss'].mean():.3f}, BOS {line['bos_share'].mean():.3f}", flush=True)
    about = {"arm": arm, "seeds": seeds, "steps": count, "cpu_seconds": round(time.process_time() - began, 1)}
    about["oracle_loss"] = float(task.oracle_loss(held_out["tokens"], held_out["targets"]).mean())
    return finite(about | {"config": to_mapping(config), "train": jax.device_get(losses), "probes": record})


COLUMNS = {
    "attention on BOS": lambda p: np.mean(p["bos_share"], (1, 2)),
    "best head": lambda p: np.max(p["bos_share"], (1, 2)),
    "on itself": lambda p: np.mean(p["attention_self"], (1, 2)),
    "on the previous": lambda p: np.mean(p["attention_previous"], (1, 2)),
    "held-out loss": lambda p: np.array(p["loss"]),
    "copy loss": lambda p: np.array(p["copy_loss"]),
    "mean gate": lambda p: np.mean([np.array(v) for v in p["gate_mean"].values()], 0) if p["gate_mean"] else np.array([np.nan]),
    "BOS value norm": lambda p: np.mean(p["value_norm_bos"], 1) / np.mean(p["value_norm"], 1),
    "largest activation": lambda p: np.max(p["activations"]["block"]["max"], 1),
    "kurtosis": lambda p: np.mean(p["kurtosis"], 1),
}


def table(arms: list[dict]) -> str:
    """Markdown: what each arm ends with, mean and standard deviation over seeds."""
    lines = []
    for arm in arms:
        cells = [column(arm["probes"][-1]) for column in COLUMNS.values()]
        spread = [f" ± {np.std(c, ddof=1):.2g}" if len(c) > 1 else "" for c in cells]
        lines.append([arm["arm"], *("-" if np.isnan(c[0]) else f"{np.mean(c):.3g}{s}" for c, s in zip(cells, spread))])
    return markdown(["arm", *COLUMNS], lines)


def draw(arms: list[dict], path: Path) -> None:
    """Left: where the attention of non-trigger queries goes at the end. Right: attention on BOS over training."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 0.27 * len(arms) + 2.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    names, left_edge = [arm["arm"] for arm in arms], np.zeros(len(arms))
    for column, color in (("attention on BOS", "#c44e52"), ("on the previous", "#4c72b0"), ("on itself", "#55a868")):
        width = np.array([COLUMNS[column](arm["probes"][-1]).mean() for arm in arms])
        left.barh(names, width, left=left_edge, color=color, label=column)
        left_edge += width
    left.invert_yaxis()
    left.set(xlim=(0, 1), xlabel="share of attention, non-trigger queries")
    left.legend(frameon=False, fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3)
    curves = [[COLUMNS["attention on BOS"](p).mean() for p in arm["probes"]] for arm in arms]
    for number in sorted(range(len(arms)), key=lambda n: -curves[n][-1]):  # the legend in the order in which the curves end
        at, color = [p["step"] for p in arms[number]["probes"]], matplotlib.colormaps["tab20"](number % 20)
        right.plot(at, curves[number], ("-", "--")[number // 20 % 2], color=color, label=names[number], lw=1.2)
    right.set(xlabel="training step", ylabel="attention on BOS", ylim=(0, 1))
    right.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def check(arms: list[dict]) -> None:
    """What the smoke must show: the baseline's attention is on BOS, the gated model's is not."""
    found = {arm["arm"]: COLUMNS["attention on BOS"](arm["probes"][-1]) for arm in arms}
    if not found["baseline"].min() > 2 * found["g1"].max():
        sys.exit(f"error: the sink should form without the gate and not with it, but attention on BOS is {found}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--arms", type=lambda text: text.split(";"), default=list(ARMS), help="of these, separated by ; (all)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args(argv)
    if args.smoke:
        args.arms, args.seeds, args.steps = SMOKE, 1, 400
    for arm in args.arms:
        if arm not in ARMS:
            raise ConfigError(f"unknown arm {arm!r}{suggest(arm, ARMS)}; there is: {'; '.join(ARMS)}")
    args.out.mkdir(parents=True, exist_ok=True)
    paths = {arm: args.out / (re.sub("[^a-z0-9_+]+", "-", arm) + ".json") for arm in ARMS}
    task = from_speeches()
    for arm in args.arms:
        if paths[arm].exists():
            held = json.loads(paths[arm].read_text())
            if (held["steps"], held["seeds"]) != (args.steps, args.seeds):
                raise ConfigError(f"{paths[arm]} holds {held['steps']} steps of {held['seeds']} seeds: use another --out")
        else:
            write_atomically(paths[arm], (json.dumps(run_arm(arm, task, args.seeds, args.steps)) + "\n").encode())
    done = [json.loads(path.read_text()) for path in paths.values() if path.exists()]
    (args.out / "table.md").write_text(table(done))
    draw(done, args.out / "sweep.png")
    print(table(done))
    if args.smoke:
        check(done)


if __name__ == "__main__":
    command.run(main)
