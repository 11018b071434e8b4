"""Attention behind one call. Each implementation has a row in `CAPABILITIES`; what a row cannot do is refused, never dropped."""

from __future__ import annotations

import dataclasses

import jax
from jaxtyping import Array, Float, Int

from gatedattn.kernels import chunked, reference
from gatedattn.sharding import map_shards


@dataclasses.dataclass(frozen=True)
class Capability:
    """What an attention implementation can do. `lse`: returns the log-sum-exp, which sinks and probes need."""

    call: object
    platforms: tuple[str, ...]  # empty: any
    segment_ids: bool
    window: bool
    lse: bool
    memory: str


CAPABILITIES = {
    "reference": Capability(reference.attention, (), segment_ids=True, window=True, lse=True, memory="T x T"),
    "chunked": Capability(chunked.attention, (), segment_ids=True, window=True, lse=True, memory="T"),
}


def resolve(kernel: str = "auto", platform: str | None = None) -> str:
    """The implementation that `kernel` means on this platform; "auto" picks the best.

    Raises `ValueError` for an unknown name, or one that does not run on the platform.
    """
    if kernel == "auto":
        return "chunked"
    if kernel not in CAPABILITIES:
        raise ValueError(f"kernel={kernel!r}: must be auto or one of {', '.join(CAPABILITIES)}")
    platforms = CAPABILITIES[kernel].platforms
    platform = platform or jax.default_backend()
    if platforms and platform not in platforms:
        raise ValueError(f"kernel={kernel!r} runs on {', '.join(platforms)}, not on {platform}: use auto")
    return kernel


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K C"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    window: int = 0,
    scale: float | None = None,
    kernel: str = "auto",
) -> tuple[Float[Array, "B T N C"], Float[Array, "B N T"]]:
    """Causal grouped-query attention over packed documents.

        out[t, n] = sum_s p[n, t, s] v[s, n // G],    p = softmax_s(scale q[t, n] . k[s, n // G])

    over the keys s <= t of t's own segment and, with `window` > 0, among the last `window` tokens (t's own included). `scale` is
    1/sqrt(H) by default. Also returns the log-sum-exp of the scores, float32 (float64 for float64 inputs): with it a sink logit c
    in the softmax is exactly the factor sigmoid(lse - c) on the output. Both results are differentiable.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    implementation = CAPABILITIES[resolve(kernel)]

    def call(q, k, v, segment_ids):
        return implementation.call(q, k, v, segment_ids=segment_ids, window=window, scale=scale)

    # Sequences and KV heads do not mix: each device attends within its own, over the whole length.
    return map_shards(call, (q, k, v, segment_ids), ("B.K.", "B.K.", "B.K.", "B."), ("B.K.", "BK."))
