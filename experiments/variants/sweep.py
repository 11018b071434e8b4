"""The paper's tables at a size anyone can run: variants x seeds x learning rates, trained, collected, and set beside what the paper reports.

    python -m experiments.variants.corpus --out=runs/variants/text
    python -m experiments.variants.sweep --out=experiments/variants/results [--runs=runs/variants] [--jobs=2] [--minutes=60]
    python -m experiments.variants.sweep --out=runs/smoke --runs=runs/smoke/runs --smoke

Every run is `run.py` with experiments/variants/config.py in a process of its own, so one that was interrupted goes on where it was saved;
--jobs of them at a time, on a CPU each on a core of its own, on one accelerator (--share) side by side. What is in --out already is not run
again; a run that ends leaves a few numbers there, so that results can be kept as they come. --minutes: begin no run after that long. Then
tables.md and variants.png are made from all that is there (--seeds=0: that alone). After `--` come settings for every run,
`-- --config.train.steps=8000`.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from experiments import command
from gatedattn import variants
from gatedattn.config import ConfigError, GuardConfig, suggest
from gatedattn.data.cache import write_atomically
from gatedattn.probes import spikes
from gatedattn.report.runs import Run
from gatedattn.training.recorder import finite, read_lines

RATE = 3e-3  # of experiments/variants/config.py
SMOKE = (
    "--config.data.source=tfds:sotu",
    "--config.train.steps=20",
    "--config.optimizer.warmup_steps=5",
    "--config.probe.every=10",
)


@dataclasses.dataclass(frozen=True)
class Row:
    """gate: the recipe's; options: what else differs; paper: the row's name in `gatedattn.variants`."""

    gate: str = "none"
    options: tuple[str, ...] = ()
    paper: str = ""


def size(d_model: int) -> tuple[str, ...]:
    """The recipe's shape at another width: heads of 64, FFN of 8/3 of it, embeddings scaled by its square root."""
    heads, ffn = d_model // 64, round(d_model * 8 / 3 / 16) * 16
    shape = {
        "d_model": d_model,
        "num_heads": heads,
        "num_kv_heads": heads,
        "ffn_dim": ffn,
        "embedding_scale": round(d_model**0.5),
    }
    return tuple(f"--config.model.{name}={value}" for name, value in shape.items())


LADDER = {64: ("baseline d64", "G1 d64"), 128: ("baseline d128", "G1 d128"), 192: ("baseline", "G1")}
ROWS = {
    "baseline": Row(paper="baseline"),
    "G1": Row("g1", paper="sdpa-elementwise"),
    "G2": Row("g2", paper="value-elementwise"),
    "G3": Row("g3", paper="key-elementwise"),
    "G4": Row("g4", paper="query-elementwise"),
    "G5": Row("g5", paper="dense-elementwise"),
    "G1 headwise": Row("g1:headwise", paper="sdpa-headwise"),
    "G1 head-shared": Row("g1:mean", paper="sdpa-shared"),
    "G1 input-independent": Row("g1:none", paper="sdpa-input-independent"),
    "G1 NS-sigmoid": Row("g1:ns_sigmoid", paper="sdpa-ns-sigmoid"),
    "G1 additive": Row("g1:add:silu", paper="sdpa-add-silu"),
    "learned sink": Row(options=("--config.model.sink=learned",)),
    "sandwich norm": Row(options=("--config.model.sandwich_norm=True",)),
    "QK-norm": Row(options=("--config.model.qk_norm=True",)),
    "learned positions": Row(options=("--config.model.position=learned",)),
    "learned positions, G1": Row("g1", ("--config.model.position=learned",)),
    "Muon": Row(options=("--config.optimizer.name=muon",)),
    "Muon, G1": Row("g1", ("--config.optimizer.name=muon",)),
}
NSA_BLOCKS = "compress_block=16 compress_stride=8 select_block=32 select_count=6 window=64".split()  # rows of 512 tokens
for name, changes in (
    ("NSA", NSA_BLOCKS),
    ("NSA, equal gates", (*NSA_BLOCKS, "gate=equal")),
    ("NSA, dense", ("sparse=False",)),
    ("NSA, dense, equal gates", ("sparse=False", "gate=equal")),
):  # what the gates do without the sparsity, and the sparsity without the gates
    ROWS[name] = Row(options=tuple(f"--config.model.nsa.{change}" for change in ("enabled=True", *changes)))
