"""Where state and batches live: on the one device there is, or over a mesh of all of them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jaxtyping import Int64

from gatedattn import sharding
from gatedattn.config import ConfigError, MeshConfig, RunConfig

AXES = ("data", "fsdp", "tensor", "expert", "context")  # outermost first
BATCH_AXES = ("data", "fsdp", "expert")  # the mesh axes that divide the sequences of a batch


def mesh_shape(config: MeshConfig, devices: int) -> dict[str, int]:
    """Devices along each axis, -1 filled in. Raises `ConfigError` if they do not multiply to `devices`."""
    sizes = {name: getattr(config, name) for name in AXES}
    given = math.prod(size for size in sizes.values() if size != -1)
    if -1 in sizes.values() and devices % given == 0:
        return {name: devices // given if size == -1 else size for name, size in sizes.items()}
    if -1 in sizes.values() or given != devices:
        asked = ", ".join(f"mesh.{name}={size}" for name, size in sizes.items() if size != 1)
        raise ConfigError(f"{asked or 'the mesh'} does not fit {devices} device{'s' * (devices != 1)}: "
                          f"the axes must multiply to {devices} (these to {given}, {_around(devices, given)} would leave "
                          "a whole number); one of them may be -1")  # fmt: skip
    return sizes


def check(config: RunConfig, shape: Mapping[str, int]) -> None:
    """Refuses, before anything is compiled, a mesh that does not divide what its axes divide."""
    model, train = config.model, config.train
    width, hidden = ("moe.expert_dim", model.moe.expert_dim) if model.is_moe else ("ffn_dim", model.ffn_dim)
    ways = math.prod(shape[axis] for axis in BATCH_AXES)
    divided = [
        (
            "mesh.data x mesh.fsdp x mesh.expert",
            ways,
            "train.batch_size / train.microbatches",
            train.batch_size // train.microbatches,
        ),
        ("mesh.context", shape["context"], "train.seq_len", train.seq_len),
        ("mesh.fsdp", shape["fsdp"], "model.d_model", model.d_model),
        ("mesh.tensor", shape["tensor"], "model.num_heads", model.num_heads),
        ("mesh.tensor", shape["tensor"], "model.num_kv_heads", model.num_kv_heads),
        ("mesh.tensor", shape["tensor"], f"model.{width}", hidden),
        ("mesh.tensor", shape["tensor"], "model.vocab_size", model.vocab_size),
    ]
    if model.is_moe:
        divided.append(("mesh.expert", shape["expert"], "model.moe.num_experts", model.moe.num_experts))
    for axis, ways, name, size in divided:
        if size % ways:
            below, above = size // ways * ways, -(-size // ways) * ways
            raise ConfigError(
                f"{axis}={ways} does not divide {name}={size}: {axis if ' x ' not in axis else 'their product'} may be "
                f"{_around(size, ways)}, or {name} {' or '.join(str(n) for n in (below, above) if n)}"
            )


def _around(size: int, wanted: int) -> str:
    """The divisors of `size` nearest to the one wanted, below and above."""
    fits = [n for n in range(1, size + 1) if size % n == 0]
    return " or ".join(map(str, [n for n in fits if n < wanted][-1:] + [n for n in fits if n > wanted][:1]))


def make_mesh(shape: Mapping[str, int], devices: Sequence[jax.Device]) -> Mesh:
    """A mesh in which neighbours on an axis are neighbours in the machine. Over several slices (TPU pods joined by the data
    centre's network) the axis `data`, outermost, goes across them, all others stay within one. GPUs come host by host: the inner axes
    stay within one as far as it reaches, and any may go across, for a GPU's network is but some nine times slower than its NVLink."""
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    kinds = (AxisType.Auto,) * len(shape)
    if sharding.platform_of(devices[0]) == "gpu":  # `jax.make_mesh` refuses several hosts
        return Mesh(mesh_utils.create_device_mesh(tuple(shape.values()), devices), tuple(shape), axis_types=kinds)
    if slices == 1:
        return jax.make_mesh(tuple(shape.values()), tuple(shape), axis_types=kinds, devices=devices)
    if shape["data"] % slices:
        raise ConfigError(
            f"mesh.data={shape['data']} over {slices} slices: must be a multiple of {slices}, for only data goes across"
        )
    across = {name: slices if name == "data" else 1 for name in shape}
    within = [size // across[name] for name, size in shape.items()]
    split = devices[0].device_kind in (
        "TPU v5 lite",
        "TPU v5e",
    )  # as `jax.make_mesh` does: an axis need not be one of the torus
    grid = mesh_utils.create_hybrid_device_mesh(within, tuple(across.values()), devices, allow_split_physical_axes=split)
    return Mesh(grid, tuple(shape), axis_types=kinds)


class Placement:
    """`mesh` is None on a single device; then everything here is the identity."""

    def __init__(self, config: MeshConfig, batch_size: int, devices: Sequence[jax.Device]):
        shape = mesh_shape(config, len(devices))
        self.devices, self.mesh = devices, None
        self.platform = sharding.platform_of(devices[0])
        if len(devices) > 1 or self.platform != jax.default_backend():  # a device that is described but not here, too
            ways = math.prod(shape[axis] for axis in BATCH_AXES)
            if batch_size % ways:
                raise ConfigError(f"{batch_size} sequences (train.batch_size / train.microbatches) cannot be divided over "
                                  f"{ways} devices (mesh.data x mesh.fsdp x mesh.expert)")  # fmt: skip
            self.mesh = make_mesh(shape, devices)

    @classmethod
    def of(cls, config: RunConfig, devices: Sequence[jax.Device]) -> Placement:
        """For this run, whose sizes the mesh must divide. Raises `ConfigError` if it does not."""
        place = cls(config.mesh, config.train.batch_size // config.train.microbatches, devices)
        if place.mesh is not None:
            check(config, place.mesh.shape)
        return place

    def scope(self):
        """The context in which to trace and run."""
        return jax.set_mesh(self.mesh) if self.mesh else contextlib.nullcontext()

    def shardings(self, abstract):
        """Shardings of a (train state or parameter) tree, by the path rules; None on a single device."""
        return sharding.shardings(abstract, self.mesh) if self.mesh else None

    def on_devices(self, abstract):
        """An abstract tree with its shardings filled in: the target of a restore. On a single device too: without a sharding
        Orbax would look for the devices that saved it."""
        one = SingleDeviceSharding(self.devices[0])
        shardings = self.shardings(abstract) if self.mesh else jax.tree.map(lambda _: one, abstract)
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract, shardings)

    @property
    def batch_sharding(self) -> Sharding:
        """Of every array of a batch, [B, T]: sequences divided over `BATCH_AXES`, tokens over `context`."""
        if self.mesh is None:
            return SingleDeviceSharding(self.devices[0])
        axes = tuple(axis for axis in BATCH_AXES if self.mesh.shape[axis] > 1)  # as `constrain` does: types must agree
        tokens = "context" if self.mesh.shape["context"] > 1 else None
        return NamedSharding(self.mesh, PartitionSpec(axes or None, tokens))

    @property
    def everywhere(self) -> Sharding | None:
        """A result that every process can read; None where that goes without saying."""
        return NamedSharding(self.mesh, PartitionSpec()) if self.mesh else None

    def put(self, fetch: Callable[[Int64[np.ndarray, " b"]], dict], batch_size: int) -> dict:
        """The batch whose rows `fetch` reads by their numbers, on the devices; does not wait for the transfer. A process reads
        no rows but those of its own devices."""
        everything, place = np.arange(batch_size), self.batch_sharding
        if jax.process_count() == 1:
            return jax.device_put(fetch(everything), place)
        rows = NamedSharding(self.mesh, PartitionSpec(place.spec[0]))
        cuts = rows.addressable_devices_indices_map((batch_size,)).values()
        mine = np.unique(np.concatenate([everything[cut[0]] for cut in cuts]))

        def spread(local: np.ndarray) -> jax.Array:
            def part(cut: tuple[slice, ...]) -> np.ndarray:
                return local[np.searchsorted(mine, everything[cut[0]])][(slice(None), *cut[1:])]

            return jax.make_array_from_callback((batch_size, *local.shape[1:]), place, part)

        return jax.tree.map(spread, fetch(mine))
