"""Attention in blocks of queries and keys with an online softmax (arXiv 2112.05682, 2205.14135), or other weights, in plain XLA.

Runs on any platform, never holds a T x T array, skips blocks that the causal order or the window hides, and recomputes the
scores in the backward pass. Queries of one KV group are folded into rows, [B*K, G*block, H] against [B*K, block, H], so that keys
are not repeated and every product is a 3-d batched one (XLA's CPU back end is slow at 4-d ones).
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from gatedattn.kernels.context import WHOLE, Shard
from gatedattn.kernels.weights import HIDDEN, SOFTMAX, Weights

BLOCK = 256  # tokens; of rows of 512 tokens and less, half of that: 0.63 of all scores are computed then, not 0.75


def attention(
    q, k, v, *, segment_ids=None, window=0, scale, shard: Shard = WHOLE, name=None, block=None, weights: Weights = SOFTMAX,
    selected=None,
):  # fmt: skip
    """See `gatedattn.kernels.attention`."""
    B, T, N, H = q.shape
    S, K, V = v.shape[1:]
    if shard.count == 1:
        block = min(block or (BLOCK if T > 512 else BLOCK // 2), T)
    else:  # blocks of queries must begin where blocks of keys do
        run = T // 2 if shard.balanced else T
        block = next(b for b in range(min(block or BLOCK, run), 0, -1) if run % b == 0)
    pad = -T % block  # padded keys come after every real query, so the causal order hides them
    if segment_ids is None:
        segment_ids = jnp.zeros((B, S), jnp.int32)

    def split(x, heads):  # [B, S, K * heads, h] -> [blocks, B*K, heads * block, h]
        x = jnp.pad(x, ((0, 0), (0, pad), (0, 0), (0, 0)))
        x = x.reshape(B, -1, block, K, heads, x.shape[-1])
        return x.transpose(1, 0, 3, 4, 2, 5).reshape(-1, B * K, heads * block, x.shape[-1])

    G = N // K
    segments = jnp.pad(segment_ids, ((0, 0), (0, pad))).reshape(B, -1, block).swapaxes(0, 1)
    starts = shard.positions(T + pad)[::block] // block  # the block of keys at which each block of queries stands
    choice, size = selected or (None, 0)
    if choice is not None:  # [B, K, T, J] -> [blocks, B, K, block, J]
        choice = jnp.pad(choice, ((0, 0), (0, 0), (0, pad), (0, 0)))
        choice = jnp.moveaxis(choice.reshape(B, K, -1, block, choice.shape[-1]), 2, 0)
    out, lse = _attention(split(q, G), split(k, 1), split(v, 1), segments, choice, starts, scale, (window, size), name, weights)
    out = out.reshape(-1, B, K, G, block, V).transpose(1, 0, 4, 2, 3, 5).reshape(B, T + pad, N, V)
    lse = lse.reshape(-1, B, K, G, block).transpose(1, 2, 3, 0, 4).reshape(B, N, T + pad)
    return out[:, :T], lse[:, :, :T]


def _scores(q, k, segments, choice, i, j, scale, limits):
    """Masked scores [Z, G*block, block] of query block i against key block j, in at least float32.

    `limits`: the window, and the size of the blocks among which the queries have their `choice`."""
    segment_q, segment_k, (window, size) = segments[i], segments[j], limits
    B, block = segment_q.shape
    s = scale * jnp.einsum("zqh,zkh->zqk", q, k, preferred_element_type=jnp.promote_types(q.dtype, jnp.float32))
    ahead = (i - j) * block + jnp.arange(block)[:, None] - jnp.arange(block)[None, :]  # how far key s lies behind query t
    mask = (ahead >= 0) & (segment_q[:, :, None] == segment_k[:, None, :])
    if window:
        mask &= ahead < window
    mask = mask[:, None, None]
    if choice is not None:
        chosen = jnp.take(
            choice[i], (j * block + jnp.arange(block)) // size, axis=-1, mode="clip"
        )  # clip: padding, hidden anyway
        mask &= chosen[:, :, None]
    return jnp.where(mask, s.reshape(B, -1, q.shape[1] // block, block, block), HIDDEN).reshape(s.shape)


def _reach(window: int, block: int, blocks: int) -> int:
    """How many key blocks before a query's own its window touches."""
    return min(math.ceil((window - 1) / block), blocks - 1) if window else blocks - 1


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7, 8, 9))
def _attention(q, k, v, segments, choice, starts, scale, limits, name, weights):
    return _forward(q, k, v, segments, choice, starts, scale, limits, name, weights)[0]