SMALLER = {row: Row(gate, size(d)) for d in (64, 128) for row, gate in zip(LADDER[d], ("none", "g1"))}
ROWS |= SMALLER
# Learning rates; of the other rows the recipe's only.
TIMES = {"baseline": (0.5, 1, 2, 4), "sandwich norm": (1, 2, 4), "G1": (0.5, 1, 2, 4)}


@dataclasses.dataclass(frozen=True)
class Study:
    """rows by name; times: learning rates of some of them, in the recipe's; write: makes tables and figures of results, returns text."""

    about: str
    rows: dict[str, Row]
    times: dict[str, tuple[float, ...]]
    write: Callable[[list[dict], Path], str]
    smoke: tuple[str, ...] = ("baseline", "G1")
    runs: Path = Path("runs/variants")

    def plan(self, rows: list[str], seeds: int, smoke: bool) -> Iterator[Job]:
        """Seed by seed, so that what there is can be compared at any time."""
        for seed in range(seeds):
            yield from (Job(row, self.rows[row], 1, seed) for row in rows)
            if not smoke:
                yield from (Job(row, self.rows[row], n, seed) for row in rows for n in self.times.get(row, ()) if n != 1)


@dataclasses.dataclass(frozen=True)
class Job:
    name_of_row: str
    row: Row
    times: float
    seed: int

    @property
    def name(self) -> str:
        return "-".join([self.name_of_row.lower().replace(",", "").replace(" ", "_"), f"x{self.times}", str(self.seed)])

    def command(self, runs: Path, smoke: bool, more: list[str]) -> list[str]:
        return [
            sys.executable, "run.py", f"--config=experiments/variants/config.py:gate={self.row.gate}{',smoke' if smoke else ''}",
            f"--workdir={runs / self.name}", f"--config.train.seed={self.seed}", *self.row.options,
            f"--config.optimizer.learning_rate={self.times * RATE}", *more,
        ]  # fmt: skip


