"""Per-head statistics of a forward pass: gate sparsity, where attention goes, and the size of the residual stream."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from gatedattn.transformer import Transformer


def documents_start(segment_ids: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """Where a document (a segment of a packed row) begins."""
    return jnp.concatenate([jnp.ones_like(segment_ids[:, :1], bool), segment_ids[:, 1:] != segment_ids[:, :-1]], axis=1)


def _mean(x: Float[Array, "B T *M"], weight: Bool[Array, "B T"]) -> Float[Array, "*M"]:
    return jnp.einsum("bt...,bt->...", x, weight.astype(x.dtype)) / jnp.maximum(weight.sum(), 1)


def measure(
    model: Transformer,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    *,
    query_mask: Bool[Array, "B T"] | None = None,
) -> dict:
    """One forward pass, watched. All results float32, with a leading L; padding (segment 0) is never counted.

        bos_share           [L, N]  mean over queries (a document's first token left out) of the attention probability on the
                                    first token of the query's document
        attention_self      [L, N]  the same mean of the probability on the query's own token
        attention_previous  [L, N]  the same mean of the probability on the token before it
        gates               {spec: {"mean", "below_0.1", "above_0.9"}}, each [L, M]: mean gate score over tokens (and channels),
                                    share of scores under 0.1 and over 0.9; M heads, 1 if the heads share a score
        activation_max      [L]     largest |residual stream| after the block

    No T x T map is made: the attention kernel runs once more with an indicator of the first token in place of the values, so its
    output is the attention mass; the other two shares are exp(score - lse) of single pairs. Probability that a learned sink or a
    softmax-off-by-one takes belongs to no token, so it lowers all three.

    Args:
        segment_ids: packed documents; by default each row is one.
        query_mask: average attention over these queries only (Bigram-Backcopy: the non-trigger ones).
    """
    if segment_ids is None:
        segment_ids = jnp.ones_like(tokens)
    first = documents_start(segment_ids)
    real = segment_ids != 0
    queries = real & ~first if query_mask is None else real & ~first & query_mask
    probe = functools.partial(_probe, first=first, real=real, queries=queries)
    return model.hidden(tokens, positions, segment_ids, probe=probe)[1]["probe"]


def _probe(kind: str, *, first, real, queries, **captured) -> dict:
    if kind == "block":
        return {"activation_max": jnp.abs(jnp.where(real[..., None], captured["x"], 0)).max().astype(jnp.float32)}

    q, k, lse, kept = (captured[name] for name in ("q", "k", "lse", "kept"))
    lse = lse.swapaxes(1, 2)  # [B, T, N]
    kept = jnp.ones_like(lse) if kept is None else kept[..., 0]

    def share(mass):
        return _mean((mass * kept).astype(jnp.float32), queries)

    # float32 indicators would be multiplied by probabilities rounded to the values' dtype: give the kernel float32 throughout.
    wide = jnp.promote_types(q.dtype, jnp.float32)
    indicator = jnp.broadcast_to(first[..., None, None], (*first.shape, k.shape[2], 1)).astype(wide)
    on_first = captured["attend"](q.astype(wide), k.astype(wide), indicator)[0][..., 0]

    keys = jnp.repeat(k, q.shape[2] // k.shape[2], axis=2).astype(wide)
    previous = jnp.pad(keys, ((0, 0), (1, 0), (0, 0), (0, 0)))[:, :-1]
    scale = q.shape[-1] ** -0.5

    def on(key):
        return jnp.exp(scale * jnp.einsum("btnh,btnh->btn", q.astype(wide), key) - lse)

    result = {
        "bos_share": share(on_first),
        "attention_self": share(on(keys)),
        "attention_previous": share(
            on(previous)
        ),  # queries leave out first tokens, so the token before is of the same document
    }
    if captured["scores"]:
        result["gates"] = {
            spec: _gate_statistics(score, captured["q"].shape, real) for spec, score in captured["scores"].items()
        }
    return result


def _gate_statistics(
    score: Float[Array, "..."], shape: tuple[int, ...], real: Bool[Array, "B T"]
) -> dict[str, Float[Array, " M"]]:
    if score.ndim <= 2:  # an input-independent table, without [B, T]
        score = jnp.broadcast_to(score, (*shape[:2], *score.shape))
    if score.ndim == 3:  # g5: [B, T, D], no heads
        score = score[:, :, None]
    return {
        "mean": _mean(score.mean(-1), real),
        "below_0.1": _mean((score < 0.1).mean(-1, dtype=jnp.float32), real),
        "above_0.9": _mean((score > 0.9).mean(-1, dtype=jnp.float32), real),
    }
