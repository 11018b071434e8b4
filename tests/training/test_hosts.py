"""Several processes on this machine as one run, through the command line."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEVICES = 4  # in all
RECIPE = ["--config=configs/moe15b.py:smoke,gate=g1", "--config.train.steps=8", "--config.train.log_every=1",
          "--config.model.dtype=float32", "--config.eval.every=4", "--config.eval.batches=1", "--config.probe.every=4",
          "--config.checkpoint.every=4", "--config.mesh.fsdp=2", "--config.mesh.data=2", "--config.train.seq_len=32"]  # fmt: skip


def start(workdir, count, *more) -> list[subprocess.Popen]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(DEVICES // count),
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
    }
    command = [sys.executable, "run.py", *RECIPE, f"--workdir={workdir}", *more]
    flags = [f"--coordinator=127.0.0.1:{port}", f"--process_count={count}"]
    return [
        subprocess.Popen(command + [*flags, f"--process_id={i}"] * (count > 1), cwd=ROOT, env=env, text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for i in range(count)
    ]  # fmt: skip


def finish(processes, timeout=300):
    """(stdout, stderr, exit code) of each."""
    return [(*p.communicate(timeout=timeout), p.returncode) for p in processes]


def lines(workdir, name="metrics.jsonl"):
    return [json.loads(line) for line in (workdir / name).read_text().splitlines()]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("alone")
    (_, err, code), *_ = finish(start(workdir, 1))
    assert code == 0, err
    return workdir


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_any_number_of_processes_trains_alike(count, alone, tmp_path):
    results = finish(start(tmp_path, count))
    assert [code for *_, code in results] == [0] * count, results[0][1] + results[-1][1]
    for name, keys in (("metrics.jsonl", ("loss", "grad_norm")), ("eval.jsonl", ("loss",)), ("heads.jsonl", ("sink_rate",))):
        expected, found = lines(alone, name), lines(tmp_path, name)
        assert [line["step"] for line in found] == [line["step"] for line in expected]  # written once, by one of them
        for a, b in zip(expected, found, strict=True):
            assert all(b[key] == pytest.approx(a[key], rel=2e-5) for key in keys)
    # The first speaks for all. Gloo's threads tell of connections on every process' stdout, one amid another's line.
    spoken = {line for line in results[0][0].splitlines() if line.strip() and "Gloo" not in line and "peer" not in line}
    assert any("step 8/8" in line for line in spoken)
    for out, *_ in results[1:]:
        assert "step " not in out and not spoken & {*out.splitlines()}, out


@pytest.mark.slow
def test_sigterm_to_one_saves_all_and_one_process_goes_on(alone, tmp_path):
    processes = start(tmp_path, 2, "--config.train.steps=2000", "--config.checkpoint.every=0")
    wait_for(lambda: (tmp_path / "metrics.jsonl").exists() and len(lines(tmp_path)) > 3, processes)
    processes[1].send_signal(signal.SIGTERM)
    results = finish(processes, timeout=120)
    assert [code for *_, code in results] == [128 + signal.SIGTERM] * 2, results
    stopped = int(re.search(r"SIGTERM: stopped after step (\d+) and saved it", results[0][0])[1])
    assert (tmp_path / "checkpoints" / str(stopped)).is_dir()
    (out, err, code), *_ = finish(start(tmp_path, 1, f"--config.train.steps={stopped + 2}"))
    assert code == 0, err
    assert f"resuming     from step {stopped}" in out
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, stopped + 3))
    for a, b in zip(lines(alone)[: stopped + 2], lines(tmp_path), strict=False):
        if a["step"] < 5:  # another schedule later on
            assert a["ce"] == pytest.approx(b["ce"], rel=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_death_takes_the_others_down_within_a_minute(victim, tmp_path):
    processes = start(tmp_path, 2, "--config.train.steps=5000")
    wait_for(lambda: (tmp_path / "metrics.jsonl").exists() and len(lines(tmp_path)) > 3, processes)
    processes[victim].kill()
    began = time.monotonic()
    out, err = processes[1 - victim].communicate(timeout=90)
    assert time.monotonic() - began < 60
    assert processes[1 - victim].returncode not in (0, None)
    assert "another process of this run has ended" in err or "distributed service detected fatal errors" in err
    processes[victim].communicate()


def wait_for(condition, processes, seconds=240):
    for _ in range(seconds * 2):
        if condition():
            return
        if any(p.poll() is not None for p in processes):
            raise AssertionError(finish(processes))
        time.sleep(0.5)
    raise AssertionError("it did not happen")


@pytest.mark.parametrize(
    "arguments,message",
    [
        (("here:1", None, None), "missing: --process_count, --process_id"),
        (("here", 2, 0), "--coordinator=here: must be HOST:PORT"),
        (("here:1", 2, 2), "--process_id=2: must be in 0..1"),
    ],
)
def test_what_does_not_fit_together(arguments, message):
    from gatedattn.config import ConfigError
    from gatedattn.training import hosts

    with pytest.raises(ConfigError, match=re.escape(message)):
        hosts.join(*arguments)


def test_alone_unless_a_launcher_says_otherwise(monkeypatch):
    from gatedattn.training import hosts

    monkeypatch.setattr(hosts.jax.distributed, "initialize", lambda **given: asked.append(given))
    asked = []
    monkeypatch.setenv("SLURM_NTASKS", "4")  # in an allocation, but not under srun
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    hosts.join()
    assert asked == []
    monkeypatch.setenv("SLURM_PROCID", "1")
    hosts.join()
    assert list(asked[0]) == ["heartbeat_timeout_seconds", "initialization_timeout"]
    hosts.join("10.0.0.1:99", 2, 1)
    assert asked[1]["coordinator_address"] == "10.0.0.1:99" and asked[1]["process_id"] == 1


@pytest.mark.parametrize(
    "tasks,hosts_of_step,visible,mine",
    [
        (8, 8, "0,1,2,3,4,5,6,7", [0, 1, 2, 3, 4, 5, 6, 7]),  # one task a host takes all its GPUs
        (8, 8, "4,5", [0, 1]),  # they are counted among those it sees
        (64, 8, "0,1,2,3,4,5,6,7", None),  # one a GPU: JAX takes the one of the task's number
        (64, 8, "3", [0]),  # --gpus-per-task=1: each sees its own only
        (2, 2, "", None),  # no GPU
    ],
)
def test_gpus_under_slurm(monkeypatch, tasks, hosts_of_step, visible, mine):
    from gatedattn.training import hosts

    asked = []
    monkeypatch.setattr(hosts.jax.distributed, "initialize", lambda **given: asked.append(given))
    slurm = {"SLURM_NTASKS": tasks, "SLURM_PROCID": 1, "SLURM_STEP_NUM_NODES": hosts_of_step, "CUDA_VISIBLE_DEVICES": visible}
    for name, value in slurm.items():
        monkeypatch.setenv(name, str(value))
    hosts.join()
    assert asked[0].get("local_device_ids") == mine
    monkeypatch.setenv("JAX_LOCAL_DEVICE_IDS", "5")
    hosts.join()
    assert "local_device_ids" not in asked[1]
