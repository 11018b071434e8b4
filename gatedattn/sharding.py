"""Meshes, the one table of path rules that shards every parameter, and `constrain` for intermediates.

Each dimension letter (see `gatedattn.config`) maps to mesh axes, once for parameters and once for activations; the table says
which letters a parameter's path carries.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

PARAMETER_AXES = {"D": "fsdp", "N": "tensor", "K": "tensor", "F": "tensor", "V": "tensor", "E": "expert"}
ACTIVATION_AXES = {"B": ("data", "fsdp", "expert"), "T": "context", "N": "tensor", "K": "tensor", "F": "tensor", "V": "tensor"}
WEIGHT_AXES = {"e": "expert", "d": "fsdp", "f": "tensor"}  # E, D and F of expert weights, as they are divided at rest
AXES = {"data", "fsdp", "expert", "context", "tensor"}  # the mesh axes that we know how to use

# Path pattern -> one letter per dimension ("." is never sharded). Searched in order; stacked layers add a leading L.
RULES = (
    (r"embedding/table|position/table", "VD"),
    (r"registers/table", ".D"),
    (r"head/kernel", "DV"),
    (r"attention/query/kernel", "DNH"),
    (r"attention/(key|value)/kernel", "DKH"),
    (r"attention/output/kernel", "NHD"),
    (r"attention/gates/\d+/kernel|attention/(value|output)_router/kernel|attention/sparse/gate/kernel", "DN."),
    (r"attention/sparse/compress_\w+/(inner|outer)/kernel", "D."),
    (r"mlp/(gate|up)/kernel|shared/(gate|up)/kernel", "DF"),
    (r"mlp/down/kernel|shared/down/kernel", "FD"),
    (r"norm/down/kernel", "D."),
    (r"norm/up/kernel", ".D"),
    (r"moe/router/kernel", "D."),
    (r"moe/(gate|up)/kernel", "EDF"),
    (r"moe/down/kernel", "EFD"),
    (r"norm/weight|bias|sink|gates/\d+/table|score/kernel", ""),
    (r"ns_coeffs$", ""),  # Muon's three numbers
    (r"^guard/", ""),
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


def specs(tree, mesh: Mesh | AbstractMesh):
    """A tree of `PartitionSpec` for a tree of (abstract) parameters, or anything whose paths end like theirs; scalars are replicated.

    An axis that the mesh lacks, or that does not divide its dimension, is left out.
    """

    def one(path, leaf):
        spec = partition_spec(path_string(path), leaf.ndim) if leaf.ndim else PartitionSpec()
        return PartitionSpec(
            *(
                axis if axis and size % mesh.shape.get(axis, math.inf) == 0 else None
                for axis, size in zip(spec, leaf.shape, strict=True)
            )
        )

    return jax.tree_util.tree_map_with_path(one, tree)


def shardings(tree, mesh: Mesh):
    """The same as a tree of `NamedSharding`."""
    return jax.tree.map(functools.partial(NamedSharding, mesh), specs(tree, mesh))


def pin(tree):
    """Gradients where their parameters are: without being told, the compiler may add up whole ones on every device."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or set(mesh.axis_types) != {AxisType.Auto} or not AXES.issuperset(mesh.axis_names):
        return tree
    return jax.lax.with_sharding_constraint(tree, specs(tree, mesh))


def _kinds(mesh: AbstractMesh) -> dict[str, AxisType]:
    return dict(zip(mesh.axis_names, mesh.axis_types, strict=True))


def _axes(mesh: AbstractMesh, letter: str, size: int) -> tuple[str, ...]:
    """The mesh axes that divide a dimension. An axis in the hands of a surrounding `shard_map` is none of ours."""
    wanted = (ACTIVATION_AXES | WEIGHT_AXES).get(letter, ())
    kinds, chosen = _kinds(mesh), []
    for axis in (wanted,) if isinstance(wanted, str) else wanted:
        if mesh.shape.get(axis, 1) > 1 and size % mesh.shape[axis] == 0 and kinds[axis] != AxisType.Manual:
            chosen.append(axis)
            size //= mesh.shape[axis]
    return tuple(chosen)


def division(letter: str, size: int) -> tuple[str, ...]:
    """The axes of the mesh around us by which `map_shards` cuts a dimension; none under a mesh whose axes we do not know."""
    mesh = jax.sharding.get_abstract_mesh()
    return _axes(mesh, letter, size) if AXES.issuperset(mesh.axis_names) else ()


def platform_of(device) -> str:
    """ "cpu", "gpu" or "tpu", whatever the vendor calls it."""
    return {"cuda": "gpu", "rocm": "gpu"}.get(device.platform, device.platform)


