"""What a run directory tells, read for a report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float64

from gatedattn.config import ConfigError, RunConfig, to_mapping
from gatedattn.probes import spikes
from gatedattn.training import recorder
from gatedattn.training.recorder import read_lines

POINTS = 4000  # of a curve that are drawn, at most


@dataclass(frozen=True)
class Run:
    """A run's files. config: the configuration, flattened ("train.steps"); about: what else config.json holds."""

    name: str
    path: Path
    config: dict[str, object]
    about: dict[str, object]
    gates: str
    tokens_per_step: int
    metrics: list[dict]
    heads: list[dict]
    evals: list[dict]  # of held-out text
    tasks: list[dict]  # of what eval.tasks names
    curve: spikes.Curve
    events: list[spikes.Spike]

    @classmethod
    def read(cls, path: Path, name: str) -> Run:
        """Raises ConfigError if the folder is not a run's, or the run has not logged anything yet."""
        try:
            config: RunConfig = recorder.read_config(path)
            whole = json.loads((path / "config.json").read_text())
        except (OSError, json.JSONDecodeError, AttributeError, TypeError):
            raise ConfigError(f"{path} has no config.json of a run: give the --workdir of a training run") from None
        metrics = read_lines(path / "metrics.jsonl")
        if not metrics:
            raise ConfigError(f"{path} has no metrics.jsonl yet: nothing to report")
        evals = read_lines(path / "eval.jsonl")
        points = [(line["step"], line["loss"]) for line in metrics if "loss" in line]
        curve = spikes.Curve.of(name, *np.array(points, float).reshape(-1, 2).T)
        mapping = to_mapping(config)
        return cls(
            name, path, flat(mapping), flat({k: v for k, v in whole.items() if k not in mapping}), config.model.layer_gates,
            config.tokens_per_step, metrics, read_lines(path / "heads.jsonl"), [line for line in evals if "set" in line],
            [line for line in evals if "task" in line], curve, spikes.detect(curve),
        )  # fmt: skip

    def series(self, lines: list[dict], key: str) -> tuple[list[int], list[float]]:
        """Tokens seen and value, of the lines that have it."""
        found = [(line["step"] * self.tokens_per_step, line[key]) for line in lines if line.get(key) is not None]
        return [x for x, _ in found], [y for _, y in found]

    def gate(self, name: str) -> dict[str, list[tuple[int, np.ndarray]]]:
        """Per gate: (step, [L, M]) of the probe's `gate_{name}`; a layer's only gate goes by its spec all the same."""
        found: dict[str, list] = {}
        for line in self.heads:
            value = line.get(f"gate_{name}")
            if value is None:
                continue
            by_spec = value if isinstance(value, dict) else {self.gates: value}
            for spec, scores in by_spec.items():
                found.setdefault(spec, []).append((line["step"], np.array(scores, float)))
        return found

    def summary(self) -> dict[str, object]:
        """The run's row in the table of results."""
        last = self.evals[-1] if self.evals else {}
        heads = self.heads[-1] if self.heads else {}
        gates = {spec: float(np.nanmean(values[-1][1])) for spec, values in self.gate("mean").items()}
        share = np.array(heads.get("bos_share", []), float)
        return {
            "run": self.name,
            "gates": self.gates,
            "steps": self.metrics[-1]["step"],
            "tokens": self.metrics[-1]["step"] * self.tokens_per_step,
            "training loss": self.metrics[-1].get("loss"),
            "held-out loss": last.get("loss"),
            "perplexity": last.get("perplexity"),
            "bits per byte": last.get("bits_per_byte"),
            "loss spikes": len(self.events),
            "mean gate": ", ".join(f"{v:.3f}" + f" {spec}" * (len(gates) > 1) for spec, v in gates.items()) or None,
            "bos_share": float(share.mean()) if share.size else None,
            "best head": float(share.max()) if share.size else None,
            "sink_rate": heads.get("sink_rate"),
            "largest activation": max(filter(None, heads.get("activation_max", [])), default=None),
            "device": self.about.get("device_kind"),
        }


def flat(mapping: dict, prefix: str = "") -> dict[str, object]:
    """Nested dicts as one, keys joined by dots."""
    found: dict[str, object] = {}
    for key, value in mapping.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def differences(configs: Sequence[dict[str, object]]) -> dict[str, list]:
    """The settings that are not the same in all runs."""
    keys = dict.fromkeys(key for config in configs for key in config)
    values = {key: [config.get(key) for config in configs] for key in keys}
    return {key: found for key, found in values.items() if any(value != found[0] for value in found)}


def thin(x: Sequence[float], y: Sequence[float], points: int = POINTS) -> tuple[Float64[np.ndarray, "n"], ...]:
    """At most `points` of a curve: of each stretch its least and its largest value, so that no spike is lost."""
    x, y = np.asarray(x, float), np.asarray(y, float)
    if len(x) <= points:
        return x, y
    edges = np.linspace(0, len(x), points // 2 + 1).astype(int)
    kept = sorted({a + f(y[a:b]) for a, b in zip(edges[:-1], edges[1:]) for f in (np.argmin, np.argmax)} | {0, len(x) - 1})
    return x[kept], y[kept]
