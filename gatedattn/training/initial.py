"""`train.init_from`: a new run that begins with the parameters of another model."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import PyTree

from gatedattn import gates
from gatedattn.config import ConfigError, TransformerConfig, to_mapping
from gatedattn.data.tokenizers import Tokenizer
from gatedattn.gates import GateSpec
from gatedattn.sharding import path_string
from gatedattn.training.console import say

GATE = r"layers/attention/gates/(\d+)/"


@dataclass(frozen=True)
class Origin:
    """A model to begin with. `params`: by path, arrays or what reads itself when it is indexed; `name`: where it is from."""

    name: str
    config: TransformerConfig
    params: Mapping
    tokenizer: Tokenizer | None = None


@dataclass(frozen=True)
class Matched:
    """Paths of parameters: taken over (ours -> theirs), initialised afresh, and theirs that found no place."""

    matched: dict[str, str]
    new: list[str]
    left: list[str]


def match(config: TransformerConfig, wanted: Mapping[str, tuple[int, ...]], origin: Origin) -> Matched:
    """Which parameter comes from where. A gate keeps its parameters wherever it stands among the layer's gates: it is known by
    its spec, how it was initialised left aside. Raises `ConfigError` for a parameter of another shape, or if nothing matches."""
    theirs = {path: tuple(param.shape) for path, param in origin.params.items()}
    places = _gate_places(config.gate_specs, origin.config.gate_specs)

    def their_path(path: str) -> str | None:
        gate = re.match(GATE, path)
        if not gate:
            return path
        number = places.get(int(gate[1]))
        return None if number is None else path.replace(gate[0], f"layers/attention/gates/{number}/")

    matched = {path: other for path in wanted if (other := their_path(path)) in theirs}
    for path, other in matched.items():
        if tuple(wanted[path]) != theirs[other]:
            raise ConfigError(f"train.init_from={origin.name}: {other} is {theirs[other]} there, this model's is {tuple(wanted[path])}: "
                              "give the model the settings of the one it begins with")  # fmt: skip
    if not matched:
        raise ConfigError(f"train.init_from={origin.name}: none of its {len(theirs)} parameters has a place in this model")
    return Matched(matched, [p for p in wanted if p not in matched], sorted(theirs.keys() - set(matched.values())))


def _gate_places(ours: tuple[GateSpec, ...], theirs: tuple[GateSpec, ...]) -> dict[int, int]:
    """Number of a gate here -> its number there."""
    free = [_form(spec) for spec in theirs]
    places = {}
    for number, spec in enumerate(ours):
        if (form := _form(spec)) in free:
            places[number] = free.index(form)
            free[places[number]] = None
    return places


def _form(spec: GateSpec) -> GateSpec:
    return dataclasses.replace(spec, init=GateSpec.init, bias=GateSpec.bias)


def begin(config: TransformerConfig, params: PyTree, origin: Origin, tokenizer: Tokenizer) -> PyTree:
    """`params` with whatever `origin` has for them, each read straight to where it lives; says what came from where.

    Raises `ConfigError` as `match` does, and if the text is made of other tokens than the model knows.
    """
    if origin.tokenizer and origin.tokenizer.fingerprint != tokenizer.fingerprint:
        raise ConfigError(f"train.init_from={origin.name} was made for another tokenizer ({origin.tokenizer.file}, "
                          f"{origin.tokenizer.vocab_size} ids): set data.tokenizer to that one")  # fmt: skip
    leaves = jax.tree_util.tree_leaves_with_path(params)
    found = match(config, {path_string(path): leaf.shape for path, leaf in leaves}, origin)

    def one(path, leaf):
        theirs = found.matched.get(path_string(path))
        if theirs is None:
            return leaf
        read = origin.params[theirs]
        return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: np.asarray(read[index], leaf.dtype))

    params = jax.tree_util.tree_map_with_path(one, params)
    tell(config, origin, found)
    return params


def tell(config: TransformerConfig, origin: Origin, found: Matched) -> None:
    say(
        f"  starting     from {origin.name}: {len(found.matched)} parameters matched, {len(found.new)} new, {len(found.left)} left"
    )
    for what, paths in (("new", found.new), ("left", found.left)):
        for path in paths:
            say(f"               {what:<5}{path}")
    changed = []
    for number, spec in enumerate(config.gate_specs):
        if any(path.startswith(f"layers/attention/gates/{number}/") for path in found.new) and not gates.is_identity(spec):
            changed.append(str(spec))
    if changed:
        say(f"  WARNING      the new gates {', '.join(changed)} change the model from its first step; "
            "an identity start (2 sigmoid from zero) does not: g1:scale=2:zeros")  # fmt: skip
    ours, theirs = to_mapping(config), to_mapping(origin.config)
    for key, value in ours.items():
        if key not in ("gates", "dtype", "remat", "kernel", "init_std") and value != theirs.get(key):
            say(f"               model.{key} was {theirs.get(key)!r} there and is {value!r} here")
