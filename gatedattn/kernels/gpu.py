"""Attention kernels for GPUs that others keep: cuDNN's, JAX's Pallas-Triton one, and tokamax."""

from __future__ import annotations

import functools
import math
import warnings

import jax
import jax.numpy as jnp

TILE = 128  # queries and keys per tile of the Triton kernel; lengths are padded to a multiple


def _pad_channels(v, H):
    """A probe's few value channels, as many as the keys have: these kernels know one head size."""
    return jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, H - v.shape[-1])))


def cudnn(q, k, v, *, segment_ids=None, window=0, scale):
    """cuDNN's flash attention through `jax.nn.dot_product_attention`. Its public interface has no segment ids."""
    assert segment_ids is None
    out = jax.nn.dot_product_attention(
        q,
        k,
        _pad_channels(v, q.shape[-1]),
        scale=scale,
        is_causal=True,
        local_window_size=(window - 1, 0) if window else None,
        implementation="cudnn",
    )
    return out[..., : v.shape[-1]], None


def tokamax(q, k, v, *, segment_ids=None, window=0, scale):
    """tokamax's best kernel for the GPU at hand. Documents and window are a mask, one byte per pair of tokens."""
    from tokamax import dot_product_attention

    from gatedattn.kernels.reference import visible

    mask = None if segment_ids is None and not window else visible(k.shape[1], segment_ids, window)[:, None]
    return dot_product_attention(q, k, v, mask=mask, scale=scale, is_causal=mask is None), None


def triton(q, k, v, *, segment_ids=None, window=0, scale, interpret=False):
    """`jax.experimental.pallas.ops.gpu.attention.mha`: segment ids, no window. KV heads are repeated: it knows no groups."""
    assert not window
    T, N, H = q.shape[1:]
    pad = -T % TILE  # padded keys come after every real query, so the causal order hides them
    k, v_ = (jnp.repeat(x, N // k.shape[2], axis=2) for x in (k, _pad_channels(v, H)))
    q, k, v_ = (jnp.pad(x, ((0, 0), (0, pad), (0, 0), (0, 0))) for x in (q, k, v_))
    if segment_ids is not None:
        segment_ids = jnp.pad(segment_ids, ((0, 0), (0, pad)))
    settings = (scale, interpret)
    out = _mha(settings, False, q, k, v_, segment_ids)
    lse = _log_sum_exp(settings, q, k, v_, segment_ids)
    return out[:, :T, :, : v.shape[-1]], lse[..., :T]


def _mha(settings, residuals, q, k, v, segment_ids):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer JAX recommends tokamax, which cannot do this without a mask
        from jax.experimental.pallas.ops.gpu import attention as pallas

    scale, interpret = settings
    sizes = pallas.BlockSizes(TILE, TILE // 2, *(TILE // 2,) * 4)
    options = (scale, True, sizes, "triton", None, 2, None, interpret, False, residuals)
    return pallas.mha(q, k, v, segment_ids, *options)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _log_sum_exp(settings, q, k, v, segment_ids):
    return math.log(2) * _mha(settings, True, q, k, v, segment_ids)[1]


def _refuse(settings, saved, cotangent):
    raise NotImplementedError("the Triton kernel's log-sum-exp has no gradient: use kernel='chunked'")


_log_sum_exp.defvjp(lambda *arguments: (_log_sum_exp(*arguments), None), _refuse)
