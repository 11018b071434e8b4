"""Where state and batches live: on the one device there is, or over a mesh of all of them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from gatedattn import sharding
from gatedattn.config import ConfigError, MeshConfig

BATCH_AXES = ("data", "fsdp", "expert")  # the mesh axes that divide the sequences of a batch


def mesh_shape(config: MeshConfig, devices: int) -> dict[str, int]:
    """Devices along each axis, -1 filled in. Raises `ConfigError` if they do not multiply to `devices`."""
    sizes = {
        "data": config.data,
        "fsdp": config.fsdp,
        "tensor": config.tensor,
        "expert": config.expert,
        "context": config.context,
    }
    given = math.prod(size for size in sizes.values() if size != -1)
    if -1 in sizes.values() and devices % given == 0:
        return {name: devices // given if size == -1 else size for name, size in sizes.items()}
    if -1 in sizes.values() or given != devices:
        asked = ", ".join(f"mesh.{name}={size}" for name, size in sizes.items() if size != 1)
        raise ConfigError(f"{asked or 'the mesh'} does not fit {devices} device{'s' * (devices != 1)}: "
                          f"the axes must multiply to {devices}; one of them may be -1")  # fmt: skip
    return sizes


class Placement:
    """`mesh` is None on a single device; then everything here is the identity."""

    def __init__(self, config: MeshConfig, batch_size: int, devices: Sequence[jax.Device]):
        shape = mesh_shape(config, len(devices))
        self.devices, self.mesh = devices, None
        if len(devices) > 1:
            ways = math.prod(shape[axis] for axis in BATCH_AXES)
            if batch_size % ways:
                raise ConfigError(f"{batch_size} sequences (train.batch_size / train.microbatches) cannot be divided over "
                                  f"{ways} devices (mesh.data x mesh.fsdp x mesh.expert)")  # fmt: skip
            self.mesh = jax.make_mesh(
                tuple(shape.values()), tuple(shape), axis_types=(AxisType.Auto,) * len(shape), devices=devices
            )

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

    def put(self, batch: dict) -> dict:
        """A host batch on the devices, sequences divided over `BATCH_AXES`; does not wait for the transfer."""
        if self.mesh is None:
            return jax.device_put(batch, self.devices[0])
        axes = tuple(axis for axis in BATCH_AXES if self.mesh.shape[axis] > 1)  # as `constrain` does: types must agree
        return jax.device_put(batch, NamedSharding(self.mesh, PartitionSpec(axes or None)))
