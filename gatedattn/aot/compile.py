"""Compiles the training step of a run for a machine that is not here, and reports what XLA made of it."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import re
import time
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from gatedattn import transformer
from gatedattn.aot import gpus, hlo
from gatedattn.aot.roofline import roofline
from gatedattn.aot.topologies import Topology, devices
from gatedattn.config import ConfigError, RunConfig
from gatedattn.training import compiler
from gatedattn.training import step as steps
from gatedattn.training.placement import Placement
from gatedattn.training.setup import choose_kernels

# What a batch of `gatedattn.data` is.
BATCH = {"tokens": jnp.int32, "targets": jnp.int32, "loss_mask": jnp.bool_, "segment_ids": jnp.int32, "positions": jnp.int32}


class TooLarge(Exception):
    """The step does not fit: it needs `needed` bytes on a device that gives `limit`."""

    def __init__(self, needed: int, limit: int):
        super().__init__(
            f"needs {needed / 1e9:.2f} GB a device, {(needed - limit) / 1e9:.2f} GB more than the {limit / 1e9:.2f} GB it has"
        )
        self.needed, self.limit = needed, limit


@dataclass(frozen=True)
class Compiled:
    """A compiled step: `report` is what --report writes; `program` what XLA made of it, `executable` JAX's own object."""

    report: dict[str, Any]
    program: hlo.Program
    executable: jax.stages.Compiled


def step(config: RunConfig, topology: Topology, compiler_options: dict | None = None) -> Compiled:
    """The training step of `gatedattn.training.loop`, with its shardings, compiled for `topology`. Nothing is allocated.

    Raises `ConfigError` if the run cannot start there (mesh, batch, kernel, compiler not installed), `TooLarge` if it does not fit.
    """
    wanted = config.train.platform
    platform = topology.chip.platform
    if wanted not in ("any", platform):
        raise ConfigError(f"train.platform={wanted}, but {topology.name} is a {platform}: set train.platform=any")
    place = Placement.of(config, devices(topology))
    kernel, passed, experts = choose_kernels(config, place)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, kernel=kernel))

    began = time.perf_counter()
    with place.scope():
        state = place.on_devices(jax.eval_shape(steps.make_init(config)))
        shape = (config.train.batch_size, config.train.seq_len)
        batch = {name: jax.ShapeDtypeStruct(shape, dtype, sharding=place.batch_sharding) for name, dtype in BATCH.items()}
        lowered = compiler.lower_train_step(config, place, state, batch)
        traced = time.perf_counter()
        options = compiler.OPTIONS[platform] | (gpus.OPTIONS if platform == "gpu" else {}) | (compiler_options or {})
        try:
            executable = lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            raise _too_large(error) or error from None
    seconds = {"trace": traced - began, "compile": time.perf_counter() - traced}

    memory = executable.memory_analysis()
    joined = "process_index" if platform == "gpu" else "slice_index"  # what the network joins
    parts = [getattr(device, joined, 0) for device in place.mesh.devices.flat] if place.mesh else [0]
    program = hlo.Program(executable.as_text(), parts, fast_memory=platform == "tpu")
    report = _report(config, topology, place, program, memory, seconds) | {
        "compiler_options": options,
        "kernels_passed_over": passed,
        "expert_kernel": experts,
    }
    report["notes"] = gpus.notes(report["peak_bytes"], topology) if platform == "gpu" else _notes_on_tpus(topology)
    if platform == "gpu" and report["peak_bytes"] > topology.hbm_bytes:  # the TPU compiler refuses by itself
        raise TooLarge(report["peak_bytes"], topology.hbm_bytes)
    return Compiled(report, program, executable)


def _notes_on_tpus(topology: Topology) -> list[str]:
    notes, version = [], importlib.metadata.version("libtpu")
    if tuple(int(n) for n in version.split(".")[:3]) < (0, 0, 52):
        notes.append(
            f"libtpu {version} counts unused gaps in memory twice, 0.0.52 no longer: temporaries are lower than told here"
        )
    if topology.chip.device_kind == "TPU7x":
        notes.append(
            "collectives of TPU7x run on its SparseCores and cannot be read here: neither they nor their seconds are counted"
        )
    return notes


def _too_large(error: Exception) -> TooLarge | None:
    """XLA's refusal as numbers: "Used 23.45G of 15.75G hbm", "HLO temporaries (17.43G) exceeds available HBM (15.75G)"."""
    units = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    size = r"([\d.]+)([KMGT]?)"
    for wording in (rf"[Uu]sed {size} of {size} hbm", rf"\({size}\) exceeds available HBM \({size}\)"):
        if found := re.search(wording, str(error)):
            return TooLarge(round(float(found[1]) * units[found[2]]), round(float(found[3]) * units[found[4]]))
    return None


def _report(config: RunConfig, topology: Topology, place: Placement, program: hlo.Program, memory, seconds) -> dict[str, Any]:
    tokens = config.tokens_per_step
    model_flops = transformer.flops_per_token(config.model, config.train.seq_len) * tokens
    executed = model_flops + transformer.recomputed_flops_per_token(config.model, config.train.seq_len) * tokens
    collectives = list(program.collectives())
    argument, temp = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    # Results that do not take the place of an argument come on top.
    peak = argument + temp + memory.output_size_in_bytes - memory.alias_size_in_bytes
    bound = roofline(
        topology,
        model_flops=model_flops,
        executed_flops=executed,
        traffic=program.traffic(),
        wire=sum(c.wire * c.times for c in collectives),
        network=sum(c.network * c.times for c in collectives),
    )
    return {
        "name": config.name,
        "topology": topology.name,
        "chip": topology.chip.device_kind,
        "mesh": {name: size for name, size in place.mesh.shape.items() if size > 1} if place.mesh else {},
        "kernel": config.model.kernel,
        "remat": config.model.remat,
        "batch_size": config.train.batch_size,
        "microbatches": config.train.microbatches,
        "seq_len": config.train.seq_len,
        "params": transformer.count(config.model)["params_total"],
        "devices": topology.devices,
        "argument_bytes": argument,
        "temp_bytes": temp,
        "peak_bytes": peak,
        "hbm_bytes": topology.hbm_bytes,
        "host_temp_bytes": memory.host_temp_size_in_bytes,
        "trace_seconds": seconds["trace"],
        "compile_seconds": seconds["compile"],
        "collectives": _by_kind(collectives),
        "loops_of_unknown_length": len(program.unknown_loops),
        "hbm_traffic_bytes": program.traffic(),
        "model_flops_per_step": model_flops,
        "executed_flops_per_step": executed,
        "roofline": bound.as_dict(),
        "optimization_level": jax.config.jax_optimization_level,  # JAX_OPTIMIZATION_LEVEL
        "versions": {"jax": jax.__version__},
    }


def _by_kind(collectives: list[hlo.Collective]) -> dict[str, dict]:
    """Kind -> how many run in a step, the bytes of the arrays they make or take on one device, and the bytes that device receives: from
    its own slice or host, and over the network."""
    kinds: dict[str, dict] = {}
    for c in collectives:
        entry = kinds.setdefault(c.kind, {"count": 0, "bytes": 0, "wire_bytes": 0, "network_wire_bytes": 0, "largest_bytes": 0})
        entry["count"] += c.times
        entry["bytes"] += c.times * c.payload
        entry["wire_bytes"] += round(c.times * c.wire)
        entry["network_wire_bytes"] += round(c.times * c.network)
        entry["largest_bytes"] = max(entry["largest_bytes"], c.payload)
    return kinds
