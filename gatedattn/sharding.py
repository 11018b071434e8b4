"""Meshes, the one table of path rules that shards every parameter, and `constrain` for intermediates.

Each dimension letter (see `gatedattn.config`) maps to mesh axes, once for parameters and once for activations; the table says
which letters a parameter's path carries.
"""

from __future__ import annotations

import re

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

PARAMETER_AXES = {"D": "fsdp", "N": "tensor", "K": "tensor", "F": "tensor", "V": "tensor", "E": "expert"}
ACTIVATION_AXES = {"B": ("data", "fsdp", "expert"), "T": "context", "N": "tensor", "K": "tensor", "F": "tensor", "V": "tensor"}

# Path pattern -> one letter per dimension ("." is never sharded). Searched in order; stacked layers add a leading L.
RULES = (
    (r"embedding/table|position/table", "VD"),
    (r"head/kernel", "DV"),
    (r"attention/query/kernel", "DNH"),
    (r"attention/(key|value)/kernel", "DKH"),
    (r"attention/output/kernel", "NHD"),
    (r"attention/gates/\d+/kernel", "D.."),
    (r"mlp/(gate|up)/kernel|shared/(gate|up)/kernel", "DF"),
    (r"mlp/down/kernel|shared/down/kernel", "FD"),
    (r"moe/router/kernel", "D."),
    (r"moe/(gate|up)/kernel", "EDF"),
    (r"moe/down/kernel", "EFD"),
    (r"norm/weight|bias|sink|gates/\d+/table|score/kernel", ""),
)


def path_string(path) -> str:
    """'layers/attention/query/kernel' from a JAX key path, without the variable's own `.value` step at its end."""
    if path and isinstance(path[-1], jax.tree_util.GetAttrKey) and path[-1].name == "value":
        path = path[:-1]
    return "/".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)


def partition_spec(path: str, ndim: int) -> PartitionSpec:
    """Where a parameter (or its optimiser moment) of that path lives. Raises `KeyError` if no rule knows the path."""
    for pattern, letters in RULES:
        if re.search(pattern, path):
            stacked = ("." if "layers/" in path else "") + letters
            axes = [PARAMETER_AXES.get(letter) for letter in stacked[:ndim]]
            return PartitionSpec(*axes, *[None] * (ndim - len(axes)))
    raise KeyError(f"no sharding rule for parameter {path!r}: add one to gatedattn.sharding.RULES")


def shardings(tree, mesh: Mesh):
    """A tree of `NamedSharding` for a tree of (abstract) parameters; scalars are replicated."""

    def one(path, leaf):
        spec = partition_spec(path_string(path), leaf.ndim) if leaf.ndim else PartitionSpec()
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(one, tree)


def constrain(x: Array, letters: str) -> Array:
    """Pin an activation's sharding by its dimension letters, e.g. `constrain(q, "BTNH")`.

    Does nothing without a mesh, is a constraint under a mesh of Auto axes and a reshard under Explicit ones, so that a module
    works in a notebook, in a stranger's trainer and in ours. Axes the mesh lacks, or that do not divide the dimension, are left out.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x

    def axes(letter: str, size: int):
        wanted = ACTIVATION_AXES.get(letter, ())
        chosen = []
        for axis in (wanted,) if isinstance(wanted, str) else wanted:
            if mesh.shape.get(axis, 1) > 1 and size % mesh.shape[axis] == 0:
                chosen.append(axis)
                size //= mesh.shape[axis]
        return tuple(chosen) or None

    spec = PartitionSpec(*(axes(letter, size) for letter, size in zip(letters, x.shape, strict=True)))
    if all(kind == jax.sharding.AxisType.Explicit for kind in mesh.axis_types):
        return jax.sharding.reshard(x, spec)
    return jax.lax.with_sharding_constraint(x, spec)
