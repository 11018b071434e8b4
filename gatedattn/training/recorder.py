"""What a run leaves behind: config.json, metrics.jsonl, heads.jsonl, eval.jsonl, bad_steps.jsonl and TensorBoard events.

Every line of a .jsonl file is complete JSON, handed to the system at once. JSON has no NaN: a value that is not finite is written as null.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from tensorboardX import summary as board

from gatedattn.config import RunConfig, from_mapping, to_mapping
from gatedattn.training.journal import Journal

FILES = ("metrics.jsonl", "heads.jsonl", "eval.jsonl", "bad_steps.jsonl")
NUMBERS = (int, float, np.number)
SINK = 0.3  # a head whose bos_share exceeds this is an attention sink


def finite(value):
    """`value` as JSON-ready Python: arrays become lists, rounded to the digits float32 has; non-finite numbers become None."""
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    if isinstance(value, (np.ndarray, np.generic, jax.Array)):
        array = np.asarray(value)
        if array.ndim:
            return [finite(item) for item in array]
        return finite(float(f"{array.item():.7g}") if isinstance(array.item(), float) else array.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value


def heads_line(step: int, probe: dict) -> dict:
    """A line of heads.jsonl from `probes.measure`: the lists [L][N] of each statistic, and sink_rate, the share of (layer,
    head) pairs with bos_share > 0.3. Where layers have several gates, or not all the same, the gate_* entries are dicts keyed by
    the gate's short form, NaN for the layers without it; without gates they are left out."""
    line = {"step": step, "bos_share": probe["bos_share"], "sink_rate": float(np.mean(np.asarray(probe["bos_share"]) > SINK))}
    gates = probe.get("gates", {})
    for name in ("mean", "below_0.1", "above_0.9") if gates else ():
        by_gate = {spec: statistics[name] for spec, statistics in gates.items()}
        several = len(by_gate) > 1 or any(np.isnan(value).any() for value in by_gate.values())
        line[f"gate_{name}"] = by_gate if several else next(iter(by_gate.values()))
    line |= {"branch_gates": probe["branch_gates"]} if "branch_gates" in probe else {}
    return line | {name: probe[name] for name in ("activation_max", "attention_self", "attention_previous")}


def read_lines(path: str | Path) -> list[dict]:
    """The lines of a .jsonl file; one that a crash cut short is left out. An absent file has none."""
    lines = []
    for text in Path(path).read_text(errors="replace").splitlines() if Path(path).exists() else ():
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict):
            lines.append(line)
    return lines


def read_config(workdir: str | Path) -> RunConfig:
    """The configuration a run was last started with. Raises FileNotFoundError without a config.json."""
    mapping = json.loads((Path(workdir) / "config.json").read_text())
    return from_mapping(RunConfig, {f.name: mapping[f.name] for f in dataclasses.fields(RunConfig) if f.name in mapping})


def environment(devices: Sequence[jax.Device]) -> dict:
    """Versions, git revision and the devices in use: what a number depends on besides the configuration."""
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    versions = {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in packages}
    from gatedattn import __version__

    return {
        "versions": versions | {"gatedattn": __version__},
        "git_revision": git_revision(),
        "platform": devices[0].platform,
        "device_kind": devices[0].device_kind,
        "device_count": len(devices),
        "process_count": jax.process_count(),
    }


