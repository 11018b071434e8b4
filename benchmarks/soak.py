"""Endurance: a small run for a while, with everything that a long one does, and whether it stays as it was.

python -m benchmarks.soak [--minutes=30] [--workdir=DIR] [--json]

Trains the smoke version of the tiny recipe in this process, with checkpoints, evaluations and probes every few steps, and samples while
it goes: memory of its own in RAM (pages of libraries and other files, which the kernel drops and reads again as it likes, do not count),
open files, threads, and the CPU seconds of a step (which a busy machine changes less than its wall-clock time).
Prints the level of each, and its slope an hour over the second half: the first warms up caches and allocators. Exit code 1 unless all
are flat: a slope that would move the level by more than 5 % (files, threads: by 2; CPU: by 20 %) over the time it was fitted to is not.
"""

import argparse
import dataclasses
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time

import numpy as np

from configs import tiny
from gatedattn.config import CheckpointConfig, EvalConfig, ProbeConfig, RunConfig, from_mapping
from gatedattn.training import loop, recorder

EVERY = 2.0  # seconds between samples
LIMITS = {"memory_mb": 0.05, "open_files": 2, "threads": 2, "cpu_seconds_per_step": 0.2}  # below 1: of the level


class Samples(threading.Thread):
    """Rows of (seconds, memory in MB, open files, threads, CPU seconds, steps) until `minutes` after the first step, which it then
    ends as the system would: SIGTERM."""

    def __init__(self, metrics: str, minutes: float):
        super().__init__(daemon=True)
        self.metrics, self.minutes, self.rows = metrics, minutes, []

    def run(self):
        began = None
        while began is None or time.monotonic() < began + 60 * self.minutes:
            time.sleep(EVERY)
            if not (step := self.last_step()):
                continue
            began = began or time.monotonic()
            with open("/proc/self/status") as file:
                memory = int(re.search(r"RssAnon:\s+(\d+) kB", file.read())[1]) * 1024 / 1e6
            files, seconds = len(os.listdir("/proc/self/fd")), time.monotonic() - began
            self.rows.append((seconds, memory, files, threading.active_count(), time.process_time(), step))
        os.kill(os.getpid(), signal.SIGTERM)

    def last_step(self) -> int:
        if not os.path.exists(self.metrics):
            return 0
        with open(self.metrics, "rb") as file:
            file.seek(max(os.path.getsize(self.metrics) - 4000, 0))
            lines = file.read().split(b"\n")[:-1]
        return json.loads(lines[-1])["step"] if lines else 0


def run_config() -> RunConfig:
    config = from_mapping(RunConfig, tiny.get_config("smoke").to_dict())
    return dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, steps=10**8, seq_len=64, log_every=5),
        optimizer=dataclasses.replace(config.optimizer, schedule="constant"),
        checkpoint=CheckpointConfig(every=100, keep=2, keep_every=5000),
        eval=EvalConfig(every=50, batches=2),
        probe=ProbeConfig(every=50, rows=4),
    )


def soak(minutes: float, workdir: str) -> dict:
    metrics = os.path.join(workdir, "metrics.jsonl")
    samples = Samples(metrics, minutes)
    samples.start()
    result = loop.train(run_config(), workdir)
    samples.join()
    rows = np.array(samples.rows)
    seconds, cpu, steps = rows[:, 0], rows[:, 4], rows[:, 5]
    # CPU seconds of a step, over windows of a tenth of the time.
    edges = np.searchsorted(seconds, np.linspace(0, seconds[-1], 11))
    windows = [(seconds[b], (cpu[b] - cpu[a]) / (steps[b] - steps[a])) for a, b in zip(edges, edges[1:]) if steps[b] > steps[a]]
    series = {name: (seconds, rows[:, i]) for i, name in enumerate(("memory_mb", "open_files", "threads"), 1)}
    series["cpu_seconds_per_step"] = tuple(np.array(windows).T)
    found = {"minutes": minutes, "steps": result.step}
    for name, (at, values) in series.items():
        half = at >= at[-1] / 2
        slope = float(np.polyfit(at[half] / 3600, values[half], 1)[0])
        level = float(np.median(values[half]))
        moved = slope * (at[-1] - at[half][0]) / 3600
        limit = LIMITS[name] * level if LIMITS[name] < 1 else LIMITS[name]
        found[name] = {"level": level, "largest": float(values.max()), "per_hour": slope, "flat": bool(moved <= limit)}
    logged = [line["step"] for line in recorder.read_lines(metrics)]
    found["each_step_once"] = len(set(logged)) == len(logged)
    found["flat"] = found["each_step_once"] and all(found[name]["flat"] for name in LIMITS)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--workdir", help="a new folder; a temporary one by default")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    workdir = args.workdir or tempfile.mkdtemp(prefix="soak-")
    real, sys.stdout = sys.stdout, open(os.devnull, "w")  # the run's own lines
    try:
        found = soak(args.minutes, workdir)
    finally:
        sys.stdout.close()
        sys.stdout = real
        if not args.workdir:
            shutil.rmtree(workdir, ignore_errors=True)
    if args.json:
        print(json.dumps(found))
        return 0 if found["flat"] else 1
    print(
        f"{found['steps']} steps in {args.minutes:g} minutes, each logged step once: {'yes' if found['each_step_once'] else 'NO'}"
    )
    print(f"{'':<22} {'level':>10} {'largest':>10} {'an hour':>10}")
    for name in LIMITS:
        about = found[name]
        numbers = " ".join(f"{about[key]:>10.4g}" for key in ("level", "largest", "per_hour"))
        print(f"{name:<22} {numbers}  {'flat' if about['flat'] else 'NOT FLAT'}")
    return 0 if found["flat"] else 1


if __name__ == "__main__":
    sys.exit(main())
