"""Machines by name. TPU slices as the cloud calls them: `v5p-128`, `2xv5p-128`, `v6e-256`, `tpu7x-128`; GPUs by their number, in hosts
of eight: `h100-8`, `h200-64`.

Figures are Google Cloud's (docs.cloud.google.com/tpu/docs/v4, v5e, v5p, v6e, tpu7x) and NVIDIA's (see `gatedattn.aot.gpus`).
Bandwidths are those of a chip, in one direction, all its links together.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from dataclasses import dataclass

from gatedattn.config import ConfigError, suggest

GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """One chip. `cores`: how many a name's number counts on it; `devices`: how many JAX devices it is."""

    device_kind: str  # as JAX tells it, for `gatedattn.training.hardware.peak_flops`
    hbm_bytes: int
    hbm_bandwidth: float  # bytes/s
    ici_bandwidth: float  # bytes/s to the neighbours in a slice (ICI), or in a host (NVLink)
    network_bandwidth: float  # bytes/s to other slices, or other hosts
    dimensions: int  # of the torus; 0: hosts of GPUs
    largest: int  # chips in one slice
    cores: int = 1
    devices: int = 1

    @property
    def platform(self) -> str:
        return "tpu" if self.dimensions else "gpu"


# v4's share of the data-centre network is not published: v5p's stands in.
CHIPS = {
    "v4": Chip("TPU v4", 32 * GIB, 1200e9, 300e9, 6.25e9, 3, 4096, cores=2),
    "v5p": Chip("TPU v5", 95 * GIB, 2765e9, 600e9, 6.25e9, 3, 6144, cores=2),
    "v5e": Chip("TPU v5 lite", 16 * GIB, 819e9, 200e9, 3.125e9, 2, 256),
    "v6e": Chip("TPU v6 lite", 32 * GIB, 1638e9, 400e9, 12.5e9, 2, 256),
    "tpu7x": Chip("TPU7x", 192 * GIB, 7380e9, 600e9, 12.5e9, 3, 9216, cores=2, devices=2),
    # Memory as XLA reports it. SXM data sheets: 3.35 and 4.8 TB/s, NVLink 900 GB/s both ways together; DGX H100 and H200: a network
    # adapter of 400 Gb/s for each GPU. `largest` only catches slips of the finger.
    "h100": Chip("NVIDIA H100 80GB HBM3", 84_942_979_072, 3350e9, 450e9, 50e9, 0, 16384),
    "h200": Chip("NVIDIA H200", 151_397_597_184, 4800e9, 450e9, 50e9, 0, 16384),
}
GPUS_PER_HOST = 8
ALIASES = {"v5litepod": "v5e", "v5lite": "v5e"}
EXAMPLES = ("v4-128", "v5p-128", "2xv5p-128", "v5e-256", "v6e-256", "tpu7x-128", "h100-64", "h200-64")
LESS_THAN_A_CUBE = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
# libtpu looks for a TPU, and for the cloud's metadata server, unless it is told not to.
LIBTPU = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_WORKER_HOSTNAMES": "localhost"}


@dataclass(frozen=True)
class Topology:
    """`slices` slices of `chips` chips each. Only the data centre's network joins slices. Of GPUs a slice is a host."""

    name: str
    chip: Chip
    chips: int
    slices: int
    torus: tuple[int, ...]

    @property
    def devices_per_slice(self) -> int:
        return self.chips * self.chip.devices

    @property
    def devices(self) -> int:
        return self.devices_per_slice * self.slices

    @property
    def hbm_bytes(self) -> int:
        """Of one device, as sold; the compiler may use a little less."""
        return self.chip.hbm_bytes // self.chip.devices


