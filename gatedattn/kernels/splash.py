"""JAX's splash attention for TPUs (`jax.experimental.pallas.ops.tpu.splash_attention`): tiles of scores in on-chip memory, tiles
that the causal order or the window hides are not visited."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from gatedattn.kernels.context import WHOLE, Shard

TILE = 128  # lengths are padded to a multiple
BLOCKS = (512, 384, 256, 128)  # tile sizes tried, largest first: larger ones need fewer passes over the keys


class CausalRows(masks.Mask):
    """Query t sees keys t - window + 1 .. t (0: all before it). The rows may be in any order."""

    def __init__(self, rows: np.ndarray, keys: int, window: int):
        self.q_sequence, self.keys, self.window = rows.astype(np.int32), keys, window

    @property
    def shape(self):
        return len(self.q_sequence), self.keys

    def mask_function(self, t, s):
        seen = t >= s
        return seen & (t - s < self.window) if self.window else seen

    def __getitem__(self, block):
        t, s = self.q_sequence[block[0]], np.arange(*block[1].indices(self.keys))
        nearest, farthest = t.min() - s.max(), t.max() - s.min()
        limit = self.window or self.keys + 1
        if farthest < 0 or nearest >= limit or (nearest >= 0 and farthest < limit):  # most blocks: all hidden or all seen
            return np.broadcast_to(nearest >= 0 and farthest < limit, (len(t), len(s)))
        return self.mask_function(t[:, None], s[None])

    def _identity(self):
        return self.q_sequence.tobytes(), self.keys, self.window

    def __eq__(self, other):
        return isinstance(other, CausalRows) and self._identity() == other._identity()

    def __hash__(self):
        return hash(self._identity())


def _kernel(S: int, heads: int, window: int, count: int, balanced: bool, name: str | None, interpret: bool, residuals: bool):
    """The kernel for S queries, in the order in which `count` devices hold them, and S keys."""
    T = S // count
    block = next(b for b in BLOCKS if T % b == 0)
    sizes = splash.BlockSizes(
        block_q=block, block_kv=block, block_q_dkv=block, block_kv_dkv=block, block_q_dq=block, block_kv_dq=block
    )  # fmt: skip
    rows = np.concatenate([Shard(i, count, balanced).positions(T, np) for i in range(count)])
    return splash.make_splash_mha(  # keeps the tables it makes of a mask
        masks.MultiHeadMask([CausalRows(rows, S, window)] * heads),
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=count,
        save_residuals=residuals,
        residual_checkpoint_name=name,
        interpret=interpret,
    )


def attention(q, k, v, *, segment_ids=None, window=0, scale, sinks=None, shard: Shard = WHOLE, name=None, interpret=False):
    """See `gatedattn.kernels.attention`. The log-sum-exp is a second, forward-only call, dropped by the compiler if not used."""
    T, N, H = q.shape[1:]
    S, C = k.shape[1], v.shape[-1]
    pad = -S % TILE  # padded keys come after every real query, so the causal order hides them
    if pad and shard.count > 1:
        raise ValueError(f"splash attention: {S} tokens over {shard.count} devices: must be a multiple of {TILE * shard.count}")
    q = (q.astype(jnp.float32) * scale).astype(q.dtype)
    v = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, max(H - C, 0))))  # a probe's few channels: as many as the keys have
    q, k, v = (jnp.pad(x, ((0, 0), (0, pad), (0, 0), (0, 0))).swapaxes(1, 2) for x in (q, k, v))
    ids = None
    if segment_ids is not None:
        segment_ids = jnp.pad(segment_ids, ((0, 0), (0, pad)))
        own = segment_ids if shard.count == 1 else segment_ids[:, shard.positions(T)]
        ids = splash.SegmentIds(own, segment_ids)
    settings = (S + pad, N, window, shard.count, shard.balanced, name, interpret)
    out = _call(settings, False, q, k, v, ids, sinks, shard.index)
    lse = _log_sum_exp(settings, q, k, v, ids, shard.index)
    return out.swapaxes(1, 2)[:, :T, :, :C], lse[..., :T]


def _call(settings, residuals, q, k, v, ids, sinks, index):
    kernel, count = _kernel(*settings, residuals), settings[3]
    if count > 1:  # this device's rows of the tables

        def own_part(table):
            axis = min(table.ndim - 1, 1)
            size = table.shape[axis] // count
            return lax.dynamic_slice_in_dim(table, index * size, size, axis)

        kernel = jax.tree.map(own_part, kernel)
    # The MXU rounds float32 operands to bfloat16 unless told otherwise.
    with jax.default_matmul_precision("highest" if q.dtype == jnp.float32 else "default"):
        return jax.vmap(kernel, (0, 0, 0, 0, None))(q, k, v, ids, sinks)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _log_sum_exp(settings, q, k, v, ids, index):
    return _call(settings, True, q, k, v, ids, None, index)[1][0]


def _refuse(settings, saved, cotangent):
    raise NotImplementedError("splash attention's log-sum-exp has no gradient: pass sink logits to the kernel, or use chunked")


_log_sum_exp.defvjp(lambda *arguments: (_log_sum_exp(*arguments), None), _refuse)
