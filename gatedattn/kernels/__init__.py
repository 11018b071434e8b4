"""Attention behind one call. Each implementation has a row in `CAPABILITIES`; what a row cannot do is refused, never dropped."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import warnings

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from gatedattn.kernels import context
from gatedattn.kernels.prefix import Prefix, join, log_sum_exp
from gatedattn.kernels.weights import KINDS, SOFTMAX, Weights
from gatedattn.sharding import division, map_shards, platform

SAVED = "attn"  # what a rematerialisation policy may keep by name: an attention kernel's output and log-sum-exp


@dataclasses.dataclass(frozen=True)
class Capability:
    """What an attention implementation can do."""

    call: str  # module:function in gatedattn.kernels
    platforms: tuple[str, ...] = ()  # empty: any
    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32")
    segment_ids: bool = True  # packed documents do not see each other
    window: bool = True
    weights: tuple[str, ...] = ("softmax",)
    selected: bool = False  # each query its own choice of blocks of keys
    sinks: str = "lse"  # kernel: sink logits inside it; lse: through a log-sum-exp that has a gradient; "": none
    lse: bool = True  # returns its log-sum-exp; otherwise the chunked kernel computes it, where one is asked for
    context: int = 0  # queries spread over the mesh axis `context`, each device's a multiple of this; 0: not
    head_dim: tuple[int, int] = (1, 0)  # a multiple of the first, at most the second (0: any)
    saved: bool = False  # names what it returns `SAVED`
    memory: str = "T"
    requires: str = ""  # a package


CAPABILITIES = {
    "reference": Capability(
        "reference:attention", dtypes=("bfloat16", "float16", "float32", "float64"), weights=KINDS, selected=True, context=1, saved=True,
        memory="T x T",
    ),
    "chunked": Capability(
        "chunked:attention", dtypes=("bfloat16", "float16", "float32", "float64"), weights=KINDS, selected=True, context=1, saved=True
    ),
    "splash": Capability(
        "splash:attention", ("tpu",), ("bfloat16", "float32"), sinks="kernel", context=128, head_dim=(8, 0), saved=True
    ),
    "cudnn": Capability(
        "gpu:cudnn", ("gpu",), ("bfloat16", "float16"), segment_ids=False, sinks="", lse=False, head_dim=(8, 128)
    ),
    "triton": Capability("gpu:triton", ("gpu",), window=False, sinks="", head_dim=(16, 256)),
    "tokamax": Capability("gpu:tokamax", ("gpu",), sinks="", lse=False, memory="T x T mask", requires="tokamax"),
}  # fmt: skip
PREFERRED = {"tpu": ("splash", "chunked"), "gpu": ("cudnn", "triton", "chunked")}  # by "auto", the first that can


@dataclasses.dataclass(frozen=True)
class Request:
    """What is asked of an implementation; the defaults ask nothing."""

    platform: str = ""
    dtype: str = ""
    head_dim: int = 0
    segment_ids: bool = False
    window: int = 0
    sinks: bool = False
    prefix: bool = False
    weights: str = "softmax"
    selected: bool = False
    context: int = 1
    seq_len: int = 0


def refusal(kernel: str, request: Request) -> str:
    """Why `kernel` cannot do what is asked, or an empty string."""
    row = CAPABILITIES[kernel]
    multiple, most = row.head_dim
    if row.platforms and request.platform not in ("", *row.platforms):
        return f"runs on {', '.join(row.platforms)}, not on {request.platform}"
    if row.requires and not importlib.util.find_spec(row.requires):
        return f"needs the package {row.requires}, which is not installed"
    if request.dtype and request.dtype not in row.dtypes:
        return f"computes in {', '.join(row.dtypes)}, not in {request.dtype}"
    if request.segment_ids and not row.segment_ids:
        return "cannot keep packed documents apart"
    if request.window and not row.window:
        return f"has no window (model.window={request.window})"
    if request.weights not in row.weights:
        return f"has no {request.weights} attention"
    if request.sinks and request.weights != "softmax":
        return f"has no sink logits in {request.weights} attention: they belong in a softmax"
    if request.sinks and not row.sinks:
        return "has no sink logits"
    if request.prefix and (row.sinks != "lse" or request.weights != "softmax"):
        return "has no gradient for the log-sum-exp by which register tokens join in (model.registers)"
    if request.selected and not row.selected:
        return "cannot give each query its own choice of blocks (model.nsa)"
    if request.context > 1 and request.selected:
        return f"cannot spread a sequence over devices (mesh.context={request.context}) where queries choose blocks (model.nsa)"
    if request.context > 1 and not row.context:
        return f"cannot spread a sequence over devices (mesh.context={request.context})"
    if request.context > 1 and request.seq_len % (row.context * request.context):
        return f"spreads only multiples of {row.context * request.context} tokens over {request.context} devices, not {request.seq_len}"
    if request.head_dim % multiple or request.head_dim > (most or request.head_dim):
        return f"takes head sizes that are multiples of {multiple}{f' up to {most}' if most else ''}, not {request.head_dim}"
    return ""


def choose(kernel: str, request: Request) -> tuple[str, list[str]]:
    """The implementation that `kernel` means, and which better ones "auto" had to pass over, and why.

    Raises `ValueError` for an unknown name, or one that cannot do what is asked.
    """
    if kernel == "auto":
        passed = []
        for name in PREFERRED.get(request.platform, ("chunked",)):
            if not (reason := refusal(name, request)):
                return name, passed
            passed.append(f"{name} {reason}")
        raise ValueError(f"kernel='auto' finds none that can: {'; '.join(passed)}")
    if kernel not in CAPABILITIES:
        raise ValueError(f"kernel={kernel!r}: must be auto or one of {', '.join(CAPABILITIES)}")
    if reason := refusal(kernel, request):
        raise ValueError(f"kernel={kernel!r} {reason}: use auto")
    return kernel, []


def resolve(kernel: str = "auto", platform: str | None = None) -> str:
    """The implementation that `kernel` means on this platform, for a plain request."""
    return choose(kernel, Request(platform or jax.default_backend()))[0]


@functools.cache
def _load(call: str):
    module, name = call.split(":")
    return getattr(importlib.import_module(f"gatedattn.kernels.{module}"), name)


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K C"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    window: int = 0,
    scale: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    prefix: Prefix | None = None,
    weights: Weights = SOFTMAX,
    selected: tuple[Bool[Array, "B K T J"], int] | None = None,
    kernel: str = "auto",
    interpret: bool = False,
) -> tuple[Float[Array, "B T N C"], Float[Array, "B N T"]]:
    """Causal grouped-query attention over packed documents.

        out[t, n] = sum_s p[n, t, s] v[s, n // G],    p = softmax_s(scale q[t, n] . k[s, n // G])

    over the keys s <= t of t's own segment and, with `window` > 0, among the last `window` tokens (t's own included). `scale` is
    1/sqrt(H) by default. `sinks`: a logit per head that joins the softmax and takes its share of p. `prefix`: keys and values,
    [m, K, H] and [m, K, C], that every query sees as well, whatever its document and window. `weights`: what stands in the softmax's
    place. `selected`: which of the blocks of so many keys a query sees at all, one choice for the query heads of a KV head; its own
    block must be among them.

    Also returns the log-sum-exp of the scores (without sinks and prefix), float32 (float64 for float64 inputs); for other weights their
    `log_total`. It is differentiable if the kernel's row says `sinks="lse"`; elsewhere its gradient is refused.

    Under a mesh each device attends within its own sequences and KV heads. Over the mesh axis `context` the queries are divided,
    and keys and values gathered; if they divide evenly the queries are rearranged so that all devices have the same work.

    Args:
        kernel: "auto", the best for the platform of the mesh's devices, or a name in `CAPABILITIES`. What "auto" passes over is
            announced by a warning; a named kernel that cannot do what is asked raises `ValueError`.
        interpret: run a Pallas kernel's program step by step on any platform, for tests.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    segment_ids = None if segment_ids is None else jnp.asarray(segment_ids)
    T, axes = q.shape[1], division("T", q.shape[1])
    count = jax.sharding.get_abstract_mesh().shape[axes[0]] if axes else 1
    request = Request(
        platform="" if interpret else platform(), dtype=str(q.dtype), head_dim=q.shape[-1], segment_ids=segment_ids is not None,
        window=window, sinks=sinks is not None, prefix=prefix is not None,
        weights=weights.kind, selected=selected is not None, context=count, seq_len=T,
    )  # fmt: skip
    chosen, passed = choose(kernel, request)
    if passed:
        warnings.warn(f"attention: {chosen} in use; {'; '.join(passed)}", stacklevel=2)
    row = CAPABILITIES[chosen]
    options: dict = {"window": window, "scale": scale}
    options |= {"name": SAVED} if row.saved else {}
    options |= {"interpret": True} if interpret else {}
    options |= {} if weights == SOFTMAX else {"weights": weights}

    def attend(q, k, v, segment_ids, sinks, keys, values, choice=None, **shard):
        inside = {"sinks": sinks} if row.sinks == "kernel" else {}
        inside |= {} if choice is None else {"selected": (choice, selected[1])}
        out, lse = _load(row.call)(q, k, v, segment_ids=segment_ids, **options, **inside, **shard)
        if lse is None:
            chunked = _load(CAPABILITIES["chunked"].call)
            lse = chunked(q, k, v[..., :1], segment_ids=segment_ids, window=window, scale=scale)[1]
        total = lse
        if keys is not None:
            out, total = join(q, out, lse, (keys, values), scale)
        return add_sinks(out, total, sinks) if sinks is not None and "sinks" not in inside else out, lse

    def spread(q, k, v, segment_ids, *rest):
        axis = axes[0]
        balanced = (T // count) % (2 * row.context) == 0
        k, v, segment_ids = (context.gather(x, axis) for x in (k, v, segment_ids))
        q = context.balance(q, 1, axis, count) if balanced else q
        out, lse = attend(q, k, v, segment_ids, *rest, shard=context.Shard(lax.axis_index(axis), count, balanced))
        return (context.restore(out, 1, axis, count), context.restore(lse, 2, axis, count)) if balanced else (out, lse)

    # Sequences and KV heads do not mix; tokens do, and `spread` sees to it.
    letters = ("BTK.", "BTK.", "BTK.", "BT", "K", ".K.", ".K.", "BKT.")
    arrays = (q, k, v, segment_ids, sinks, *(prefix or (None, None)), None if selected is None else selected[0])
    return map_shards(spread if axes else attend, arrays, letters, ("BTK.", "BKT"))


def kept(lse: Float[Array, "B N T"], other: Float[Array, "#B N #T"]) -> Float[Array, "B T N 1"]:
    """The share of attention that is left to keys of log-sum-exp `lse` by others: sink logits [N, 1], a prefix."""
    return jax.nn.sigmoid(lse - other.astype(lse.dtype)).swapaxes(1, 2)[..., None]


def add_sinks(out: Float[Array, "B T N C"], lse: Float[Array, "B N T"], sinks: Float[Array, " N"]) -> Float[Array, "B T N C"]:
    """What attention would return if the sink logits had been in its softmax: exact."""
    return (out * kept(lse, sinks[:, None])).astype(out.dtype)


def taken(
    q: Float[Array, "B T N H"], sinks: Float[Array, " N"] | None, prefix: Prefix | None, scale: float
) -> Float[Array, "#B N #T"] | None:
    """The log-sum-exp of what is no token's: sink logits and prefix; None without either."""
    logs = [] if sinks is None else [sinks[:, None]]
    logs += [] if prefix is None else [log_sum_exp(q, prefix[0], scale)]
    return functools.reduce(jnp.logaddexp, logs) if logs else None