def _forward(q, k, v, segments, choice, starts, scale, limits, name, weights):
    queries, Z, rows, _ = q.shape
    block = k.shape[2]
    reach = _reach(limits[0], block, len(k))
    dtype = jnp.promote_types(q.dtype, jnp.float32)

    def query_block(q, i):
        def key_block(j, carry):
            top, total, acc = carry
            s = _scores(q, k[j], segments, choice, i, j, scale, limits)
            new_top = jnp.maximum(top, weights.top(s))
            p, part = weights.terms(s, new_top)
            decay = jnp.exp(top - new_top)
            acc = acc * decay[..., None] + jnp.einsum("zqk,zkh->zqh", p.astype(v.dtype), v[j], preferred_element_type=dtype)
            return new_top, total * decay + part.sum(-1), acc

        # The diagonal block first: every query sees itself there, so `top` is finite before any hidden score is met.
        start = (jnp.full((Z, rows), -jnp.inf, dtype), jnp.zeros((Z, rows), dtype), jnp.zeros((Z, rows, v.shape[-1]), dtype))
        carry = key_block(i, start)
        if len(k) > 1:
            carry = lax.fori_loop(jnp.maximum(i - reach, 0), i, key_block, carry)
        top, total, acc = carry
        total = weights.divisor(total)
        return (acc / total[..., None]).astype(v.dtype), top + jnp.log(total)

    if queries > 1:
        out, lse = lax.map(lambda block: query_block(*block), (q, starts))
    else:
        out, lse = jax.tree.map(lambda x: x[None], query_block(q[0], starts[0]))
    if name:  # what a rematerialisation policy may keep, to spare the backward pass this whole function
        out, lse = (checkpoint_name(x, name) for x in (out, lse))
    return (out, lse), (q, k, v, segments, choice, starts, out, lse)


def _backward(scale, limits, name, weights, saved, cotangents):
    q, k, v, segments, choice, starts, out, lse = saved
    dout, dlse = cotangents
    block = k.shape[2]
    reach = _reach(limits[0], block, len(k))
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    delta = jnp.einsum("bzqh,bzqh->bzq", dout, out, preferred_element_type=dtype) - dlse

    def key_block(dq, j):
        def query_block(n, carry):
            dq, dk, dv = carry
            i = starts[n]
            s = _scores(q[n], k[j], segments, choice, i, j, scale, limits)
            p = weights.of(s, lse[n])
            dp = jnp.einsum("zqh,zkh->zqk", dout[n], v[j], preferred_element_type=dtype)
            ds = (scale * weights.gradient(s, p, lse[n], dp, delta[n])).astype(q.dtype)
            dv += jnp.einsum("zqk,zqh->zkh", p.astype(q.dtype), dout[n], preferred_element_type=dtype)
            dk += jnp.einsum("zqk,zqh->zkh", ds, q[n], preferred_element_type=dtype)
            return dq.at[n].add(jnp.einsum("zqk,zkh->zqh", ds, k[j], preferred_element_type=dtype)), dk, dv

        carry = (dq, jnp.zeros(k.shape[1:], dtype), jnp.zeros(v.shape[1:], dtype))
        if len(k) > 1:  # the blocks of queries (in ascending order) that stand at block j or up to `reach` after it
            dq, dk, dv = lax.fori_loop((starts < j).sum(), (starts <= j + reach).sum(), query_block, carry)
        else:
            dq, dk, dv = query_block(0, carry)
        return dq, (dk.astype(k.dtype), dv.astype(v.dtype))

    dq = jnp.zeros(q.shape, dtype)
    if len(k) > 1:
        dq, (dk, dv) = lax.scan(key_block, dq, jnp.arange(len(k)))
    else:
        dq, (dk, dv) = key_block(dq, 0)
        dk, dv = dk[None], dv[None]
    return dq.astype(q.dtype), dk, dv, None, None, None


_attention.defvjp(_forward, _backward)
