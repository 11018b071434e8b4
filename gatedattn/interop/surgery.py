"""Gates for a model that was trained without them, and training of a part of a model's parameters.

    model = add_gates(pretrained, "g1:scale=2:zeros")                       # the same logits as before
    params = nnx.as_pure(nnx.state(model, nnx.Param))
    tx = train_only(optax.adamw(1e-3), trainable_mask(params, "gates/"))    # only the gates learn

`add_gates` refuses gates that would change the model, unless told otherwise.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jaxtyping import Array, PyTree

from gatedattn import gates as gates_lib
from gatedattn import sharding
from gatedattn.gates import GateSpec, is_identity
from gatedattn.interop.build import flat_parameters
from gatedattn.transformer import Transformer


def identity_start(spec: GateSpec) -> GateSpec:
    """The nearest spec that is the identity at the start: the same gate from zero weights, with scale 2 if it multiplies by a sigmoid.

    No other activation has an exact identity under `multiply`, none but silu, tanh and identity under `add`; a spec with another
    becomes a sigmoid that multiplies or a silu that adds.
    """
    if spec.op == "multiply":
        return dataclasses.replace(spec, activation="sigmoid", scale=2.0, init="zeros", bias=0.0)
    activation = spec.activation if spec.activation in ("silu", "tanh", "identity") else "silu"
    return dataclasses.replace(spec, activation=activation, init="zeros", bias=0.0)


def add_gates(
    model: Transformer,
    gates: str | GateSpec | Iterable[str | GateSpec] = "g1:scale=2:zeros",
    layers: Iterable[int] | None = None,
    *,
    allow_change: bool = False,
    rngs: nnx.Rngs | None = None,
) -> Transformer:
    """A model with the parameters of `model` and, behind the gates it has, new ones; `model` itself is left alone.

    The new gates are the identity at the start, so the logits are those of `model`. All layers share one structure (the forward pass
    scans over them): with `layers`, the gates of the others exist too, and are the identity as long as they are not trained. Hand
    the same `layers` to `trainable_mask` to keep them so.

    Args:
        gates: what `gatedattn.gates.parse` reads.
        layers: which layers get the gates; negative numbers count from the last; None for all.
        allow_change: accept gates that change the logits from the start.
        rngs: for gates with random weights (only with `allow_change`).

    Raises:
        ValueError: a spec that is not the identity at the start (the message names the one that is), a gate that the model has
            already, a config with a pattern, or a layer that it does not have. With `layers`, `allow_change` is of no help: the
            others could not keep their output.
    """
    config, specs = model.config, gates_lib.parse(gates)
    if config.pattern:
        raise ValueError(f"pattern={config.pattern!r}: add_gates takes models whose layers are all alike; a run with the gates in its "
                         "pattern begins with this model by train.init_from")  # fmt: skip
    for spec in specs:
        if not is_identity(spec) and not (allow_change and layers is None):
            reason = "layers outside `layers` would change" if allow_change else "allow_change=True accepts it as it is"
            raise ValueError(f"gate {spec} is not the identity at the start; '{identity_start(spec)}' is ({reason})")
    _chosen(layers, config.num_layers)
    before = config.gate_specs
    config = dataclasses.replace(config, gates=gates_lib.format(gates_lib.parse(before + specs)))

    old = flat_parameters(model)
    like = old["layers/attention/query/kernel"]
    rngs, new = rngs or nnx.Rngs(0), {}
    for number, spec in enumerate(specs, start=len(before)):
        heads = config.cache_heads if spec.position in ("g2", "g3") else config.num_heads
        keys = jax.random.split(rngs.params(), config.num_layers)
        values = config.cache_heads * config.head_dim
        fresh = jax.vmap(
            lambda key, s=spec, n=heads: gates_lib.init(key, s, config.d_model, n, config.head_dim, like.dtype, values)
        )(keys)
        new |= {f"layers/attention/gates/{number}/{name}": p for name, p in fresh.items()}
    if isinstance(like, jax.Array) and isinstance(like.sharding, NamedSharding):  # a sharded model stays sharded
        new = jax.device_put(new, sharding.shardings(new, like.sharding.mesh))

    graphdef, abstract = nnx.split(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))
    params = old | new
    return nnx.merge(graphdef, jax.tree_util.tree_map_with_path(lambda path, _: params[sharding.path_string(path)], abstract))


def trainable_mask(params: PyTree, pattern: str, layers: Iterable[int] | None = None) -> PyTree:
    """Which parameters learn: True where the path ("layers/attention/gates/0/kernel") matches the regular expression.

    A tree of bools for `optax.masked`, `optax.multi_transform` and `train_only`. With `layers`, a stacked parameter that matches
    has an array [L, 1, ...] of bools in place of True, for `train_only`; parameters outside the layers are then False.

    Raises:
        ValueError: no path matches, or a layer that does not exist.
    """

    def mask(path, leaf) -> bool | np.ndarray:
        name = sharding.path_string(path)
        if not re.search(pattern, name):
            return False
        if layers is None:
            return True
        if not name.startswith("layers/"):
            return False
        if re.match(r"layers/\d+/", name):
            raise ValueError("layers: in a model with a pattern they go by their place in it, e.g. 'layers/0/.*gates/'")
        rows = np.isin(np.arange(leaf.shape[0]), _chosen(layers, leaf.shape[0]))
        return rows.reshape(-1, *[1] * (leaf.ndim - 1))

    layers = None if layers is None else tuple(layers)
    result = jax.tree_util.tree_map_with_path(mask, params)
    if not any(np.any(m) for m in jax.tree.leaves(result)):
        paths = [sharding.path_string(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
        raise ValueError(f"no parameter matches {pattern!r}; there are {', '.join(paths)}")
    return result


def train_only(tx: optax.GradientTransformation, mask: PyTree) -> optax.GradientTransformation:
    """`tx` for what the mask of `trainable_mask` chooses; everything else stands still, and has no optimiser state."""

    def keep(m, update: Array) -> Array:
        return update if m is True else jnp.where(m, update, jnp.zeros_like(update))

    chosen = jax.tree.map(lambda m: bool(np.any(m)), mask)
    return optax.chain(optax.masked(tx, chosen), optax.stateless(lambda updates, _: jax.tree.map(keep, mask, updates)))


def _chosen(layers: Iterable[int] | None, num_layers: int) -> list[int]:
    wanted = range(num_layers) if layers is None else list(layers)
    for layer in wanted:
        if not -num_layers <= layer < num_layers:
            raise ValueError(f"layer {layer} does not exist: the model has {num_layers}")
    return [layer % num_layers for layer in wanted]
