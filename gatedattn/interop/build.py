"""A `Transformer` from wherever its parameters are: read one at a time, straight to where they live."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import PyTree

from gatedattn import sharding
from gatedattn.config import TransformerConfig
from gatedattn.sharding import path_string
from gatedattn.transformer import Transformer


def build(config: TransformerConfig, params: Mapping, *, mesh: Mesh | None = None, param_dtype=jnp.float32) -> Transformer:
    """The model with the parameters `params[path]`: numpy arrays, memory-mapped ones, or what reads itself when it is indexed.

    With a mesh each device's shard is read by itself, by the path rules of `gatedattn.sharding`, so the host never holds more
    than a shard; without one, no more than one parameter (its layers stacked).
    """
    abstract = nnx.eval_shape(lambda: Transformer(config, param_dtype=param_dtype, rngs=nnx.Rngs(0)))
    graphdef, wanted = nnx.split(abstract)

    def one(key_path, leaf, place=None):
        path = path_string(key_path)

        def shard(index: tuple[slice, ...]) -> np.ndarray:
            return np.asarray(params[path][index], dtype=leaf.dtype)

        if place is None:
            return jnp.asarray(shard(tuple(slice(0, n) for n in leaf.shape)))
        return jax.make_array_from_callback(leaf.shape, place, shard)

    places = () if mesh is None else (sharding.shardings(wanted, mesh),)
    return nnx.merge(graphdef, jax.tree_util.tree_map_with_path(one, wanted, *places))


def flat_parameters(model: Transformer | PyTree) -> dict[str, jax.Array]:
    """Path -> array of every parameter, of a model or of a tree of parameters."""
    params = nnx.state(model, nnx.Param) if isinstance(model, Transformer) else model
    return {path_string(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
