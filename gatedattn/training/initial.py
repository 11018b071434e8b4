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
from gatedattn.training.resume import flatten

LAYER = r"layers/(?:(\d+)/)?(attention/gates/(\d+)/)?"  # number in the pattern, number of the gate


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
    its spec, how it was initialised left aside. A layer comes from the layer of its number, also where this model has a pattern and
    theirs none, or a part of it. Raises `ConfigError` for a parameter of another shape, or if nothing matches."""
    theirs = {path: tuple(param.shape) for path, param in origin.params.items()}
    period, there = config.period, origin.config.period
    if len(period) % len(there):
        raise ConfigError(f"train.init_from={origin.name}: its pattern is of {len(there)} layers, this model's of {len(period)}: "
                          "must be a multiple")  # fmt: skip
    stride = len(period) // len(there)
    places = [_gate_places(ours.gate_specs, there[i % len(there)].gate_specs) for i, ours in enumerate(period)]

    def their_path(path: str) -> str | None:
        layer = re.match(LAYER, path)
        if not layer:
            return path
        at, gate = int(layer[1] or 0), ""
        if layer[2]:
            if (number := places[at].get(int(layer[3]))) is None:
                return None
            gate = f"attention/gates/{number}/"
        return path.replace(layer[0], prefix(origin.config, at % len(there)) + gate)

    def whole(path: str) -> tuple[int, ...]:
        """A parameter's shape with all its layers together, as it is there."""
        count, *rest = wanted[path]
        return (count * stride if path.startswith("layers/") else count, *rest)

    matched = {path: other for path in wanted if (other := their_path(path)) in theirs}
    for path, other in matched.items():
        if whole(path) != theirs[other]:
            raise ConfigError(f"train.init_from={origin.name}: {other} is {theirs[other]} there, this model's is {tuple(wanted[path])}: "
                              "give the model the settings of the one it begins with")  # fmt: skip
    if not matched:
        raise ConfigError(f"train.init_from={origin.name}: none of its {len(theirs)} parameters has a place in this model")
    return Matched(matched, [p for p in wanted if p not in matched], sorted(theirs.keys() - set(matched.values())))


def prefix(config: TransformerConfig, number: int) -> str:
    """How the paths of a layer of the period begin."""
    return f"layers/{number}/" if config.pattern else "layers/"


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
    found, there = match(config, {path_string(path): leaf.shape for path, leaf in leaves}, origin), len(origin.config.period)

    def one(path, leaf):
        theirs = found.matched.get(path_string(path))
        if theirs is None:
            return leaf
        read, layer = origin.params[theirs], re.match(LAYER, path_string(path))
        start, stride = (int(layer[1] or 0) // there, len(config.period) // there) if layer else (0, 1)

        def part(index: tuple[slice, ...]) -> np.ndarray:
            if stride > 1:  # row i of a layer of the pattern is layer start + i stride of the stack there
                rows = range(leaf.shape[0])[index[0]]
                index = (slice(start + rows.start * stride, start + rows.stop * stride, stride), *index[1:])
            return np.asarray(read[index], leaf.dtype)

        return jax.make_array_from_callback(leaf.shape, leaf.sharding, part)

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
    for at, layer in enumerate(config.period):
        for number, spec in enumerate(layer.gate_specs):
            where = f"{prefix(config, at)}attention/gates/{number}/"
            if any(path.startswith(where) for path in found.new) and not gates.is_identity(spec):
                changed.append(str(spec))
    if changed:
        say(f"  WARNING      the new gates {', '.join(dict.fromkeys(changed))} change the model from its first step; "
            "an identity start (2 sigmoid from zero) does not: g1:scale=2:zeros")  # fmt: skip
    ours, theirs = (flatten(to_mapping(model)) for model in (config, origin.config))
    for key, value in ours.items():
        if key not in ("gates", "dtype", "remat", "kernel", "init_std") and value != theirs.get(key):
            say(f"               model.{key} was {theirs.get(key)!r} there and is {value!r} here")
