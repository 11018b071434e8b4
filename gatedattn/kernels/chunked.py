"""Attention in blocks of queries and keys with an online softmax (arXiv 2112.05682, 2205.14135), in plain XLA.

Runs on any platform, never holds a T x T array, skips blocks that the causal order or the window hides, and recomputes the
scores in the backward pass. Queries of one KV group are folded into rows, [B*K, G*block, H] against [B*K, block, H], so that keys
are not repeated and every product is a 3-d batched one (XLA's CPU back end is slow at 4-d ones).
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

BLOCK = 512
HIDDEN = -1e30  # score of a hidden key; finite, so that a block without visible keys gives exp(-inf) = 0 rather than NaN


def attention(q, k, v, *, segment_ids=None, window=0, scale, block=None):
    """See `gatedattn.kernels.attention`."""
    B, T, N, H = q.shape
    K, V = k.shape[2], v.shape[3]
    block = min(block or BLOCK, T)
    pad = -T % block  # padded keys come after every real query, so the causal order hides them
    if segment_ids is None:
        segment_ids = jnp.zeros((B, T), jnp.int32)
    segment_ids = jnp.pad(segment_ids, ((0, 0), (0, pad)))
    blocks = (T + pad) // block

    def split(x, heads):  # [B, T, K * heads, h] -> [blocks, B*K, heads * block, h]
        x = jnp.pad(x, ((0, 0), (0, pad), (0, 0), (0, 0))).reshape(B, blocks, block, K, heads, x.shape[-1])
        return x.transpose(1, 0, 3, 4, 2, 5).reshape(blocks, B * K, heads * block, x.shape[-1])

    G = N // K
    segments = segment_ids.reshape(B, blocks, block).swapaxes(0, 1)
    out, lse = _attention(split(q, G), split(k, 1), split(v, 1), segments, scale, window)
    out = out.reshape(blocks, B, K, G, block, V).transpose(1, 0, 4, 2, 3, 5).reshape(B, T + pad, N, V)
    lse = lse.reshape(blocks, B, K, G, block).transpose(1, 2, 3, 0, 4).reshape(B, N, T + pad)
    return out[:, :T], lse[:, :, :T]


def _scores(q, k, segment_q, segment_k, i, j, scale, window):
    """Masked scores [Z, G*block, block] of query block i against key block j, in at least float32."""
    B, block = segment_q.shape
    s = scale * jnp.einsum("zqh,zkh->zqk", q, k, preferred_element_type=jnp.promote_types(q.dtype, jnp.float32))
    ahead = (i - j) * block + jnp.arange(block)[:, None] - jnp.arange(block)[None, :]  # how far key s lies behind query t
    mask = (ahead >= 0) & (segment_q[:, :, None] == segment_k[:, None, :])
    if window:
        mask &= ahead < window
    return jnp.where(mask[:, None, None], s.reshape(B, -1, q.shape[1] // block, block, block), HIDDEN).reshape(s.shape)


def _reach(window: int, block: int, blocks: int) -> int:
    """How many key blocks before a query's own its window touches."""
    return min(math.ceil((window - 1) / block), blocks - 1) if window else blocks - 1


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attention(q, k, v, segments, scale, window):
    return _forward(q, k, v, segments, scale, window)[0]


def _forward(q, k, v, segments, scale, window):
    blocks, Z, rows, _ = q.shape
    block = k.shape[2]
    reach = _reach(window, block, blocks)
    dtype = jnp.promote_types(q.dtype, jnp.float32)

    def query_block(i):
        def key_block(j, carry):
            top, total, acc = carry
            s = _scores(q[i], k[j], segments[i], segments[j], i, j, scale, window)
            new_top = jnp.maximum(top, s.max(-1))
            p = jnp.exp(s - new_top[..., None])
            decay = jnp.exp(top - new_top)
            acc = acc * decay[..., None] + jnp.einsum("zqk,zkh->zqh", p.astype(v.dtype), v[j], preferred_element_type=dtype)
            return new_top, total * decay + p.sum(-1), acc

        # The diagonal block first: every query sees itself there, so `top` is finite before any hidden score is met.
        start = (jnp.full((Z, rows), -jnp.inf, dtype), jnp.zeros((Z, rows), dtype), jnp.zeros((Z, rows, v.shape[-1]), dtype))
        carry = key_block(i, start)
        if blocks > 1:
            carry = lax.fori_loop(jnp.maximum(i - reach, 0), i, key_block, carry)
        top, total, acc = carry
        return (acc / total[..., None]).astype(v.dtype), top + jnp.log(total)

    out, lse = lax.map(query_block, jnp.arange(blocks)) if blocks > 1 else jax.tree.map(lambda x: x[None], query_block(0))
    return (out, lse), (q, k, v, segments, out, lse)


def _backward(scale, window, saved, cotangents):
    q, k, v, segments, out, lse = saved
    dout, dlse = cotangents
    blocks, block = q.shape[0], k.shape[2]
    reach = _reach(window, block, blocks)
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    delta = jnp.einsum("bzqh,bzqh->bzq", dout, out, preferred_element_type=dtype) - dlse

    def key_block(dq, j):
        def query_block(i, carry):
            dq, dk, dv = carry
            p = jnp.exp(_scores(q[i], k[j], segments[i], segments[j], i, j, scale, window) - lse[i][..., None])
            dp = jnp.einsum("zqh,zkh->zqk", dout[i], v[j], preferred_element_type=dtype)
            ds = (p * (dp - delta[i][..., None]) * scale).astype(q.dtype)
            dv += jnp.einsum("zqk,zqh->zkh", p.astype(q.dtype), dout[i], preferred_element_type=dtype)
            dk += jnp.einsum("zqk,zqh->zkh", ds, q[i], preferred_element_type=dtype)
            return dq.at[i].add(jnp.einsum("zqk,zkh->zqh", ds, k[j], preferred_element_type=dtype)), dk, dv

        carry = (dq, jnp.zeros(k.shape[1:], dtype), jnp.zeros(v.shape[1:], dtype))
        if blocks > 1:
            dq, dk, dv = lax.fori_loop(j, jnp.minimum(j + reach + 1, blocks), query_block, carry)
        else:
            dq, dk, dv = query_block(0, carry)
        return dq, (dk.astype(k.dtype), dv.astype(v.dtype))

    dq = jnp.zeros(q.shape, dtype)
    if blocks > 1:
        dq, (dk, dv) = lax.scan(key_block, dq, jnp.arange(blocks))
    else:
        dq, (dk, dv) = key_block(dq, 0)
        dk, dv = dk[None], dv[None]
    return dq.astype(q.dtype), dk, dv, None


_attention.defvjp(_forward, _backward)
