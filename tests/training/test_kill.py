"""SIGKILL at whatever moment: the run that is started again ends up where an undisturbed one does."""

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gatedattn.config import to_mapping
from gatedattn.training import recorder

ROOT = Path(__file__).parents[2]

# A process that has imported everything and forks one for each line of its input: to import JAX anew takes seconds.
FORKS = """
import hashlib, json, os, sys
import jax
import numpy as np
from gatedattn.config import RunConfig, from_mapping
from gatedattn.training import loop

def run(config, workdir):
    result = loop.train(from_mapping(RunConfig, config), workdir)
    sums = hashlib.sha256()
    for leaf in jax.tree.leaves(result.params):
        sums.update(np.asarray(leaf).tobytes())
    with open(workdir + "/digest", "w") as file:
        file.write(sums.hexdigest())

for line in sys.stdin:
    config, workdir = json.loads(line)
    pid = os.fork()
    if not pid:
        os.dup2(2, 1)
        try:
            run(config, workdir)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.fixture
def start(text_config, tmp_path):
    """workdir, steps -> the pid of a process that trains there, and a function that waits for its exit code."""
    config = dataclasses.replace(
        text_config,
        train=dataclasses.replace(text_config.train, log_every=1),
        eval=dataclasses.replace(text_config.eval, every=3),
        checkpoint=dataclasses.replace(text_config.checkpoint, every=2),
    )
    env = os.environ | {
        "PYTHONPATH": str(ROOT),
        "XLA_FLAGS": "",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
    }
    with open(tmp_path / "log", "w") as log:
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
        forks = subprocess.Popen([sys.executable, "-W", "ignore", "-c", FORKS], env=env, text=True, **pipes)

        def begin(workdir, steps):
            now = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=steps))
            forks.stdin.write(json.dumps([to_mapping(now), str(workdir)]) + "\n")
            forks.stdin.flush()
            return int(forks.stdout.readline()), lambda: int(forks.stdout.readline())

        yield begin
        forks.stdin.close()
        forks.wait(timeout=60)


def files(workdir):
    found = {}
    for name in recorder.FILES:
        lines = recorder.read_lines(workdir / name)
        found[name] = [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in lines]
    return found


def last_step(workdir, name="metrics.jsonl"):
    lines = recorder.read_lines(workdir / name)
    return lines[-1].get("step", 0) if lines else 0


def unfinished(workdir):
    folder = workdir / "checkpoints"
    return [p for p in folder.iterdir() if not p.name.isdecimal()] if folder.exists() else []


def moment(kind, workdir, step):
    """Whether it is time to kill: at a step, during the save after it, during the evaluation after it."""
    reached = last_step(workdir) >= step
    if kind == "save":
        return reached and bool(unfinished(workdir))
    if kind == "evaluation":
        return reached and last_step(workdir) % 3 == 0 and last_step(workdir, "eval.jsonl") < last_step(workdir)
    return reached


def check(start, tmp_path, kills, steps, seed):
    _, wait = start(tmp_path / "whole", steps)
    assert wait() == 0, (tmp_path / "log").read_text()[-2000:]
    chance, run, saving, evaluating = random.Random(seed), tmp_path / "run", 0, 0
    for number in range(kills):
        pid, wait = start(run, steps)
        kind = ("save", "evaluation", "step", "time")[number % 4]
        if kind == "time":
            time.sleep(chance.uniform(0.05, 3))
        else:
            step = min(last_step(run) + chance.randrange(1, 2 + steps // kills), steps - 4)
            deadline = time.monotonic() + 300
            while not moment(kind, run, step) and time.monotonic() < deadline:
                time.sleep(0.002)
            time.sleep(chance.uniform(0, 0.004))
        os.kill(pid, signal.SIGKILL)
        assert wait() == -signal.SIGKILL
        saving += bool(unfinished(run))
        evaluating += last_step(run) % 3 == 0 and last_step(run, "eval.jsonl") < last_step(run)
    _, wait = start(run, steps)
    assert wait() == 0, (tmp_path / "log").read_text()[-2000:]
    assert (run / "digest").read_text() == (tmp_path / "whole/digest").read_text()
    assert files(run) == files(tmp_path / "whole")
    assert [line["step"] for line in files(run)["metrics.jsonl"]] == list(range(1, steps + 1))
    assert not unfinished(run) and not (run / "damaged").exists()
    return saving, evaluating


@pytest.mark.slow
def test_three_kills_change_nothing(start, tmp_path):
    check(start, tmp_path, kills=3, steps=18, seed=0)


@pytest.mark.slow
def test_twenty_kills_change_nothing(start, tmp_path):
    saving, evaluating = check(start, tmp_path, kills=20, steps=60, seed=1)
    assert saving >= 2 and evaluating >= 2  # some came in the middle of what they were meant to
