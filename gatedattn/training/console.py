"""What a run says: the banner before the first step, a progress bar on a terminal or plain lines in a log."""

from __future__ import annotations

import contextlib
import sys
import time

import jax
from tqdm import tqdm

from gatedattn.config import RunConfig

TOO_MANY_EPOCHS = 100


def say(text: str) -> None:
    """A line on stdout, above the progress bar if there is one; from the first process only."""
    if jax.process_index() != 0:
        return
    tqdm.write(text, file=sys.stdout)
    sys.stdout.flush()


def count_text(n: float) -> str:
    """1234567 -> '1.2M'."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if n >= size:
            return f"{n / size:.3g}{unit}"
    return f"{n:.3g}"


def banner(config: RunConfig, workdir, counts: dict, data: dict, about: dict) -> None:
    """Everything that a surprised reader of the results would ask about, before anything is compiled."""
    train, tokens = config.train, config.tokens_per_step
    devices = f"{about['device_count']} x {about['device_kind']}" + (
        f" in {about['process_count']} processes" * (about["process_count"] > 1)
    )
    say(f"{config.name}: gates {config.model.layer_gates}, writing to {workdir}")
    say(f"  platform     {about['platform']}, {devices}")
    if about["platform"] == "cpu":
        say("               JAX found no accelerator, so this runs on the CPU (set train.platform=gpu or tpu to refuse that)")
    chosen = f" (chosen by {config.model.kernel!r})" if about["kernel"] != config.model.kernel else ""
    say(f"  attention    {about['kernel']}{chosen}; activations {config.model.dtype}, parameters float32")
    if config.model.pattern:
        say(f"  layers       {config.model.num_layers}, in periods of {len(config.model.period)}: {config.model.pattern}")
    for reason in about["kernels_passed_over"]:
        say(f"               passed over: {reason}")
    say(
        f"  parameters   {count_text(counts['params_total'])}, active {count_text(counts['params_active'])}, "
        f"of which embedding {count_text(counts['params_embedding'])}, gates {count_text(counts['params_gate'])}"
    )
    say(
        f"  step         {train.batch_size} x {train.seq_len} = {count_text(tokens)} tokens, {train.steps} steps, "
        f"{count_text(tokens * train.steps)} tokens in all"
    )
    if rows := data["rows_per_epoch"]:
        epochs = train.steps * train.batch_size / rows
        size = count_text(data["tokens_per_epoch"])
        say(f"  data         {config.data.source}: {size} tokens an epoch, {epochs:.3g} epochs planned")
        if rows < train.batch_size:
            say(f"  WARNING      an epoch has {rows} rows and a batch {train.batch_size}: rows recur within a batch")
        if epochs > TOO_MANY_EPOCHS:
            say(f"  WARNING      the data will be read {epochs:.0f} times: expect memorisation; use fewer steps or more text")
    else:
        say(f"  data         {config.data.source}: made afresh, never repeated")
    say(f"  vocabulary   {data['vocab_size']} ids; knowing only their frequencies gives loss {data['unigram_entropy']:.3f}")


def results(line: dict) -> str:
    """What a line of `eval.tasks` says."""
    if "error" in line:
        return f"WARNING: failed: {line['error']}"
    return ", ".join(f"{key} {value:.4g}" for key, value in line.items() if key not in ("step", "task", "tokens", "samples"))


class Progress:
    """Progress of the steps: a bar on a terminal, a line per logged step elsewhere."""

    def __init__(self, start: int, steps: int):
        self.steps = steps
        shown = sys.stderr.isatty() and jax.process_index() == 0
        self.bar = tqdm(initial=start, total=steps, unit="step", dynamic_ncols=True) if shown else None

    def advance(self) -> None:
        if self.bar is not None:
            self.bar.update()

    def metrics(self, line: dict) -> None:
        text = f"loss {line['loss']:.4f}  grad norm {line['grad_norm']:.3g}  lr {line['lr']:.2e}"
        if rate := line.get("tokens_per_second"):
            text += f"  {count_text(rate)} tokens/s"
        text += f"  MFU {line['mfu']:.1%}" if line.get("mfu") else ""
        if self.bar is not None:
            self.bar.set_postfix_str(text)
        else:
            say(f"step {line['step']}/{self.steps}  {text}")

    def evaluation(self, line: dict) -> None:
        if "task" in line:
            say(f"step {line['step']}/{self.steps}  {line['task']}: {results(line)}")
            return
        text = f"loss {line['loss']:.4f}, perplexity {line['perplexity']:.4g}"
        text += f", {line['bits_per_byte']:.3f} bits per byte" if "bits_per_byte" in line else ""
        say(f"step {line['step']}/{self.steps}  held out {line['set']}: {text}")

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


class Clock:
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