def platform() -> str:
    """That of the devices of the mesh around us, which may be described (for ahead-of-time compilation) rather than present."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return jax.default_backend() if device is None else platform_of(device)


def axis_names(entry) -> tuple[str, ...]:
    """The mesh axes in one entry of a `PartitionSpec`: None, a name, or several."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def constrain(x: Array, letters: str) -> Array:
    """Pin an activation's sharding by its dimension letters, e.g. `constrain(q, "BTNH")`.

    Does nothing without a mesh, is a constraint under a mesh of Auto axes and a reshard under Explicit ones, so that a module
    works in a notebook, in a stranger's trainer and in ours. Axes the mesh lacks, or that do not divide the dimension, are left
    out. Of a mesh with axes that we do not know ("dp", "model"), those are left as they are, in every dimension.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    kinds = _kinds(mesh)
    axes = [_axes(mesh, letter, size) for letter, size in zip(letters, x.shape, strict=True)]

    def of(kind: AxisType, dim: int) -> tuple[str, ...]:
        return tuple(axis for axis in axes[dim] if kinds[axis] == kind)

    if AxisType.Explicit in mesh.axis_types:
        foreign = [tuple(axis for axis in axis_names(entry) if axis not in AXES) for entry in jax.typeof(x).sharding.spec]
        spec = [(of(AxisType.Explicit, dim) + foreign[dim]) or None for dim in range(x.ndim)]
        x = jax.sharding.reshard(x, PartitionSpec(*spec))
    if AxisType.Auto in mesh.axis_types:
        rest = None if AXES.issuperset(mesh.axis_names) else PartitionSpec.UNCONSTRAINED
        x = jax.lax.with_sharding_constraint(x, PartitionSpec(*(of(AxisType.Auto, dim) or rest for dim in range(x.ndim))))
    return x


def explicit() -> bool:
    """Whether shardings are part of the types here: then an operation that could be sharded in several ways must be told how."""
    return AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types


INDEPENDENT = "BNK"  # sequences and heads: whatever divides them, each part can be worked on by itself


def map_shards(f: Callable, arrays: Sequence[Array | None], letters: Sequence[str], out: Sequence[str]):
    """`f(*arrays)` on each device's own part: for an f whose every result needs only the part it lies in.

    For instance attention, which mixes neither sequences nor KV heads: `map_shards(attend, (q, k, v), ["B.K.", "B.K.", "B.K."],
    ["B.K.", "BK."])`. A letter stands for the same cut in all arrays (each KV head goes with its query heads); ".": not cut.
    XLA need not find out by itself how to push shards through the reshapes inside f (it gathers instead), and a custom kernel could
    not run otherwise. Where f does need other devices' parts, of tokens ("T") or of expert weights ("e", "d", "f"), it asks for them
    over the axes that `division` names. Under a mesh whose axes we do not know f is called as it is.
    """
    mesh = jax.sharding.get_abstract_mesh()
    kinds = _kinds(mesh)
    ours = {axis for axis, kind in kinds.items() if kind != AxisType.Manual and mesh.shape[axis] > 1}
    if not ours or not (AXES >= ours or explicit()):
        return f(*arrays)
    present = [i for i, x in enumerate(arrays) if x is not None]
    sizes: dict[str, int] = {}
    foreign: dict[str, tuple[str, ...]] = {}
    for i in present:
        for letter, size, entry in zip(letters[i], arrays[i].shape, jax.typeof(arrays[i]).sharding.spec, strict=True):
            sizes[letter] = math.gcd(sizes.get(letter, 0), size)
            kept = tuple(axis for axis in axis_names(entry) if axis not in AXES and letter in INDEPENDENT)
            foreign[letter] = tuple(axis for axis in foreign.get(letter, kept) if axis in kept)
    cut = {
        letter: _axes(mesh, letter, size) + foreign[letter] if letter in INDEPENDENT else division(letter, size)
        for letter, size in sizes.items()
    }
    cut["."] = ()
    specs = [PartitionSpec(*(cut[letter] or None for letter in letters[i])) for i in present]
    parts = [arrays[i] for i in present]
    if explicit():
        names = {axis for axis, kind in kinds.items() if kind == AxisType.Explicit}
        typed = [
            PartitionSpec(*(tuple(a for a in axis_names(entry) if a in names) or None for entry in spec)) for spec in specs
        ]
        parts = [jax.sharding.reshard(x, spec) for x, spec in zip(parts, typed, strict=True)]

    def on_part(*parts):
        full = dict(zip(present, parts, strict=True))
        return f(*(full.get(i) for i in range(len(arrays))))

    outs = tuple(PartitionSpec(*(cut[letter] or None for letter in word)) for word in out)
    names = {axis for axis, kind in kinds.items() if kind != AxisType.Manual}
    return jax.shard_map(on_part, in_specs=tuple(specs), out_specs=outs, axis_names=names, check_vma=False)(*parts)
