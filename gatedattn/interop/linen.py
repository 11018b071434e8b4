"""The layers as Linen modules, for models that are written in Linen.

    from gatedattn.interop.linen import GatedAttention

    attn = GatedAttention(num_heads=8, num_kv_heads=2, head_dim=64, d_model=512, gates="g1")
    variables = attn.init(key, x)                    # {"params": {"query": {"kernel": ...}, ..., "gates": {"0": {"kernel": ...}}}}
    y, aux = attn.apply(variables, x)

Each takes the arguments of the NNX module of the same name in `gatedattn.layers` (but for `rngs`), holds the same parameters under
the same paths, and returns the same results: aux is returned, not sown. `(y, aux)` is also what `nn.scan` wants of a layer:

    Layers = nn.scan(GatedAttentionBlock, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=nn.broadcast, length=L)

`flax.nnx.bridge.to_linen` would do, but it draws (and throws away) random parameters at every `apply` and keys lists by integers.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
from flax import linen, nnx
from jaxtyping import PyTree

from gatedattn import layers
from gatedattn.config import MoEConfig, TransformerConfig

AnyModule = TypeVar("AnyModule", bound=nnx.Module)


def params_of(module: nnx.Module) -> dict[str, Any]:
    """The parameters of an NNX module as Linen holds them: nested dicts with string keys (the "params" collection)."""
    return _by_name(nnx.to_pure_dict(nnx.state(module, nnx.Param)))


def with_params(module: AnyModule, params: Mapping[str, Any]) -> AnyModule:
    """A copy of an NNX module that holds the parameters of its Linen sibling. Raises `ValueError` if the paths differ."""
    graphdef, state = nnx.split(module)
    nnx.replace_by_pure_dict(state, _by_key(nnx.to_pure_dict(state), params))
    return nnx.merge(graphdef, state)


def _by_name(tree: PyTree) -> PyTree:
    return {str(key): _by_name(value) for key, value in tree.items()} if isinstance(tree, Mapping) else tree


def _by_key(like: PyTree, params: PyTree, path: str = "") -> PyTree:
    """`params` with the keys of `like`, where an item of a list has a number rather than its name."""
    if not isinstance(like, Mapping):
        return params
    if {str(key) for key in like} != set(params):
        raise ValueError(f"parameters {sorted(params)} at {path or 'the top'} do not fit the module's {sorted(map(str, like))}")
    return {key: _by_key(value, params[str(key)], f"{path}/{key}") for key, value in like.items()}


class _Linen(linen.Module):
    """What the modules below share: parameters in Linen's hands, the computation in NNX's."""

    nnx_class: ClassVar[type[nnx.Module]]

    def _build(self, rngs: nnx.Rngs) -> nnx.Module:
        mine = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("parent", "name")}
        known = inspect.signature(self.nnx_class.__init__).parameters
        options = {name: value for name, value in mine.items() if value is not None or name in known}
        return self.nnx_class(**options, **({"rngs": rngs} if "rngs" in known else {}))

    @linen.compact
    def __call__(self, *args, **kwargs):
        graphdef, state = nnx.split(nnx.eval_shape(lambda: self._build(nnx.Rngs(0))))
        abstract = nnx.to_pure_dict(state)
        shapes = _by_name(abstract)
        if self.is_mutable_collection("params") and not all(self.has_variable("params", name) for name in shapes):
            start = params_of(self._build(nnx.Rngs(self.make_rng("params"))))
        else:  # `param` only compares shapes then
            start = None

        def first(_, name):
            return jax.tree.map(lambda p: jnp.zeros(p.shape, p.dtype), shapes[name]) if start is None else start[name]

        params = {name: self.param(name, first, name) for name in shapes}
        nnx.replace_by_pure_dict(state, _by_key(abstract, params))
        return nnx.merge(graphdef, state)(*args, **kwargs)


def _sibling(nnx_class: type[nnx.Module], config_class: type | None = None) -> type[linen.Module]:
    """The Linen class of an NNX class: a dataclass whose fields are the arguments of the constructor, defaults included.

    Where the constructor takes the fields of `config_class` as keywords, they are fields here too; None stands for their default.
    """
    namespace: dict[str, Any] = {"__annotations__": {}, "__module__": __name__, "nnx_class": nnx_class}
    namespace["__annotations__"]["nnx_class"] = "ClassVar"

    def add(name, annotation, **options):
        namespace["__annotations__"][name] = annotation
        namespace[name] = dataclasses.field(**options)

    for name, parameter in list(inspect.signature(nnx_class.__init__).parameters.items())[1:]:
        if parameter.kind is parameter.VAR_KEYWORD:
            for f in dataclasses.fields(config_class):
                if f.name not in namespace:
                    add(f.name, f"{f.type} | None", default=None, kw_only=True)
        elif name != "rngs":
            options: dict[str, Any] = {"kw_only": parameter.kind is parameter.KEYWORD_ONLY}
            if parameter.default is not parameter.empty:
                options["default"] = parameter.default
            add(name, Any if parameter.annotation is parameter.empty else parameter.annotation, **options)
    namespace["__doc__"] = f"`gatedattn.layers.{nnx_class.__name__}` in Linen.\n\n{nnx_class.__doc__}"
    return type(nnx_class.__name__, (_Linen,), namespace)


Gate = _sibling(layers.Gate)
GatedAttention = _sibling(layers.GatedAttention)
GatedAttentionBlock = _sibling(layers.GatedAttentionBlock, TransformerConfig)
MLP = _sibling(layers.MLP)
MoE = _sibling(layers.MoE, MoEConfig)
RMSNorm = _sibling(layers.RMSNorm)
