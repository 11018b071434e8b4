"""The training loop: `train(config, workdir)` starts a run, or goes on with the one that `workdir` holds."""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from gatedattn import data as data_lib
from gatedattn import kernels, transformer
from gatedattn.config import ConfigError, RunConfig, to_mapping
from gatedattn.data import Data
from gatedattn.training import console, evaluate, recorder
from gatedattn.training import step as steps
from gatedattn.training.checkpoint import Checkpoints
from gatedattn.training.console import say
from gatedattn.training.hardware import peak_flops
from gatedattn.training.interrupt import Interrupt
from gatedattn.training.placement import Placement

BATCH_KEYS = ("tokens", "targets", "loss_mask", "segment_ids", "positions")  # what a training step reads


class Diverged(Exception):
    """The loss is no longer finite."""


@dataclass(frozen=True)
class Result:
    """A run as it stands. `signum`: the signal that ended it early, or None."""

    params: PyTree
    data: Data
    step: int
    signum: int | None = None


def prepare(
    config: RunConfig, workdir: str | Path | None, devices: Sequence[jax.Device] | None = None
) -> tuple[Data, Placement, dict]:
    """Everything that can be wrong with a run before something is compiled: platform, kernel, mesh, data.

    Returns the data, the placement, and what config.json tells besides the configuration. Raises `ConfigError`.
    """
    wanted = config.train.platform
    try:
        found = jax.default_backend()
    except RuntimeError as error:
        raise ConfigError(f"JAX finds no device: {str(error).splitlines()[0]}") from None
    if wanted not in ("any", found):
        raise ConfigError(
            f"train.platform={wanted}, but JAX found only {found}: install JAX for {wanted}, or set train.platform=any"
        )
    place = Placement.of(config, devices or jax.devices())
    try:
        kernel, passed = kernels.choose(config.model.kernel, attention_request(config, place))
    except ValueError as error:
        raise ConfigError(f"model.{error}") from None
    data = data_lib.load(
        config.data,
        seq_len=config.train.seq_len,
        batch_size=config.train.batch_size,
        seed=config.train.seed,
        workdir=workdir,
        vocab_size=config.model.vocab_size,
    )
    return data, place, recorder.environment(place.devices) | {"kernel": kernel, "kernels_passed_over": passed}


def attention_request(config: RunConfig, place: Placement) -> kernels.Request:
    """What a run will ask of an attention kernel."""
    model, ways = config.model, place.mesh.shape["context"] if place.mesh else 1
    return kernels.Request(
        place.platform, model.dtype, model.head_dim, True, model.window, model.sink != "none", ways, config.train.seq_len
    )


def train(config: RunConfig, workdir: str | Path, devices: Sequence[jax.Device] | None = None) -> Result:
    """Train to `train.steps`, on all devices or those given.

    The same call goes on where an interrupted one stopped, bit for bit as if it had not been. The host stays one step behind
    the device: it reads a logged step's metrics after the next step is dispatched. Ctrl-C and SIGTERM finish the step, save it
    and return. The last step is always evaluated, probed and saved.

    Raises `ConfigError` before anything is compiled if the run cannot start, `Diverged` once the loss is not finite.
    """
    workdir = Path(workdir)
    data, place, about = prepare(config, workdir, devices)
    with place.scope(), Checkpoints(workdir, config.checkpoint.keep) as checkpoints:
        return _Run(config, workdir, data, place, about, checkpoints).train()


def evaluate_checkpoint(config: RunConfig, workdir: str | Path, devices: Sequence[jax.Device] | None = None) -> list[dict]:
    """The newest checkpoint of `workdir` on all held-out text: a line as in eval.jsonl for each set.

    Raises `ConfigError` if there is no checkpoint, or it does not fit `config`.
    """
    if not (Path(workdir) / "checkpoints").is_dir():
        raise ConfigError(f"{workdir} holds no checkpoint: train first, or give the --workdir of a run")
    data, place, _ = prepare(config, workdir, devices)
    with place.scope(), Checkpoints(workdir, config.checkpoint.keep) as checkpoints:
        step = checkpoints.latest()
        if step is None:
            raise ConfigError(f"{workdir} holds no finished checkpoint: train first, or give the --workdir of a run")
        abstract = jax.eval_shape(steps.make_init(config)).params
        params = checkpoints.restore_params(place.on_devices(abstract), step)
        lines = evaluate.evaluate(jax.jit(steps.make_eval_step(config)), params, data, place)
    return [{"step": step} | line for line in lines]


