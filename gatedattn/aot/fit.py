"""What fits: the best remat policy and number of sequences per device, and what to change when a step is too large."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from gatedattn.aot.compile import Compiled, TooLarge, step
from gatedattn.aot.topologies import Topology
from gatedattn.config import ConfigError, RunConfig
from gatedattn.training.placement import BATCH_AXES, mesh_shape

BY_MEMORY = ("none", "attn", "mlp", "full", "offload")  # the more memory first


def microbatches(config: RunConfig, topology: Topology) -> list[int]:
    """The numbers of parts that the batch can be cut into on this machine, fewest (most sequences per device) first."""
    shape = mesh_shape(config.mesh, topology.devices)
    ways = 1
    for axis in BATCH_AXES:
        ways *= shape[axis]
    per_device, left = divmod(config.train.batch_size, ways)
    if left:
        raise ConfigError(f"train.batch_size={config.train.batch_size} cannot be divided over {ways} devices: "
                          f"the nearest that can are {per_device * ways or ways} and {(per_device + 1) * ways}")  # fmt: skip
    return [parts for parts in range(1, per_device + 1) if per_device % parts == 0]


def variants(config: RunConfig, remat: str, parts: int) -> RunConfig:
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, remat=remat),
        train=dataclasses.replace(config.train, microbatches=parts),
    )


def best(config: RunConfig, topology: Topology, say: Callable[[str], None], compile=step) -> Compiled:
    """The fastest by roofline of all that fits, the batch of the step being given: for each remat policy the most sequences per device
    (the fewest microbatches) that fit, found by bisection.

    Raises `TooLarge` if nothing does.
    """
    found, smallest = [], None
    for remat in BY_MEMORY:
        options = microbatches(config, topology)
        low, high, fits = 0, len(options), None  # options[high:] fit, options[:low] do not
        while low < high:
            middle = (low + high) // 2
            try:
                fits, high = compile(variants(config, remat, options[middle]), topology), middle
                say(f"  {describe(fits.report)}")
            except TooLarge as error:
                low, smallest = middle + 1, min(error, smallest or error, key=lambda e: e.needed)
                say(f"  {remat}, {options[middle]} microbatches: {error}")
        if fits:
            found.append(fits)
            if high == 0:  # a policy that computes more cannot be faster when this one takes the whole batch at once
                break
    if not found:
        raise smallest
    return min(found, key=lambda c: c.report["roofline"]["step_seconds"])


def nearest(
    config: RunConfig, topology: Topology, error: TooLarge, say: Callable[[str], None], compile=step
) -> Compiled | None:
    """The same step cut into as few more microbatches as make it fit, with `config.model.remat` or else with full recomputation."""
    for remat in dict.fromkeys((config.model.remat, "full")):
        for parts in microbatches(config, topology):
            # What a part needs does not shrink faster than its size: skip what cannot fit.
            if parts < config.train.microbatches * error.needed / error.limit and remat == config.model.remat:
                continue
            try:
                return compile(variants(config, remat, parts), topology)
            except TooLarge as still:
                say(f"  {remat}, {parts} microbatches: {still}")
    return None


def describe(report: dict) -> str:
    """One line of a search."""
    roofline = report["roofline"]
    return (f"{report['remat']}, {report['microbatches']} microbatches: {report['peak_bytes'] / 1e9:.2f} of "
            f"{report['hbm_bytes'] / 1e9:.2f} GB, at best {roofline['step_seconds']:.2f} s a step, MFU <= {roofline['mfu_bound']:.0%} "
            f"({roofline['bound_by']})")  # fmt: skip