def git_revision() -> str | None:
    """Commit of the source tree this package lies in, with "-dirty" if it is changed; None outside a git checkout."""
    folder = Path(__file__).parent

    def git(*args: str) -> str:
        return subprocess.run(
            ["git", "-C", str(folder), *args], capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


class Recorder:
    """Writes the files of a run, from its first process; the others' recorders do nothing. `step` is where the run begins: later
    lines, left by a run that went further before it was killed, are removed, so that each step stands once. `about` joins the
    configuration in config.json. Raises OSError if the folder cannot be written; once it has been, a full disk raises nothing."""

    def __init__(self, workdir: str | Path, config: RunConfig, about: dict, step: int = 0):
        self.workdir, self.journal = Path(workdir), None
        if jax.process_index() != 0:
            return
        self.workdir.mkdir(parents=True, exist_ok=True)
        _write(self.workdir / "config.json", json.dumps(finite(to_mapping(config) | about), indent=2, allow_nan=False) + "\n")
        self._open(step)

    def _open(self, step: int) -> None:
        for name in FILES:
            _truncate(self.workdir / name, step)
        self.journal = Journal(self.workdir, FILES, purge_step=step + 1 if step else None)

    def rewind(self, step: int) -> None:
        """Take back the lines of later steps."""
        if self.journal:
            self.journal.close()
            self._open(step)

    def metrics(self, line: dict) -> None:
        """One line of metrics.jsonl; must hold "step"."""
        self._line("metrics.jsonl", line)
        self._scalars("train", line, line["step"])

    def evaluation(self, line: dict) -> None:
        """One line of eval.jsonl; must hold "step", and "set" (of held-out text) or "task"."""
        self._line("eval.jsonl", line)
        self._scalars(f"eval/{line.get('set') or line['task']}", line, line["step"])

    def bad_step(self, line: dict) -> None:
        """One line of bad_steps.jsonl; must hold "step"."""
        self._line("bad_steps.jsonl", line)

    def heads(self, line: dict) -> None:
        """One line of heads.jsonl, as `heads_line` makes it."""
        self._line("heads.jsonl", line)
        step, gates = line["step"], {}
        for name in ("gate_mean", "gate_below_0.1", "gate_above_0.9"):
            gate = line.get(name)
            gates |= {f"{name}/{spec}": v for spec, v in gate.items()} if isinstance(gate, dict) else {name: gate}
        scalars = {"sink_rate": line["sink_rate"], "activation_max": np.max(line["activation_max"])}
        maps = {
            name: np.asarray(value) for name, value in {"bos_share": line["bos_share"], **gates}.items() if value is not None
        }
        self._scalars("heads", scalars | {f"{name}/mean": np.nanmean(value) for name, value in maps.items()}, step)
        if self.journal:
            images = [(f"heads/{name}", value) for name, value in maps.items()]
            self.journal.events(step, lambda: [board.image(n, heat_map(v), dataformats="HWC") for n, v in images])

    def sync(self) -> None:
        """Wait until all lines are on the disk."""
        if self.journal:
            self.journal.sync()

    def close(self) -> None:
        if self.journal:
            self.journal.close()

    def _line(self, name: str, line: dict) -> None:
        if self.journal:
            self.journal.line(name, json.dumps(finite(line), allow_nan=False))

    def _scalars(self, group: str, values: dict, step: int) -> None:
        if self.journal:
            scalars = [(f"{group}/{name}", float(v)) for name, v in values.items() if name != "step" and isinstance(v, NUMBERS)]
            self.journal.events(step, lambda: [board.scalar(name, value) for name, value in scalars])


def heat_map(values: np.ndarray, cell: int = 24) -> np.ndarray:
    """[L, N] values in [0, 1] as an image u8[L * cell, N * cell, 3], layers downwards: white at 0, dark blue at 1."""
    white, blue = np.array([255, 255, 255]), np.array([8, 48, 107])
    share = np.clip(np.nan_to_num(values), 0, 1)[..., None]
    image = np.round(white + share * (blue - white)).astype(np.uint8)
    return image.repeat(cell, axis=0).repeat(cell, axis=1)


def _truncate(path: Path, step: int) -> None:
    if path.exists():
        kept = [
            json.dumps(line) + "\n" for line in read_lines(path) if isinstance(line.get("step"), int) and line["step"] <= step
        ]
        _write(path, "".join(kept))


def _write(path: Path, text: str) -> None:
    """Replace a file as a whole: a crash leaves the old one or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)