class _Run:
    """The parts of one run, and what happens to them in order."""

    def __init__(self, config, workdir, data, place, about, checkpoints):
        self.config, self.workdir, self.data = config, workdir, data
        self.place, self.about, self.checkpoints = place, about, checkpoints
        self.steps = config.train.steps
        self.eval_step = jax.jit(steps.make_eval_step(config))
        self.probe_step = jax.jit(evaluate.make_probe_step(config))
        self.last: dict[str, Any] = {}  # the newest heads line and eval lines, for the summary

    def train(self) -> Result:
        config, summary = self.config, self.data.summary()
        counts = transformer.count(config.model)
        self.flops_per_token = transformer.flops_per_token(config.model, config.train.seq_len)
        state, start = self.start()
        console.banner(config, self.workdir, counts, summary, self.about)
        if start:
            self.announce_resume(start)
        if start >= self.steps:
            say(f"nothing to do: this run has taken {start} of {self.steps} steps; raise train.steps to go on")
            return Result(state.params, self.data, start)

        self.recorder = recorder.Recorder(self.workdir, config, self.about | counts | {"data_summary": summary}, start)
        self.progress = console.Progress(start, self.steps)
        try:
            with Interrupt() as interrupt:
                result = self.run(state, start, interrupt)
        finally:
            self.progress.close()
            self.recorder.close()
        if result.signum is None:
            self.summarize()
        else:
            name = signal.Signals(result.signum).name
            say(f"{name}: stopped after step {result.step} and saved it. The same command goes on from there.")
        return result

    def start(self) -> tuple[steps.TrainState, int]:
        """The state to begin with and its step: the newest checkpoint, or a new one."""
        abstract = jax.eval_shape(steps.make_init(self.config))
        step = self.checkpoints.latest()
        if step is None:
            return steps.initialize(self.config, self.place.shardings(abstract)), 0
        return self.checkpoints.restore(self.place.on_devices(abstract), step), step

    def announce_resume(self, start: int) -> None:
        say(f"  resuming     from step {start}")
        with contextlib.suppress(OSError, ConfigError, KeyError, ValueError):
            before, now = to_mapping(recorder.read_config(self.workdir)), to_mapping(self.config)
            for group, values in now.items():
                for name, value in values.items() if isinstance(values, dict) else ():
                    if before[group][name] != value:
                        say(f"               {group}.{name} was {before[group][name]!r} and is now {value!r}")

    def compile(self, state: steps.TrainState):
        """The train step, compiled for this state. Done apart from the first step, so that its seconds can be told."""
        say("compiling the training step ...")
        began = time.perf_counter()
        shardings = self.place.shardings(jax.eval_shape(lambda: state))
        step = jax.jit(steps.make_train_step(self.config), donate_argnums=0, out_shardings=shardings and (shardings, None))
        compiled = step.lower(state, self.batch(0)).compile()
        say(f"compiled in {time.perf_counter() - began:.1f} s")
        return compiled

    def batch(self, step: int) -> steps.Batch:
        batch = self.data.train(step)
        return self.place.put({key: batch[key] for key in BATCH_KEYS})

    def run(self, state: steps.TrainState, start: int, interrupt: Interrupt) -> Result:
        config = self.config
        train_step = self.compile(state)
        self.clock = _Clock(start)
        pending = None  # (step, metrics on the device) not yet read
        with contextlib.closing(data_lib.prefetch(self.batch, start, self.steps)) as batches:
            for step, batch in enumerate(batches, start + 1):
                state, metrics = train_step(state, batch)
                self.progress.advance()
                last = step == self.steps
                if pending:
                    self.log(*pending)
                logged = step % config.train.log_every == 0 or step == 1 or last
                pending = (step, metrics) if logged else None

                due = [last or _due(group.every, step) for group in (config.eval, config.probe, config.checkpoint)]
                evaluates, probes, saves = due
                if not (any(due) or interrupt.signum):
                    continue
                if pending:
                    self.log(*pending)
                    pending = None
                with self.clock.paused(state):
                    _check_finite(step, metrics)
                    if evaluates:
                        self.evaluate(step, state)
                    if probes:
                        self.probe(step, state)
                    if saves or interrupt.signum:
                        self.checkpoints.save(state, config)
                if interrupt.signum and not last:
                    return Result(state.params, self.data, step, interrupt.signum)
        return Result(state.params, self.data, self.steps)

    def log(self, step: int, metrics: dict) -> None:
        """Read a step's metrics off the device and write its line."""
        config = self.config
        values = {name: np.asarray(value).tolist() for name, value in jax.device_get(metrics).items()}
        line = {"step": step, "tokens": step * config.tokens_per_step}
        line |= {name: values.pop(name) for name in ("loss", "ce", "z_loss")}
        line["perplexity"] = evaluate.perplexity(line["ce"])
        line |= {name: values.pop(name) for name in ("grad_norm", "lr")}
        if rate := self.clock.rate(step):
            line["tokens_per_second"] = rate * config.tokens_per_step
            if peak := peak_flops(self.about["device_kind"]):
                line["mfu"] = self.flops_per_token * line["tokens_per_second"] / (peak * self.about["device_count"])
        if rows := self.data.train.num_rows:
            line["epoch"] = step * config.train.batch_size / rows
        line["loss_tokens"] = int(values.pop("tokens"))
        line |= values
        self.recorder.metrics(line)
        self.progress.metrics(line)
        _check_finite(step, line)

    def evaluate(self, step: int, state: steps.TrainState) -> None:
        lines = evaluate.evaluate(self.eval_step, state.params, self.data, self.place, self.config.eval.batches)
        self.last["eval"] = [{"step": step} | line for line in lines]
        for line in self.last["eval"]:
            self.recorder.evaluation(line)
            self.progress.evaluation(line)

    def probe(self, step: int, state: steps.TrainState) -> None:
        rows = evaluate.probe_rows(self.data, self.config.probe.rows)
        found = jax.device_get(self.probe_step(state.params, rows))
        self.last["heads"] = recorder.heads_line(step, found)
        self.recorder.heads(self.last["heads"])

    def summarize(self) -> None:
        say("finished")
        for line in self.last["eval"]:
            bits = f", {line['bits_per_byte']:.3f} bits per byte" if "bits_per_byte" in line else ""
            say(f"  held-out loss   {line['loss']:.4f} ({line['set']}){bits}")
        heads = self.last["heads"]
        say(f"  mean bos_share  {np.mean(heads['bos_share']):.3f}, sink_rate {heads['sink_rate']:.2f}")
        gates = heads.get("gate_mean")
        for spec, mean in gates.items() if isinstance(gates, dict) else [("", gates)] if gates is not None else ():
            say(f"  mean gate       {np.mean(mean):.3f} {spec}".rstrip())
        say(f"  max activation  {np.max(heads['activation_max']):.4g}")
        say(
            f"  files           {self.workdir}: config.json, metrics.jsonl, heads.jsonl, eval.jsonl, checkpoints/, tensorboard/"
        )


def _due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0


def _check_finite(step: int, metrics: dict) -> None:
    if not math.isfinite(metrics["loss"]) or not math.isfinite(metrics["grad_norm"]):
        raise Diverged(
            f"the loss or its gradient is not finite at step {step} and will not recover. The newest checkpoint is from "
            "before. Try a lower optimizer.learning_rate, more optimizer.warmup_steps or a smaller optimizer.clip_norm"
        )


class _Clock:
    """Steps per second between logged steps, time spent on evaluation, probes and checkpoints left out."""

    def __init__(self, step: int):
        self.step, self.time = step, time.perf_counter()

    def rate(self, step: int) -> float | None:
        """Steps a second since the last call; None if no step lies between."""
        now = time.perf_counter()
        done, seconds = step - self.step, now - self.time
        self.step, self.time = step, now
        return done / seconds if done and seconds > 0 else None

    @contextlib.contextmanager
    def paused(self, state):
        jax.block_until_ready(state)
        began = time.perf_counter()
        try:
            yield
        finally:
            self.time += time.perf_counter() - began
