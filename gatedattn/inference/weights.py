"""A model's weights arranged for decoding: a step has one row per sequence, and takes as long as reading the weights takes."""

from __future__ import annotations

import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, PyTree

from gatedattn.config import TransformerConfig
from gatedattn.sharding import path_string

LINEAR = r"(query|key|value|output|router|score)/kernel$|(mlp|shared)/(gate|up|down)/kernel$|head/kernel$"
FLOAT32 = r"router/kernel$|norm/weight$|bias$|sink$|table$"  # the computation uses these as they are


def cast(params: PyTree, config: TransformerConfig) -> PyTree:
    """Matrices in the dtype in which they are multiplied: what every step would cast anew. The results are the same."""

    def one(path, x):
        path = path_string(path)
        return x if re.search(FLOAT32, path) and path != "embedding/table" else x.astype(config.dtype)

    return jax.tree_util.tree_map_with_path(one, params)


def _inputs(path: str, config: TransformerConfig) -> int:
    """How many of a matrix's first dimensions are contracted; 0: the parameter is none that `project` multiplies by."""
    if match := re.search(r"gates/(\d+)/kernel$", path):
        spec = config.gate_specs[int(match[1])]
        return int(spec.source in ("hidden", "value") or spec.sharing == "shared" or not spec.per_head)
    if not re.search(LINEAR, path):
        return 0
    return 2 if path.endswith("output/kernel") else 1


def _stacks(params: PyTree, config: TransformerConfig) -> list[PyTree]:
    """The layers' parameters, one tree per layer of the period."""
    return [params["layers"][i] for i in range(len(config.period))] if config.pattern else [params["layers"]]


def store(params: PyTree, config: TransformerConfig, *, transpose: bool) -> tuple[PyTree, list[PyTree]]:
    """The head, and one tree per layer: a scan over stacked layers copies each layer's weights out of the stack before it reads
    them. With `transpose` each matrix lies as [outputs, inputs].
    """

    @functools.partial(jax.jit, static_argnames="config")
    def arrange(tree: PyTree, layer: Array | None = None, *, config: TransformerConfig) -> PyTree:
        def one(path, x):
            inputs = _inputs(path_string(path), config)
            return x.reshape(math.prod(x.shape[:inputs]), -1).T if inputs and transpose else x

        return jax.tree_util.tree_map_with_path(one, tree if layer is None else jax.tree.map(lambda x: x[layer], tree))

    head = {"head": params["head"]} if "head" in params else {}
    # One small program, run once per layer: all layers in one program take XLA seconds to compile.
    period = list(zip(_stacks(params, config), config.period, strict=True))
    rows = range(config.num_layers // len(period))
    return arrange(head, config=config), [arrange(stack, jnp.int32(i), config=layer) for i in rows for stack, layer in period]


def restore(
    params: PyTree, stored: tuple[PyTree, list[PyTree]], config: TransformerConfig, *, transpose: bool
) -> tuple[PyTree, list[PyTree]]:
    """Inside the compiled program: `params` with the stored head, and the layers, in the shapes the model knows. Moves no data."""

    def back(config: TransformerConfig, drop: int):
        def one(path, x: Array, like: Array) -> Array:
            # By path, not by shape: a square matrix looks the same either way.
            return x.T.reshape(like.shape[drop:]) if transpose and _inputs(path_string(path), config) else x

        return one

    head, layers = stored
    if head:
        whole = {"head": params["head"]}
        head = jax.tree_util.tree_map_with_path(back(config, 0), head, whole)
        params = nnx.State(dict(params) | head)
    like = itertools.cycle(zip(_stacks(params, config), config.period, strict=True))
    return params, [
        jax.tree_util.tree_map_with_path(back(settings, 1), layer, stack) for layer, (stack, settings) in zip(layers, like)
    ]
