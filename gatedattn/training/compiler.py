"""How the training step is compiled: the same for a run and ahead of time."""

from __future__ import annotations

import os
import re
import zlib
from pathlib import Path

import jax

from gatedattn.config import RunConfig
from gatedattn.training import step as steps
from gatedattn.training.placement import Placement

# Given to XLA with the training step, by platform. Each is there for a measured reason (docs/scaling.md).
OPTIONS: dict[str, dict[str, str | int | bool]] = {
    "cpu": {},
    "gpu": {},
    # Else a matrix product whose weights are gathered becomes a loop over the devices' parts, which writes the whole result each time.
    "tpu": {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"},
}


def lower_train_step(config: RunConfig, place: Placement, state, batch) -> jax.stages.Lowered:
    """The training step for a state and a batch (or their shapes and shardings); the state's memory is reused for the result."""
    shardings = place.shardings(jax.eval_shape(lambda: state))
    step = jax.jit(steps.make_train_step(config), donate_argnums=0, out_shardings=shardings and (shardings, place.everywhere))
    return step.lower(state, batch)


def cache_compilations() -> Path | None:
    """Keep compiled programs on disk, so that a run that starts again need not compile again. Returns the folder.

    It is JAX_COMPILATION_CACHE_DIR if that is set, else a folder of the user's own for this kind of processor: a program compiled
    for one CPU need not run on another. None if JAX_ENABLE_COMPILATION_CACHE=false.
    """
    if not jax.config.jax_enable_compilation_cache:
        return None
    if not jax.config.jax_compilation_cache_dir:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        cpu = Path("/proc/cpuinfo")
        features = re.search(r"^(?:flags|Features)\s*:.*$", cpu.read_text(), re.M) if cpu.exists() else None
        kind = f"{zlib.crc32(features[0].encode()):08x}" if features else "cpu"
        jax.config.update("jax_compilation_cache_dir", str(root / "gatedattn" / "compiled" / kind))
    return Path(jax.config.jax_compilation_cache_dir)
