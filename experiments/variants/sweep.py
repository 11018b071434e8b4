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
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from experiments import command
from experiments.variants.rows import ROWS, TIMES, Row
from experiments.variants.tables import write
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
