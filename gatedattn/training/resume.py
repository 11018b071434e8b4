"""What must hold for a run to go on: its settings, its tokenizer and its data; and the batches that it passes over."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Sequence
from pathlib import Path

import jax

from gatedattn.config import ConfigError, RunConfig, suggest, to_mapping
from gatedattn.data.cache import write_atomically

# Settings that may differ when a run goes on: they change what is logged, how long it runs or where it is computed, not what.
FREE = (
    "name", "train.steps", "train.log_every", "train.platform", "train.init_from", "train.microbatches", "train.loss_chunk",
    "guard.*", "probe.*", "eval.*", "checkpoint.*", "mesh.*", "data.cache_dir", "model.kernel", "model.remat",
)  # fmt: skip
PASSED_OVER = "passed_over.json"


def flatten(mapping: dict, prefix: str = "") -> dict:
    """{"a": {"b": 1}} -> {"a.b": 1}."""
    flat = {}
    for key, value in mapping.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def changes(config: RunConfig, saved: dict) -> dict[str, tuple]:
    """Setting -> (value it was saved with, value now) where they differ. A setting that did not exist then had its default."""
    now, default = flatten(to_mapping(config)), flatten(to_mapping(RunConfig()))
    before = default | flatten(saved)
    return {key: (before.get(key), value) for key, value in now.items() if before.get(key) != value}


def check(config: RunConfig, saved: dict, workdir: Path, step: int) -> dict[str, tuple]:
    """The changes that are allowed. Raises `ConfigError` that names the others and what to type."""
    found = changes(config, saved)
    allowed = [key.strip() for key in config.checkpoint.may_change.split(",") if key.strip()]
    for pattern in allowed:
        known = flatten(to_mapping(config))
        if not fnmatch.filter(known, pattern):
            raise ConfigError(f"checkpoint.may_change: there is no setting {pattern!r}{suggest(pattern, known)}")
    refused = {key: pair for key, pair in found.items() if not any(fnmatch.fnmatch(key, p) for p in (*FREE, *allowed))}
    if refused:
        told = ", ".join(f"{key} was {was!r}, is now {now!r}" for key, (was, now) in refused.items())
        raise ConfigError(
            f"{workdir} holds a run at step {step} with other settings: {told}\n"
            f"give them as they were, or another --workdir; or allow it: --config.checkpoint.may_change={','.join(refused)}"
        )
    return found


def check_data(config: RunConfig, saved: dict, fingerprints: dict[str, str], workdir: Path, step: int) -> None:
    """Raises `ConfigError` if the tokenizer or the text is not what the run was saved with."""
    for name, setting in (("tokenizer", "data.tokenizer"), ("data", "data.source")):
        before, allowed = saved.get(name), config.checkpoint.may_change.split(",")
        if before and before != fingerprints[name] and setting not in map(str.strip, allowed):
            raise ConfigError(
                f"{workdir}: the {'text' if name == 'data' else name} behind {setting} has changed since step {step} was saved: "
                f"restore it, or give another --workdir; or allow it: --config.checkpoint.may_change={setting}"
            )


class PassedOver:
    """The numbers of the batches that a run leaves out after it was rewound: step s reads the s-th batch that is not among
    them. Kept in passed_over.json, with what was wrong with them."""

    def __init__(self, workdir: Path):
        self.path = workdir / PASSED_OVER
        self.events: list[dict] = []
        self.batches: list[int] = []
        if not self.path.exists():
            return
        try:
            self.events = json.loads(self.path.read_text())
            self.batches = sorted({int(number) for event in self.events for number in event["batches"]})
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{self.path}: cannot be read ({error}); it says which batches this run leaves out") from None

    def __len__(self) -> int:
        return len(self.events)

    def batch_number(self, step: int) -> int:
        """The batch that step `step` (from 0) reads."""
        number = step
        for passed in self.batches:  # ascending
            if passed > number:
                break
            number += 1
        return number

    def add(self, batches: Sequence[int], event: dict) -> None:
        self.events.append(event | {"batches": list(batches)})
        self.batches = sorted({*self.batches, *batches})
        if jax.process_index() == 0:
            write_atomically(self.path, (json.dumps(self.events, indent=1) + "\n").encode())
