"""The training loop: `train(config, workdir)` starts a run, or goes on with the one that `workdir` holds."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jaxtyping import PyTree

from gatedattn import data as data_lib
from gatedattn import transformer
from gatedattn.config import ConfigError, RunConfig, to_mapping
from gatedattn.data import Data
from gatedattn.data.tokenizers import Tokenizer
from gatedattn.training import compiler, console, evaluate, guard, initial, recorder, resume
from gatedattn.training import step as steps
from gatedattn.training import workdir as workdir_lib
from gatedattn.training.checkpoint import Checkpoints, NotSaved
from gatedattn.training.console import say
from gatedattn.training.hardware import peak_flops
from gatedattn.training.initial import Origin
from gatedattn.training.interrupt import Interrupt
from gatedattn.training.setup import prepare

BATCH_KEYS = ("tokens", "targets", "loss_mask", "segment_ids", "positions")  # what a training step reads


REMEDY = (
    "Try a lower optimizer.learning_rate, more optimizer.warmup_steps or a smaller optimizer.clip_norm, in a new workdir or with "
    "--config.checkpoint.may_change=optimizer.*; if the data is to blame, guard.action=rewind passes over it"
)


class Diverged(Exception):
    """Too many steps in a row were bad."""


class _Streak(NamedTuple):
    """Skipped steps in a row: the last one, and how many."""

    step: int
    length: int


@dataclass(frozen=True)
class Result:
    """A run as it stands. `signum`: the signal that ended it early, or None."""

    params: PyTree
    data: Data
    step: int
    signum: int | None = None


# The evaluations that `eval.tasks` names: of a model's parameters in its module, lines of eval.jsonl without their step.
Evaluators = Sequence[Callable[[nnx.Module], list[dict]]]


def train(
    config: RunConfig,
    workdir: str | Path,
    devices: Sequence[jax.Device] | None = None,
    origin: Origin | None = None,
    evaluators: Callable[[RunConfig, Tokenizer], Evaluators] | None = None,
) -> Result:
    """Train to `train.steps`, on all devices or those given.

    The same call goes on where an interrupted one stopped, bit for bit as if it had not been. A new run begins with the
    parameters of `origin`, if there is one. The host stays one step behind the device: it reads a logged step's metrics after the
    next step is dispatched. Ctrl-C and SIGTERM finish the step, save it and return. The last step is always evaluated, probed
    and saved.

    Raises `ConfigError` before anything is compiled if the run cannot start (a new one with `config.train.init_from` needs its
    `origin`, any with `config.eval.tasks` its `evaluators`: the caller brings them, since formats and evaluations are known further up),
    `Diverged` after `guard.patience` bad steps in a
    row, `NotSaved` if the last checkpoint could not be written.
    """
    workdir = Path(workdir)
    with workdir_lib.opened(workdir):
        data, place, about = prepare(config, workdir, devices)
        with place.scope(), Checkpoints(workdir, config.checkpoint) as checkpoints:
            return _Run(config, workdir, data, place, about, checkpoints, origin, evaluators).train()


def evaluate_checkpoint(config: RunConfig, workdir: str | Path, devices: Sequence[jax.Device] | None = None) -> list[dict]:
    """The newest checkpoint of `workdir` on all held-out text: a line as in eval.jsonl for each set.

    Raises `ConfigError` if there is no checkpoint, or it does not fit `config`.
    """
    if not (Path(workdir) / "checkpoints").is_dir():
        raise ConfigError(f"{workdir} holds no checkpoint: train first, or give the --workdir of a run")
    data, place, _ = prepare(config, workdir, devices)
    with place.scope(), Checkpoints(workdir, read_only=True) as checkpoints:
        step = checkpoints.latest()
        if step is None:
            raise ConfigError(f"{workdir} holds no finished checkpoint: train first, or give the --workdir of a run")
        abstract = jax.eval_shape(steps.make_init(config)).params
        params = checkpoints.restore_params(place.on_devices(abstract), step)
        eval_step = jax.jit(steps.make_eval_step(config), out_shardings=place.everywhere)
        lines = evaluate.evaluate(eval_step, params, data, place)
    return [{"step": step} | line for line in lines]


class _Run:
    """The parts of one run, and what happens to them in order."""

    def __init__(self, config, workdir, data, place, about, checkpoints, origin, evaluators):
        self.config, self.workdir, self.data = config, workdir, data
        self.place, self.about, self.checkpoints = place, about, checkpoints
        self.origin, self.steps = origin, config.train.steps
        if config.eval.tasks and evaluators is None:
            raise ConfigError(
                f"eval.tasks={config.eval.tasks}: loop.train needs its `evaluators` (gatedattn.evaluation.midway.build)"
            )
        self.evaluators = evaluators(config, data.tokenizer) if evaluators and config.eval.tasks else ()
        self.passed_over = resume.PassedOver(workdir)
        self.saved_about = {"tokenizer": data.tokenizer.fingerprint, "data": data.fingerprint}
        self.eval_step = jax.jit(steps.make_eval_step(config), out_shardings=place.everywhere)
        self.probe_step = jax.jit(evaluate.make_probe_step(config), out_shardings=place.everywhere)
        self.abstract = jax.eval_shape(steps.make_init(config))
        self.last: dict[str, Any] = {}  # the newest heads line and eval lines, for the summary

    def train(self) -> Result:
        config, summary = self.config, self.data.summary()
        counts = transformer.count(config.model)
        self.flops_per_token = transformer.flops_per_token(config.model, config.train.seq_len)
        console.banner(config, self.workdir, counts, summary, self.about)
        state, start = self.start()
        self.first = self.owed(start)  # looked up once: processes must agree, and one of them will soon write these lines
        if start >= self.steps and not self.first:
            say(f"nothing to do: this run has taken {start} of {self.steps} steps; raise train.steps to go on")
            return Result(state.params, self.data, start)

        about = self.about | counts | {"data_summary": summary}
        try:
            self.recorder = recorder.Recorder(self.workdir, config, about, start)
        except OSError as error:
            raise ConfigError(
                f"--workdir={self.workdir} cannot be written ({error.strerror}): make room, or give another"
            ) from None
        self.progress = console.Progress(start, self.steps)
        try:
            with Interrupt() as interrupt:
                self.interrupt = interrupt
                result = self.run(state, start)
                self.checkpoints.finish()
        finally:
            self.progress.close()
            self.recorder.close()
        if result.signum is None:
            self.summarize()
        else:
            name = signal.Signals(result.signum).name
            say(f"{name}: stopped after step {result.step} and saved it. The same command goes on from there.")
        return result

    def new(self) -> steps.TrainState:
        if self.config.train.init_from and self.origin is None:
            raise ConfigError(
                f"train.init_from={self.config.train.init_from}: loop.train needs the opened model as its `origin`"
            )
        state = steps.initialize(self.config, self.place.shardings(self.abstract))
        if self.origin is None:
            return state
        return state._replace(params=initial.begin(self.config.model, state.params, self.origin, self.data.tokenizer))

    def start(self) -> tuple[steps.TrainState, int]:
        """The state to begin with and its step: the newest intact checkpoint, or a new one."""
        step = self.checkpoints.latest()
        if step is None:
            return self.new(), 0
        self.check_settings(step)
        state = self.checkpoints.restore(self.place.on_devices(self.abstract))
        step = int(state.step)
        say(f"  resuming     from step {step}")
        for key, (was, now) in self.changes.items():
            say(f"               {key} was {was!r} and is now {now!r}")
        return state, step

    def check_settings(self, step: int) -> None:
        """Raise `ConfigError` unless settings, tokenizer and data are those of the run."""
        try:
            saved = json.loads((self.workdir / "config.json").read_text())
            saved = {f.name: saved[f.name] for f in dataclasses.fields(RunConfig) if f.name in saved}
        except (OSError, ValueError, TypeError):
            saved = to_mapping(self.config)
            say(
                f"  WARNING      {self.workdir}/config.json cannot be read: not checked whether the settings are those of the run"
            )
        self.changes = resume.check(self.config, saved, self.workdir, step)
        try:
            about = self.checkpoints.about(step)
        except ConfigError:
            return  # a damaged checkpoint; the restore will say so
        resume.check_data(self.config, about, self.saved_about, self.workdir, step)

    def compile(self, state: steps.TrainState):
        """The train step, compiled for this state. Done apart from the first step, so that its seconds can be told."""
        kept = jax.config.jax_enable_compilation_cache and jax.config.jax_compilation_cache_dir
        say(f"compiling the training step ...{f' (programs are kept in {kept})' if kept else ''}")
        began = time.perf_counter()
        lowered = compiler.lower_train_step(self.config, self.place, state, self.batch(0))
        compiled = lowered.compile(compiler_options=compiler.OPTIONS[jax.default_backend()])
        say(f"compiled in {time.perf_counter() - began:.1f} s")
        return compiled

    def batch(self, step: int) -> steps.Batch:
        number = self.passed_over.batch_number(step)

        def fetch(rows):
            batch = self.data.train(number, rows)
            return {key: batch[key] for key in BATCH_KEYS}

        return self.place.put(fetch, self.config.train.batch_size)

    def run(self, state: steps.TrainState, start: int) -> Result:
        """All steps, and again those that follow a checkpoint to which the run was rewound."""
        for do in self.first:
            do(start, state)
        if start >= self.steps:
            return Result(state.params, self.data, start, self.interrupt.signum)
        train_step = self.compile(state)
        while isinstance(end := self.run_from(train_step, state, start), _Streak):
            del state  # its memory is needed
            state, start = self.rewind(end)
        return end

    def run_from(self, train_step, state: steps.TrainState, start: int) -> Result | _Streak:
        config, interrupt = self.config, self.interrupt
        if interrupt.signum:
            return Result(state.params, self.data, start, interrupt.signum)
        self.clock = console.Clock(start)
        self.told = int(state.guard.bad)
        pending = None  # (step, metrics on the device) not yet read
        with contextlib.closing(data_lib.prefetch(self.batch, start, self.steps)) as batches:
            for step, batch in enumerate(batches, start + 1):
                state, metrics = train_step(state, batch)
                self.progress.advance()
                last = step == self.steps
                if pending and (streak := self.log(*pending)):
                    return streak
                logged = step % config.train.log_every == 0 or step == 1 or last
                pending = (step, metrics) if logged else None

                due = [last or _due(group.every, step) for group in (config.eval, config.probe, config.checkpoint)]
                evaluates, probes, saves = due
                if not (interrupt.look(step) or any(due)):
                    continue
                if pending and (streak := self.log(*pending)):
                    return streak
                pending = None
                with self.clock.paused(state):
                    if evaluates:
                        self.evaluate(step, state)
                    if probes and not interrupt.signum:
                        self.probe(step, state)
                    if saves or interrupt.signum:
                        self.save(state, last)
                if interrupt.signum:
                    return Result(state.params, self.data, step, interrupt.signum)
        return Result(state.params, self.data, self.steps)

    def owed(self, start: int) -> list[Callable]:
        """What was due at the step that was saved last, if a signal came before it was done."""
        owed = []
        for group, name, do in ((self.config.eval, "eval", self.evaluate), (self.config.probe, "heads", self.probe)):
            due = start == self.steps or start > 0 and _due(group.every, start)
            if due and not any(
                line.get("step") == start for line in recorder.read_lines(self.workdir / f"{name}.jsonl")[-100:]
            ):
                owed.append(do)
        return owed

    def save(self, state: steps.TrainState, last: bool) -> None:
        self.recorder.sync()
        about = self.saved_about | {"passed_over": self.passed_over.events}
        self.tell_of_saves(self.checkpoints.finish)  # that of the save before, should it have failed
        self.tell_of_saves(lambda: self.checkpoints.save(state, self.config, about), fatal=last or bool(self.interrupt.signum))

    def tell_of_saves(self, action: Callable[[], None], fatal: bool = False) -> None:
        try:
            action()
        except NotSaved as error:
            if fatal:
                raise
            say(f"WARNING: {error}; training goes on, older checkpoints are as they were")

    def rewind(self, streak: _Streak) -> tuple[steps.TrainState, int]:
        """The state of the last checkpoint before a streak of bad steps, whose batches are left out from now on."""
        first, last = streak.step - streak.length + 1, streak.step
        self.tell_of_saves(self.checkpoints.finish)
        before = [step for step in self.checkpoints.steps() if step < first]
        if not before and self.checkpoints.steps():
            raise Diverged(
                f"{streak.length} bad steps in a row up to step {last}, and no checkpoint from before them: {REMEDY}"
            )
        target = before[-1] if before else 0
        batches = [self.passed_over.batch_number(step - 1) for step in range(first, last + 1)]
        rows = {str(number): self.data.train.locate(number) for number in batches}
        # In this order: killed in between, the run meets the same rows again and ends up here again.
        self.checkpoints.delete_after(target)
        self.passed_over.add(batches, {"bad_steps": [first, last], "rewound_to": target, "rows": rows})
        self.recorder.rewind(target)
        say(f"rewinding to step {target}: {streak.length} bad steps in a row up to step {last}; their batches are left out from now on "
            f"(see {self.passed_over.path})")  # fmt: skip
        self.progress.close()
        self.progress = console.Progress(target, self.steps)
        if not before:
            return self.new(), 0
        return self.checkpoints.restore(self.place.on_devices(self.abstract), target), target

    def log(self, step: int, metrics: dict) -> _Streak | None:
        """Read a step's metrics off the device and write its line, and one for each bad step up to it. Returns the streak of
        skipped steps that is too long to go on."""
        config, values = self.config, jax.device_get(metrics)
        watch = values.pop("guard")
        values = {name: np.asarray(value).tolist() for name, value in values.items()}
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
        line |= values | {"bad_steps": int(watch.bad), "skipped_steps": int(watch.skipped)}
        self.recorder.metrics(line)
        self.progress.metrics(line)
        self.log_bad_steps(watch)
        self.tell_of_saves(self.checkpoints.check)
        streak = _Streak(step, int(watch.in_row))
        if streak.length < config.guard.patience:
            return None
        if config.guard.action == "rewind" and len(self.passed_over) < config.guard.rewinds:
            return streak
        raise Diverged(
            f"{streak.length} steps in a row were bad and skipped, the last is {step} (bad_steps.jsonl says why). {REMEDY}"
            + f"; it was rewound {len(self.passed_over)} times already" * bool(self.passed_over)
        )

    def log_bad_steps(self, watch: guard.GuardState) -> None:
        lines = guard.records(watch, self.told)
        skips = "skipped" if self.config.guard.skip == "spikes" else "applied"
        for line in lines:
            line["update"] = "skipped" if line["reason"] == guard.REASONS[guard.NONFINITE] else skips
            line["batch"] = self.passed_over.batch_number(line["step"] - 1)
            self.recorder.bad_step(line | {"rows": self.data.train.locate(line["batch"])})
        if lines:
            first, count = lines[0], int(watch.bad) - self.told
            say(f"step {first['step']}: {first['reason']} (loss {first['loss']:.4g}, grad norm {first['grad_norm']:.4g}), update "
                f"{first['update']}" + f"; {count - 1} more" * (count > 1) + "; rows in bad_steps.jsonl")  # fmt: skip
        self.told = int(watch.bad)

    def evaluate(self, step: int, state: steps.TrainState) -> None:
        """Held-out loss, and what `eval.tasks` names; nothing if a signal comes before the end, to be made up for when the run goes on."""
        config, stop = self.config.eval, lambda: self.interrupt.signum is not None
        lines = evaluate.evaluate(self.eval_step, state.params, self.data, self.place, config.batches, stop)
        if lines is None:
            return
        if self.evaluators and (step == self.steps or not config.tasks_every or _due(config.tasks_every, step)):
            model = nnx.merge(steps.graph(self.config.model), state.params)
            for evaluator in self.evaluators:
                lines += evaluator(model)
                if stop():
                    return
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
        for line in self.last.get("eval", ()):  # absent where a run only made up for its last probe
            if "task" in line:
                say(f"  {line['task']:<15} {console.results(line)}")
                continue
            bits = f", {line['bits_per_byte']:.3f} bits per byte" if "bits_per_byte" in line else ""
            say(f"  held-out loss   {line['loss']:.4f} ({line['set']}){bits}")
        if heads := self.last.get("heads"):
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
