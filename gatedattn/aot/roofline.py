"""The least time a step can take on a chip, from what it must compute, read and send."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from gatedattn.aot.topologies import Topology
from gatedattn.training.hardware import peak_flops


@dataclass(frozen=True)
class Roofline:
    """Seconds that each resource is busy in a step, if it runs at its published rate; perfect overlap makes the longest the bound."""

    compute_seconds: float
    hbm_seconds: float
    interconnect_seconds: float  # within a slice (ICI)
    network_seconds: float  # between slices
    step_seconds: float  # the longest of them
    bound_by: str
    mfu_bound: float  # model FLOPs / (step_seconds x peak)

    as_dict = asdict


def roofline(
    topology: Topology, *, model_flops: float, executed_flops: float, traffic: float, wire: float, network: float
) -> Roofline:
    """FLOPs are those of the whole machine and step; bytes those of one device: memory touched, received over ICI, and over the network.

    `executed_flops` counts what is computed twice, `model_flops` does not.
    """
    chip = topology.chip
    peak = peak_flops(chip.device_kind)  # of one device
    seconds = {
        "compute": executed_flops / (topology.devices * peak),
        "hbm": traffic / (chip.hbm_bandwidth / chip.devices),
        "interconnect": wire / (chip.ici_bandwidth / chip.devices),
        "network": network / (chip.network_bandwidth / chip.devices),
    }
    bound_by = max(seconds, key=seconds.get)
    step = seconds[bound_by]
    return Roofline(
        **{f"{name}_seconds": value for name, value in seconds.items()},
        step_seconds=step,
        bound_by=bound_by,
        mfu_bound=model_flops / (step * topology.devices * peak),
    )