def parse(name: str) -> Topology:
    """`[SLICESx]CHIP-SIZE`. SIZE counts what the cloud counts: cores for v4, v5p and tpu7x (two a chip), chips for the others, all GPUs.

    Raises `ConfigError` for an unknown chip, or a size that is not offered, with the nearest that are.
    """
    match = re.fullmatch(r"(?:([1-9]\d*)x)?([a-z]\w*)-(\d+)", name.strip().lower())
    kind = match and ALIASES.get(match[2], match[2])
    if not match or kind not in CHIPS:
        raise ConfigError(
            f"unknown topology {name!r}{suggest(name.lower(), EXAMPLES)}: give CHIP-SIZE or SLICESxCHIP-SIZE, "
            f"CHIP one of {', '.join(CHIPS)}"
        )
    slices, size, chip = int(match[1] or 1), int(match[3]), CHIPS[kind]
    gpu = chip.platform == "gpu"
    if gpu and match[1]:
        raise ConfigError(f"{name}: GPUs are counted over all hosts of {GPUS_PER_HOST}: {kind}-{slices * size}")
    sizes = {math.prod(torus) * chip.cores: torus for torus in tori(chip)}
    if size not in sizes:
        near = sorted(sorted(sizes, key=lambda s: abs(math.log(s / (size or 0.1))))[:2])
        unit = "cores (two a chip)" if chip.cores == 2 else "chips"
        given = f"no hosts of {GPUS_PER_HOST} have {size} GPUs" if gpu else f"no {kind} slice has {size} {unit}"
        raise ConfigError(f"{given}: the nearest are {' and '.join(f'{kind}-{s}' for s in near)}")
    torus = sizes[size]
    if gpu:
        return Topology(f"{kind}-{size}", chip, torus[1], torus[0], torus)
    name = f"{slices}x" * (slices > 1) + f"{kind}-{size}"
    return Topology(name, chip, size // chip.cores, slices, torus)


def tori(chip: Chip) -> list[tuple[int, ...]]:
    """The shapes of the slices on offer: the most compact one of each size. Of GPUs, hosts and GPUs in each: a part of one host, or
    any number of whole ones."""
    if chip.dimensions == 0:
        return [(1, 1), (1, 2), (1, 4), *((n + 1, GPUS_PER_HOST) for n in range(chip.largest // GPUS_PER_HOST))]
    if chip.dimensions == 2:
        return [(1, 1), *((2**i, 2 ** (i + j)) for i in range(1, 5) for j in (0, 1) if 2 ** (2 * i + j) <= chip.largest)]
    cubes = itertools.combinations_with_replacement(range(1, 29), 3)
    best: dict[int, tuple[int, ...]] = {}
    for shape in sorted(cubes, key=sum):
        best.setdefault(math.prod(shape), tuple(4 * n for n in shape))
    return [*LESS_THAN_A_CUBE, *(torus for n, torus in sorted(best.items()) if 64 * n <= chip.largest)]


def devices(topology: Topology) -> list:
    """The machine's devices, for a mesh: known to the compiler, absent from this computer.

    Raises `ConfigError` if the compiler is not installed.
    """
    if topology.chip.platform == "gpu":
        from gatedattn.aot import gpus

        return gpus.devices(topology)
    import jax
    from jax.experimental import topologies

    os.environ.update({name: value for name, value in LIBTPU.items() if name not in os.environ})
    generation = topology.name.removeprefix(f"{topology.slices}x").partition("-")[0]
    shape = "x".join(map(str, topology.torus))
    try:
        # "megacore": the two cores of a chip are one device, as on the cloud's machines; libtpu's default for v4 is two.
        cores = {"chip_config_name": "megacore"} if topology.chip.cores == 2 and topology.chip.devices == 1 else {}
        return topologies.get_topology_desc(f"{generation}:{shape}", "tpu", num_slices=topology.slices, **cores).devices
    except (RuntimeError, jax.errors.JaxRuntimeError) as error:
        first = str(error).splitlines()[0]
        raise ConfigError(f"no TPU compiler for {topology.name} ({first}): pip install 'jax[tpu]', no TPU needed") from None
