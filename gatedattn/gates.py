"""The gate of gated attention (arXiv 2505.06708): what it is, as a value, and its mathematics, as pure functions.

A gate looks at a *source* s and acts on a tensor y at one *position* of the attention layer:

    score = scale * activation(logits),   logits = s W (+ b)            float32
    y'    = y * score   (op = multiply)   or   y + score  (op = add)

`GateSpec` says which; `init`, `scores` and `apply` do it. An attention layer takes a tuple of specs. Letters: B batch, T query
length, D model, M gated heads (N query heads or K key/value heads, by position), H head dim, I source width, and C the width of
a score (H if elementwise, 1 if headwise).
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import numbers
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from gatedattn.linear import project, project_heads

ACTIVATIONS = {
    "sigmoid": jax.nn.sigmoid,
    "silu": jax.nn.silu,
    "ns_sigmoid": lambda z: 0.5 + 0.5 * jax.nn.sigmoid(z),  # the paper's non-sparse control, range [0.5, 1]
    "tanh": jnp.tanh,
    "softplus": jax.nn.softplus,
    "identity": lambda z: z,
}
# What each field may be; the first is the default. No word stands in two rows, so a short form needs no field names.
CHOICES = {
    "position": ("g1", "g2", "g3", "g4", "g5"),
    "granularity": ("elementwise", "headwise"),
    "sharing": ("specific", "mean", "mean_logits", "shared"),
    "op": ("multiply", "add"),
    "activation": tuple(ACTIVATIONS),
    "source": ("hidden", "query", "value", "slice", "self", "none"),
    "init": ("normal", "zeros", "bias"),
}
ALIASES = {"sdpa": "g1", "value": "g2", "key": "g3", "query": "g4", "dense": "g5"}
INIT_STD = 0.02


@dataclass(frozen=True)
class GateSpec:
    """One gate, as a value.

    position     g1 SDPA output, per head, before the output projection; g2 value; g3 key; g4 query; g5 output of the dense
                 output projection. Names of the paper; sdpa, value, key, query and dense are accepted too. Gates on key and query
                 act after QK-norm and before RoPE (a headwise gate before the norm would cancel out).
    granularity  elementwise: a score per channel; headwise: one per head (g5 has no heads: one per token).
    sharing      specific: every head its own scores; mean: head-specific scores averaged over the heads (the parameters stay: the
                 paper's Table 1); mean_logits: the same average before the activation; shared: one projection for all heads (the
                 paper's section 2.2). g5 has no heads: specific only.
    op           multiply or add.
    activation   sigmoid, silu, ns_sigmoid (0.5 + 0.5 sigmoid), tanh, softplus, identity.
    source       hidden: the layer's pre-normed input, which also feeds the q, k, v projections (the paper); query: each head's own
                 query vector after QK-norm and before RoPE (g1 and g4 only); value: all value heads of the token side by side, after
                 their own gates (g1 only: value-state gating, arXiv 2510.09017); slice: each head's own D / M of the hidden channels
                 (not g5; g1:headwise:slice:bias=VALUE is the gate of arXiv 2306.12929); self: the tensor that is gated; none: a
                 learned table, independent of the input, from zero.
    scale        multiplies the activation. scale=2 with init=zeros and a sigmoid is exactly the identity at the start.
    init         normal: W ~ N(0, 0.02^2); zeros: W = 0; bias: W normal plus a learned bias that starts at `bias`.
    bias         first value of the bias (in logits) when init=bias; logit(0.25) = -1.1 opens a sigmoid by a quarter.
    in_dim       use the first `in_dim` channels of the hidden source only; 0: all.

    The short form lists the position and whatever differs from the defaults: "g1", "g1:headwise", "g2:elementwise:mean:add:silu",
    "g1:headwise:scale=2:zeros:in_dim=12". `GateSpec.parse` reads it, `str()` writes it, and the two round-trip.

    Raises:
        ValueError: a field outside its values, or a combination without meaning; the message names the field, the value and
            what is allowed.
    """

    position: str = "g1"
    granularity: str = "elementwise"
    sharing: str = "specific"
    op: str = "multiply"
    activation: str = "sigmoid"
    source: str = "hidden"
    scale: float = 1.0
    init: str = "normal"
    bias: float = 0.0
    in_dim: int = 0

    def __post_init__(self):
        if isinstance(self.position, str):
            object.__setattr__(self, "position", ALIASES.get(self.position, self.position))
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                _refuse(self, name, f"must be one of {', '.join(allowed)}" + _near(getattr(self, name), allowed))
        for name in ("scale", "bias"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
                _refuse(self, name, "must be a finite number")
            object.__setattr__(self, name, float(value))
        if self.scale <= 0:
            _refuse(self, "scale", "must be positive")
        if isinstance(self.in_dim, bool) or not isinstance(self.in_dim, numbers.Integral) or self.in_dim < 0:
            _refuse(self, "in_dim", "must be a whole number of channels, or 0 for all")
        object.__setattr__(self, "in_dim", int(self.in_dim))
        if self.position == "g5" and self.sharing != "specific":
            _refuse(self, "sharing", "position=g5 has no heads to share over: must be specific")
        if self.source == "query" and self.position not in ("g1", "g4"):
            _refuse(self, "source", f"position={self.position} has no query head of its own: must be hidden, self or none")
        if self.source == "value" and self.position != "g1":
            _refuse(
                self, "source", f"position={self.position} is not the output that values make: must be hidden, self or none"
            )
        if self.source == "slice" and not self.per_head:
            _refuse(self, "source", f"position={self.position} has no heads with a slice each: must be hidden, self or none")
        if self.in_dim and self.source != "hidden":
            _refuse(self, "in_dim", "only the hidden source can be cut to its first channels: must be 0")
        if self.bias and self.init != "bias":
            _refuse(self, "bias", f"has no effect with init={self.init}: set init=bias")
        if self.source == "none" and self.init == "normal":  # a table has no weights: it starts at zero
            object.__setattr__(self, "init", "zeros")

    @classmethod
    def parse(cls, text: str) -> GateSpec:
        """Read the short form. Raises `ValueError` for a word it does not know (with the nearest it does)."""
        if not isinstance(text, str):
            raise ValueError(f"gate {text!r}: must be a GateSpec or its short form, e.g. 'g1:headwise'")
        position, *words = text.strip().split(":")
        if position == "none":
            raise ValueError(f"gate {text!r}: 'none' stands alone and means no gate")
        fields = {"position": position}
        kinds = {word: name for name, allowed in CHOICES.items() if name != "position" for word in allowed}
        for word in words:
            name, has_value, value = word.partition("=")
            if has_value:
                if name not in ("scale", "bias", "in_dim"):
                    raise ValueError(f"gate {text!r}: unknown setting {word!r}; scale=, bias= and in_dim= take a value")
                try:
                    value = int(value) if name == "in_dim" else float(value)
                except ValueError:
                    raise ValueError(f"gate {text!r}: {word!r} needs a number") from None
                if name == "bias":  # naming a bias asks for one, unless another init was named: then the two are refused below
                    fields.setdefault("init", "bias")
            elif word in kinds:
                name, value = kinds[word], word
            elif word in ("scale", "bias", "in_dim"):
                raise ValueError(f"gate {text!r}: {word} takes a value, e.g. {word}={'12' if word == 'in_dim' else '2'}")
            else:
                raise ValueError(f"gate {text!r}: unknown word {word!r}{_near(word, kinds)}; known: {', '.join(kinds)}")
            if name in fields and not (name == "init" and fields["init"] == value):
                raise ValueError(f"gate {text!r}: {name} is given twice")
            fields[name] = value
        return cls(**fields)

    def __str__(self) -> str:
        words = [self.position]
        for f in dataclasses.fields(self)[1:]:
            value = getattr(self, f.name)
            if value == f.default or (f.name == "init" and self.source == "none" and value == "zeros"):
                continue
            if f.name == "bias" or (f.name == "init" and value == "bias" and self.bias):
                words += [f"bias={self.bias!r}"] if f.name == "bias" else []
            else:
                words.append(f"{f.name}={value!r}" if f.name in ("scale", "in_dim") else value)
        return ":".join(words)

    @property
    def per_head(self) -> bool:
        """Whether the gated tensor has heads: all positions but g5."""
        return self.position != "g5"


def _near(word, known) -> str:
    near = difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.5)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _refuse(spec: GateSpec, name: str, why: str):
    raise ValueError(f"GateSpec.{name}={getattr(spec, name)!r}: {why}")


def parse(gates: str | GateSpec | Iterable[str | GateSpec] | None) -> tuple[GateSpec, ...]:
    """The gates of a layer from any spelling: "g1+g2", a `GateSpec`, a list of either, "none" or None for no gate.

    Raises `ValueError` for an invalid spec, or for the same gate twice.
    """
    if gates is None:
        return ()
    if isinstance(gates, GateSpec):
        return (gates,)
    if not isinstance(gates, Iterable):
        raise ValueError(f"gates={gates!r}: must be a short form such as 'g1+g2', a GateSpec, a list of them, or 'none'")
    if isinstance(gates, str):
        gates = [] if gates in ("", "none") else gates.split("+")
    specs = tuple(g if isinstance(g, GateSpec) else GateSpec.parse(g) for g in gates)
    for spec in specs:
        if specs.count(spec) > 1:
            raise ValueError(f"gate {spec} is given twice in one layer")
    return specs


def format(specs: Iterable[GateSpec]) -> str:
    """The short form of a layer's gates, which `parse` reads back."""
    return "+".join(map(str, specs)) or "none"


def is_identity(spec: GateSpec) -> bool:
    """Whether a fresh gate changes nothing: its logits start at 0, and scale * activation(0) is 1 (multiply) or 0 (add)."""
    score = float(jnp.float32(spec.scale) * ACTIVATIONS[spec.activation](jnp.float32(0)))
    return spec.init == "zeros" and score == (1 if spec.op == "multiply" else 0)


def parameter_shapes(
    spec: GateSpec, d_model: int, num_heads: int, head_dim: int, value_dim: int = 0
) -> dict[str, tuple[int, ...]]:
    """Shapes of the gate's parameters. `num_heads`, `head_dim`: those of the gated tensor (K heads for g2 and g3); `value_dim`: the
    width of all value heads, K H (as many as the gated heads by default).

        hidden, value   kernel [I, M, C] (shared: [I, C])     query, self, slice   kernel [M, I, C] (shared: [I, C])
        none            table  [M, C]    (shared: [C])        init=bias            bias   [M, C]    (shared: [C])

    with I = in_dim or D (hidden), K H (value), H (query, self), D / M (slice). For g5 there are no heads: M disappears and D takes
    the place of H. Raises `ValueError` if a slice is no whole number of channels.
    """
    width = head_dim if spec.per_head else d_model
    score = (width if spec.granularity == "elementwise" else 1,)
    heads = (num_heads,) if spec.per_head and spec.sharing != "shared" else ()
    if spec.source == "none":
        return {"table": heads + score}
    if spec.source == "slice" and d_model % num_heads:
        raise ValueError(f"gate {spec}: d_model={d_model} cannot be cut into a slice for each of {num_heads} heads")
    if spec.source in ("hidden", "value"):
        width = value_dim or num_heads * head_dim if spec.source == "value" else spec.in_dim or d_model
        shapes = {"kernel": (width, *heads, *score)}
    else:
        shapes = {"kernel": (*heads, d_model // num_heads if spec.source == "slice" else width, *score)}
    if spec.init == "bias":
        shapes["bias"] = heads + score
    return shapes


def init(
    key: Array, spec: GateSpec, d_model: int, num_heads: int, head_dim: int, dtype=jnp.float32, value_dim: int = 0
) -> dict[str, Array]:
    """The gate's parameters at the start, in the shapes of `parameter_shapes`."""
    params = {}
    for name, shape in parameter_shapes(spec, d_model, num_heads, head_dim, value_dim).items():
        if name == "kernel" and spec.init != "zeros":
            params[name] = INIT_STD * jax.random.normal(key, shape, dtype)
        else:
            params[name] = jnp.full(shape, spec.bias, dtype)  # bias is 0 unless init=bias
    return params


def scores(spec: GateSpec, params: Mapping[str, Array], source: Float[Array, "B T ..."] | None) -> Float[Array, "..."]:
    """The gate's scores in float32, in a shape that broadcasts against the gated tensor.

    Args:
        source: [B, T, I] if the source is hidden or value; [B, T, M, I] if it is query, slice or self ([B, T, D] for g5); ignored if
            none. I as in `parameter_shapes`.

    Returns:
        [B, T, M, C] ([B, T, 1, C] when all heads share one score; [B, T, D] or [B, T, 1] for g5), without B and T if the source is none.
    """
    if spec.source == "none":
        logits = params["table"].astype(jnp.float32)
    else:
        kernel = params["kernel"]
        if spec.source in ("hidden", "value"):
            logits = project(source[..., : spec.in_dim or None], kernel, out_dtype=jnp.float32)
        elif spec.per_head and spec.sharing != "shared":
            logits = project_heads(source, kernel)
        else:
            logits = project(source, kernel, out_dtype=jnp.float32)
        if "bias" in params:
            logits = logits + params["bias"].astype(jnp.float32)
    if spec.per_head and spec.sharing == "shared" and spec.source in ("hidden", "value", "none"):
        logits = logits[..., None, :]  # one score for all heads
    if spec.sharing == "mean_logits":
        logits = logits.mean(-2, keepdims=True)
    score = ACTIVATIONS[spec.activation](logits)
    if spec.sharing == "mean":
        score = score.mean(-2, keepdims=True)
    return spec.scale * score


def apply(spec: GateSpec, y: Float[Array, "..."], score: Float[Array, "..."]) -> Float[Array, "..."]:
    """y * score or y + score, computed in float32 and returned in y's dtype."""
    y32 = y.astype(jnp.float32)
    return (y32 * score if spec.op == "multiply" else y32 + score).astype(y.dtype)