def collect(job: Job, path: Path, stopped: bool) -> dict:
    """What a run says of the paper's questions when it has ended, or was stopped because its loss is finite no more.

    spikes, rise: of the loss curve, `gatedattn.probes.spikes`; rise is the largest one and the median of what would be a spike, both after the
    first 30 steps. gradient_spikes: steps whose gradient norm is one by `config.guard`. grad_norm: median, 99 % and largest after the warm-up.
    diverged: stopped, or the last twentieth of the steps lies 0.5 nats above the lowest mean of as many.
    """
    run = Run.read(path, job.name)
    known, heads = run.summary(), run.heads[-1] if run.heads else {}
    losses = np.array([line["loss"] for line in run.metrics], float)
    smooth = np.convolve(losses, np.full(n := max(1, len(losses) // 20), 1 / n), "valid")
    rises, limits = (x[30:] for x in spikes.rises(run.curve.values))  # before, spikes have no limit yet
    warm = np.array([line["grad_norm"] for line in run.metrics if line["step"] > run.config["optimizer.warmup_steps"]], float)
    warm = warm[np.isfinite(warm)]
    gates = [np.nanmean(values[-1][1]) for values in run.gate("mean").values()]
    by_layer = heads.get("activation_max")
    return {
        "row": job.name_of_row,
        "times": job.times,
        "seed": job.seed,
        "steps": known["steps"],
        "tokens": known["tokens"],
        "loss": None if stopped else known["held-out loss"],
        "loss_by_step": [(line["step"], line["loss"]) for line in run.evals],
        "params": run.about["params_total"],
        "mean_gate": float(np.mean(gates)) if gates else None,
        "m_act": mean(by_layer) if by_layer else None,
        "activation_by_layer": by_layer,
        "grad_norm": np.quantile(warm, (0.5, 0.99, 1)).tolist() if len(warm) else None,
        "f_attn": known["bos_share"],
        "best_head": known["best head"],
        "sink_rate": known["sink_rate"],
        "f_attn_by_step": [(line["step"], mean(line["bos_share"])) for line in run.heads],
        "floor": float(np.mean(1 / np.arange(2, run.config["train.seq_len"] + 1))),
        "spikes": known["loss spikes"],
        "rise": [float(np.max(rises)), float(np.median(limits))] if len(rises) else None,
        "gradient_spikes": sum("gradient" in line["reason"] for line in read_lines(path / "bad_steps.jsonl")),
        "diverged": bool(stopped or not np.isfinite(smooth[-1]) or smooth[-1] > np.nanmin(smooth) + 0.5),
    }


def mean(values: list) -> float:
    """NaN if one of them is not finite, which JSON lines write as null."""
    return float(np.mean(np.array(values, float)))


def by_guard(bad_steps: list[dict]) -> bool:
    """Whether the last bad steps are so many skipped ones in a row that training stopped for them; spikes are applied, and are many."""
    last = bad_steps[-GuardConfig().patience :]
    in_row = all(b["step"] == a["step"] + 1 for a, b in itertools.pairwise(last))
    return len(last) == GuardConfig().patience and in_row and all(line["update"] == "skipped" for line in last)


def work(job: Job, core: int | None, args) -> None:
    began, log = time.monotonic(), args.runs / f"{job.name}.log"
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # others share the accelerator
    with log.open("a") as file:
        command = job.command(args.runs, args.smoke, args.more)
        with subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment) as process:
            if core is not None:
                os.sched_setaffinity(process.pid, {core})  # before it has begun a thread
    stopped = process.returncode == 1 and by_guard(read_lines(args.runs / job.name / "bad_steps.jsonl"))
    if process.returncode and not stopped:
        raise ConfigError(f"{job.name} ended with {process.returncode}: see {log}")
    found = collect(job, args.runs / job.name, stopped) | {"settings": args.more}
    write_atomically(args.out / f"{job.name}.json", (json.dumps(finite(found)) + "\n").encode())
    told = "diverged" if stopped or found["loss"] is None else f"loss {found['loss']:.3f}, BOS {found['f_attn']:.3f}"
    print(f"{job.name}: {told}, {time.monotonic() - began:.0f} s", flush=True)


def read(folder: Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def run_all(jobs: list[Job], args) -> None:
    """--jobs at a time. The first error lets those that run come to their end, and is raised."""
    cores = sorted(os.sched_getaffinity(0)) if args.jobs > 1 and hasattr(os, "sched_setaffinity") else []
    waiting, began = iter(jobs), time.monotonic()

    def lane(number: int) -> None:
        for job in waiting:
            if args.minutes and time.monotonic() - began > 60 * args.minutes:
                return
            work(job, cores[number % len(cores)] if cores and not args.share else None, args)

    with ThreadPoolExecutor(args.jobs) as pool:
        for future in [pool.submit(lane, number) for number in range(args.jobs)]:
            future.result()


# --- tables --------------------------------------------------------------------------------------------------------------------


def interval(values: list[float]) -> str:
    """Mean and the half width of its 95 % confidence interval (Student's t over seeds)."""
    from scipy import stats

    values = [value for value in values if value is not None]
    if not values:
        return "-"
    if len(values) == 1:
        return f"{values[0]:.4g}"
    half = stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values))
    return f"{np.mean(values):.4g} ± {half:.2g}"


def markdown(head: list[str], rows: list[list[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *rows))


def tables(results: list[dict]) -> str:
    """The paper's Tables 1 and 3, 4, and 2, ours and its figures side by side."""
    plain = {row: [r for r in results if r["row"] == row and r["times"] == 1 and r["loss"] is not None] for row in ROWS}
    plain = {row: found for row, found in plain.items() if found and row not in SMALLER}
    paper = {row: variants.VARIANTS[ROWS[row].paper] if ROWS[row].paper else None for row in plain}

    def printed(row: str, name: str) -> str:
        value = getattr(paper[row], name) if paper[row] else None
        return "-" if value is None else f"{value:g}"

    first = []
    for row, found in plain.items():
        by_seed = {r["seed"]: r["loss"] for r in plain.get("baseline", [])}
        gains = [r["loss"] - by_seed[r["seed"]] for r in found if r["seed"] in by_seed] if row != "baseline" else []
        reported = paper[row] and paper[row].ppl and row != "baseline"
        nats = f"{math.log(paper[row].ppl / variants.VARIANTS['baseline'].ppl):+.4f}" if reported else "-"
        losses = [r["loss"] for r in found]
        cells = [
            row,
            str(len(found)),
            interval(losses),
            f"{math.exp(np.mean(losses)):.2f}",
            interval(gains),
            printed(row, "ppl"),
            nats,
        ]
        first.append(cells)
    head = ["variant", "seeds", "loss", "perplexity", "over the baseline, nats", "the paper's PPL", "the paper's, nats"]
    text = "Tables 1 and 3:\n\n" + markdown(head, first) + noise(plain)

    fourth = []
    for row, found in plain.items():
        cells = [interval([r[name] for r in found]) for name in ("mean_gate", "m_act", "f_attn", "best_head")]
        fourth.append([row, *cells, *(printed(row, name) for name in ("mean_gate", "m_act", "f_attn"))])
    head = ["variant", "gate mean", "M-Act", "F-Attn", "best head", "the paper's gate", "M-Act", "F-Attn"]
    text += f"\nTable 4 (a model that attends evenly has F-Attn {results[0]['floor']:.3f}):\n\n" + markdown(head, fourth)
    text += correlations(plain, paper)

    second = []
    for row, all_times in TIMES.items():
        for times in all_times:
            if found := [r for r in results if (r["row"], r["times"]) == (row, times)]:
                diverged = sum(r["diverged"] for r in found)
                columns = ([r["loss"] for r in found], [r["spikes"] for r in found], [r.get("gradient_spikes") for r in found])
                second.append([row, f"x{times}", str(len(found)), *(interval(column) for column in columns), str(diverged)])
    return (
        text
        + "\nTable 2, learning rates:\n\n"
        + markdown(["variant", "rate", "seeds", "loss", "spikes", "gradient spikes", "diverged"], second)
        + ladder(results)
    )


def noise(plain: dict[str, list[dict]]) -> str:
    """What a difference of two rows is sure to, from what is left of loss[row, seed] = row + seed (an analysis of variance in two ways).

    A row's own interval has so few seeds that it says little; this one takes the noise to be the same in all rows, and so learns it from all.
    """
    from scipy import stats

    losses = [found for row in plain.values() if len(found := {r["seed"]: r["loss"] for r in row}) > 1]
    seeds = sorted(set.intersection(*map(set, losses))) if losses else []
    if len(losses) < 2 or len(seeds) < 2:
        return ""
    table = np.array([[row[seed] for seed in seeds] for row in losses])
    left = table - table.mean(0) - table.mean(1, keepdims=True) + table.mean()
    freedom = (len(losses) - 1) * (len(seeds) - 1)
    sd = math.sqrt((left**2).sum() / freedom)
    half = stats.t.ppf(0.975, freedom) * sd * math.sqrt(2 / len(seeds))
    return (
        f"\nWhat row and seed do not explain has a standard deviation of {sd:.3f} nats ({len(losses)} rows, {len(seeds)} seeds): the "
        f"difference of two such rows is sure to ± {half:.3f} (95 %).\n"
    )


def correlations(plain: dict[str, list[dict]], paper: dict) -> str:
    """Spearman's rank correlations of the gate's mean with M-Act and F-Attn, over the rows of the paper's Table 4."""
    from scipy import stats

    rows = [row for row in plain if paper[row] and paper[row].mean_gate is not None]
    if len(rows) < 3:
        return ""
    told = []
    for name, title in (("m_act", "M-Act"), ("f_attn", "F-Attn")):
        ours = stats.spearmanr(
            *([np.mean([r[key] for r in plain[row]]) for row in rows] for key in ("mean_gate", name))
        ).statistic
        theirs = stats.spearmanr(*([getattr(paper[row], key) for row in rows] for key in ("mean_gate", name))).statistic
        told.append(f"with {title} {ours:.2f} (the paper's {theirs:.2f})")
    return f"\nRank correlation of the gate's mean over {len(rows)} gated rows {' and '.join(told)}.\n"


def ladder(results: list[dict]) -> str:
    """Loss with and without the gate by parameters, the gain by tokens too; by least squares, how each changes with ln(parameters)."""
    from scipy import stats

    def of(row: str) -> dict[int, dict]:
        return {r["seed"]: r for r in results if (r["row"], r["times"]) == (row, 1) and r["loss"] is not None}

    def gain(pair: tuple[dict, dict], step: int) -> float:
        without, gated = (dict(r["loss_by_step"])[step] for r in pair)
        return gated - without

    pairs = {d: [(of(a)[seed], of(b)[seed]) for seed in of(a) if seed in of(b)] for d, (a, b) in LADDER.items()}
    pairs = {d: found for d, found in pairs.items() if found}
    if len(pairs) < 2:
        return ""
    found = list(itertools.chain(*pairs.values()))
    steps = sorted(set.intersection(*({step for step, _ in r["loss_by_step"]} for pair in found for r in pair)))
    lines = []
    for d, mine in pairs.items():
        sizes = [f"{mine[0][i]['params'] / 1e6:.2f}M" for i in (0, 1)]
        columns = [[pair[i]["loss"] for pair in mine] for i in (0, 1)] + [[gain(pair, step) for pair in mine] for step in steps]
        lines.append([str(d), *sizes, *map(interval, columns)])
    per_step = found[0][0]["tokens"] / found[0][0]["steps"] / 1e6
    head = [
        "d",
        "parameters",
        "with G1",
        "loss",
        "with G1",
        *(f"difference at {step * per_step:.2g}M tokens" for step in steps),
    ]
    text = "\nA ladder of sizes, the same tokens, nats:\n\n" + markdown(head, lines)
    if len(found) < 3:
        return text

    def slope(losses: list[float]) -> str:
        fit = stats.linregress([math.log(without["params"]) for without, _ in found], losses)
        return f"{fit.slope:+.4f} ± {stats.t.ppf(0.975, len(found) - 2) * fit.stderr:.2g}"

    without, gated = ([pair[i]["loss"] for pair in found] for i in (0, 1))
    difference = slope([b - a for a, b in zip(without, gated)])
    return (
        text
        + f"\nFor e times the parameters: loss {slope(without)} nats, with G1 {slope(gated)}, the difference {difference}.\n"
    )


def draw(results: list[dict], path: Path) -> None:
    """Of the plain learning rate. Left: loss. Middle: attention on BOS against the gate's mean. Right: attention on BOS over training."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    results = [r for r in results if r["times"] == 1 and not r["diverged"] and r["row"] not in SMALLER]
    rows = [row for row in ROWS if any(r["row"] == row for r in results)]
    figure = Figure(figsize=(13, 0.24 * len(rows) + 2.2), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for number, row in enumerate(rows):
        found, color = [r for r in results if r["row"] == row], colormaps["tab20"](number % 20)
        left.plot([r["loss"] for r in found], [number] * len(found), "o", color=color, ms=4)
        if found[0]["mean_gate"] is not None:
            middle.plot([r["mean_gate"] for r in found], [r["f_attn"] for r in found], "o", color=color, ms=4)
        steps = [step for step, _ in found[0]["f_attn_by_step"]]
        curves = [[value for _, value in r["f_attn_by_step"]] for r in found]
        right.plot(steps, np.mean(np.array(curves, float), 0), color=color, lw=1.2, label=row)
    left.set(xlabel="held-out loss (nats)", yticks=range(len(rows)), yticklabels=rows)
    left.invert_yaxis()
    middle.set(xlabel="mean gate", ylabel="attention on BOS", ylim=(0, None))
    right.set(xlabel="training step", ylabel="attention on BOS", ylim=(0, None))
    if results:
        right.axhline(results[0]["floor"], color="gray", ls=":", lw=0.8)
        figure.legend(*right.get_legend_handles_labels(), frameon=False, fontsize=7, loc="outside right upper")
    for axis in (left, middle, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def write(results: list[dict], folder: Path) -> str:
    draw(results, folder / "variants.png")
    return tables(results)


STUDY = Study(__doc__, ROWS, TIMES, write)


def main(argv: list[str] | None = None, study: Study = STUDY) -> None:
    argv = list(sys.argv[1:] if argv is None else argv)
    argv, more = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parser = argparse.ArgumentParser(description=study.about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=study.runs, help="where the runs' folders are")
    parser.add_argument(
        "--rows", type=lambda text: text.split(";"), default=list(study.rows), help="of these, separated by ; (all)"
    )
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; on a CPU each on a core of its own")
    parser.add_argument("--share", action="store_true", help="runs at a time share all cores (on an accelerator)")
    parser.add_argument("--minutes", type=float, default=0, help="begin no run after that long; 0: run all")
    parser.add_argument("--smoke", action="store_true", help="two rows, one seed, 20 steps on the speeches")
    args = parser.parse_args(argv)
    args.more = [*(SMOKE if args.smoke else ()), *more]
    if args.smoke:
        args.rows, args.seeds = list(study.smoke), 1
    for row in args.rows:
        if row not in study.rows:
            raise ConfigError(f"unknown row {row!r}{suggest(row, study.rows)}; there is: {'; '.join(study.rows)}")
    for folder in (args.out, args.runs):
        folder.mkdir(parents=True, exist_ok=True)
    jobs = [job for job in study.plan(args.rows, args.seeds, args.smoke) if not (args.out / f"{job.name}.json").exists()]
    others = [settings for r in read(args.out) if (settings := r.get("settings", [])) != args.more]
    if jobs and others:
        raise ConfigError(f"{args.out} holds results of other settings ({' '.join(others[0]) or 'none'}): give another --out")
    run_all(jobs, args)
    if results := read(args.out):
        text = study.write(results, args.out)
        (args.out / "tables.md").write_text(text)
        print(text)


if __name__ == "__main__":
    command.run(main)
