"""Native sparse attention (arXiv 2502.11089): what a query reads is a compressed view of the past, a few blocks of it, and a window.

    y[t] = sum over c of g^c[t] softmax(q[t] . K^c / sqrt(H)) V^c,   c in {compressed, selected, window}

    compressed   one key and value for every `compress_block` (l) tokens, a block every `compress_stride` (d); seen once wholly past
    selected     the tokens of the `select_count` (n) blocks of `select_block` (l') tokens that matter most: the probabilities that all
                 query heads of a KV group gave to the compressed blocks in them, by overlap; the document's first block and the two that
                 end with the query's own are always among them. All heads of a group read the same blocks; the choice has no gradient
    window       the last `window` tokens

g = sigmoid(x W), one for each query head and branch, which need not sum to 1; or 1/3 each (`gate="equal"`). With `sparse=False` every
branch reads all tokens, so that what the gates do can be told from what the sparsity does. With `separate` each branch has keys and
values by projections of its own, as in the paper: the K heads of the projections become 3 K, a KV head's three branches side by side.

Blocks begin at multiples of d and l' from the row's beginning; those that reach over a document's edge are no compressed blocks, and
selected ones are cut off there. The compressed view is taken of keys without rotation, and rotated to its block's first token.
The selected branch multiplies all visible blocks and masks, in memory that grows with T (and T x T / l' bits of choices): it computes
what the method computes, but does not save its time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from gatedattn import kernels
from gatedattn.gates import INIT_STD
from gatedattn.kernels.weights import HIDDEN
from gatedattn.layers import rope as rope_lib
from gatedattn.layers.linear import Embedding, Linear
from gatedattn.linear import project
from gatedattn.model_config import NSAConfig, RopeConfig
from gatedattn.sharding import constrain, map_shards

QUERIES = 256  # queries that look at the compressed blocks together


class Compression(nnx.Module):
    """[B, C, l, K, H] -> [B, C, K, H]: the mean of a block, or W_2 silu(W_1 (block + its tokens' places)), the same for all heads.

    W ~ N(0, 1 / fan-in): what comes out begins at the size of a token. At the model's `init_std` it would be a twentieth, all blocks
    would look alike, and the first choices would be drawn by lot.
    """

    def __init__(self, config: NSAConfig, head_dim: int, **weights):
        mlp = config.compression == "mlp"
        self.position = Embedding(config.compress_block, head_dim, **weights) if mlp else None
        width, matrices = config.compress_block * head_dim, {k: v for k, v in weights.items() if k != "init_std"}
        self.inner = Linear(width, head_dim, init_std=width**-0.5, **matrices) if mlp else None
        self.outer = Linear(head_dim, head_dim, init_std=head_dim**-0.5, **matrices) if mlp else None

    def __call__(self, blocks: Float[Array, "B C l K H"]) -> Float[Array, "B C K H"]:
        if self.inner is None:
            return blocks.mean(2, dtype=jnp.promote_types(blocks.dtype, jnp.float32)).astype(blocks.dtype)
        places = constrain(self.position.table[...], "..")[:, None].astype(blocks.dtype)
        placed = (blocks + places).swapaxes(2, 3)
        return self.outer(jax.nn.silu(self.inner(placed.reshape(*placed.shape[:3], -1))))


def cut(x: Float[Array, "B S K H"], config: NSAConfig) -> Float[Array, "B C l K H"]:
    """The overlapping blocks to compress; those that would reach beyond the last token are left out, but for the first one."""
    length, stride, count = config.compress_block, config.compress_stride, len(_starts(x.shape[1], config))
    needed = (count - 1) * stride + length
    x = jnp.pad(x[:, :needed], ((0, 0), (0, max(needed - x.shape[1], 0)), (0, 0), (0, 0)))
    strides = x.reshape(x.shape[0], -1, stride, *x.shape[2:])
    return jnp.concatenate([strides[:, i : i + count] for i in range(length // stride)], axis=2)


def _starts(length: int, config: NSAConfig) -> Int[np.ndarray, " C"]:
    """Where the compressed blocks of so many tokens begin."""
    return np.arange(0, max(length - config.compress_block, 0) + 1, config.compress_stride)


def overlap(length: int, config: NSAConfig) -> Float[np.ndarray, "C J"]:
    """How much the probability of compressed block i counts for selectable block j: the paper's equation 9 with blocks counted from 0,
    sum over m < l'/d and n < l/d of p[(l'/d)(j + 1) - 1 - m - n], which is the number of strides that the two share."""
    starts, blocks = _starts(length, config), -(-length // config.select_block)
    begin = np.arange(blocks) * config.select_block
    shared = np.minimum(starts[:, None] + config.compress_block, begin + config.select_block) - np.maximum(
        starts[:, None], begin
    )
    return np.maximum(shared, 0) / config.compress_stride


def masked(
    q: Float[Array, "B T N H"], k: Float[Array, "B S K H"], v: Float[Array, "B S K C"], seen: Bool[Array, "B #K T S"]
) -> tuple[Float[Array, "B T N C"], Float[Array, "B K G T S"]]:
    """Attention to whatever is seen, and its probabilities; 0 for a query that sees nothing."""
    B, T, N, H = q.shape
    wide = jnp.promote_types(q.dtype, jnp.float32)
    s = jnp.einsum("btkgh,bskh->bkgts", q.reshape(B, T, k.shape[2], -1, H), k, preferred_element_type=wide) * H**-0.5
    seen = seen[:, :, None]
    s = jnp.where(seen, s, HIDDEN)
    e = jnp.where(seen, jnp.exp(s - lax.stop_gradient(s.max(-1, keepdims=True))), 0)
    total = e.sum(-1, keepdims=True)
    p = e / jnp.where(total > 0, total, 1)
    y = jnp.einsum("bkgts,bskc->btkgc", p.astype(v.dtype), v, preferred_element_type=wide)
    return y.reshape(B, T, N, -1).astype(v.dtype), p


def compressed_seen(t: Int[Array, "B T"], first: Int[Array, "B T"], starts, config: NSAConfig) -> Bool[Array, "B 1 T C"]:
    """Blocks wholly past, and wholly in the query's document. t, first: where the query and its document's first token are."""
    begins = jnp.asarray(starts)
    return ((begins + config.compress_block - 1 <= t[..., None]) & (begins >= first[..., None]))[:, None]


def select(
    p: Float[Array, "B K G T C"],
    t: Int[Array, "B T"],
    first: Int[Array, "B T"],
    weights: Float[np.ndarray, "C J"],
    config: NSAConfig,
) -> Bool[Array, "B K T J"]:
    """The blocks that each query reads."""
    t, first, j = t[..., None], first[..., None], jnp.arange(weights.shape[1])
    own, size = t // config.select_block, config.select_block
    allowed = (j * size <= t) & ((j + 1) * size > first)
    always = (j == first // size) | (j == own) | (j == own - 1)
    score = jnp.einsum("bkgtc,cj->bktj", lax.stop_gradient(p), jnp.asarray(weights, p.dtype))
    score = jnp.where(always[:, None], jnp.inf, score)
    score = jnp.where(allowed[:, None], score, -1)
    _, chosen = lax.top_k(score, min(config.select_count, len(j)))
    picked = (chosen[..., None] == j).any(-2)
    return picked & allowed[:, None]


class SparseAttention(nnx.Module):
    """The three branches and their gates (see above); q, k and v are projected, normalised and not yet rotated.

    Raises `ValueError` in a sequence spread over devices (mesh.context).
    """

    def __init__(
        self, config: NSAConfig, *, d_model: int, num_heads: int, head_dim: int, init_std=0.02, dtype=jnp.float32,
        param_dtype=jnp.float32, rngs: nnx.Rngs,
    ):  # fmt: skip
        self.config = config
        weights = dict(init_std=init_std, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.compress_key, self.compress_value = (
            Compression(config, head_dim, **weights) if config.sparse else None for _ in range(2)
        )
        learned = config.gate == "learned"
        self.gate = BranchGate(d_model, num_heads, param_dtype=param_dtype, rngs=rngs) if learned else None

    def __call__(
        self,
        x: Float[Array, "B T D"],
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T M H"],
        v: Float[Array, "B T M H"],
        positions: Int[Array, "B T"] | rope_lib.Turns,
        segment_ids: Int[Array, "B T"] | None,
        *,
        rope: RopeConfig | None,
        kernel: str,
    ) -> tuple[Float[Array, "B T N H"], Callable, Float[Array, "B T N 3"]]:
        """Also returns a function that attends to other values [B, T, C] by the same weights, and the gates.

        M is 3 K with `separate`, K without.
        """
        config, (B, T) = self.config, q.shape[:2]

        def turn(x, stride=1):
            if rope is None:
                return x
            turns = (
                positions if isinstance(positions, rope_lib.Turns) else rope_lib.turns(positions, rope, q.shape[-1], q.dtype)
            )
            return rope_lib.apply(x, rope_lib.Turns(*(z[:, ::stride][:, : x.shape[1]] for z in turns)), rope)

        keys, values, query = self._branches(k), self._branches(v), turn(q)
        rotated = [turn(key) for key in keys[1:]]

        def dense(key, value, **options):
            options = dict(segment_ids=segment_ids, kernel=kernel) | options
            return kernels.attention(query.astype(value.dtype), key.astype(value.dtype), value, **options)[0]

        if not config.sparse:
            rotated = [turn(keys[0]), *rotated]
            attend = [functools.partial(dense, key) for key in rotated]
        else:
            segments = jnp.ones((B, T), jnp.int32) if segment_ids is None else segment_ids
            t = jnp.broadcast_to(jnp.arange(T), (B, T))
            begins = jnp.concatenate([jnp.ones_like(segments[:, :1], bool), segments[:, 1:] != segments[:, :-1]], axis=1)
            first = lax.cummax(jnp.where(begins, t, 0), axis=1)
            summary = turn(self.compress_key(cut(keys[0], config)), config.compress_stride)
            values = [self.compress_value(cut(values[0], config)), *values[1:]]
            look = functools.partial(self._compressed, query, summary, t=t, first=first, length=T)
            _, blocks = look(values[0])
            attend = [
                lambda v: look(v)[0],
                functools.partial(dense, rotated[0], selected=(blocks, config.select_block)),
                functools.partial(dense, rotated[1], window=config.window),
            ]
        gates = self.gates(x, q.shape[2])

        def mass(indicator: Float[Array, "B T C"]) -> Float[Array, "B T N C"]:
            """The sum over tokens of a query's weights times indicators; a compressed block's weight is spread over its tokens."""
            wide = jnp.promote_types(q.dtype, jnp.float32)
            spread = jnp.broadcast_to(indicator[:, :, None].astype(wide), (B, T, rotated[-1].shape[2], indicator.shape[-1]))
            pooled = cut(spread, config).mean(2) if config.sparse else spread
            return mix([f(z) for f, z in zip(attend, (pooled, spread, spread))], gates)

        return mix([f(value) for f, value in zip(attend, values)], gates).astype(q.dtype), mass, gates

    def cached(
        self,
        x: Float[Array, "B T D"],
        q: Float[Array, "B T N H"],
        keys: Float[Array, "B S M H"],
        values: Float[Array, "B S M H"],
        t: Int[Array, "B T"],
        *,
        rope: RopeConfig | None,
    ) -> Float[Array, "B T N H"]:
        """The same for queries at the positions t of rows whose token s has the s-th of the keys and values, not rotated."""
        config, S = self.config, keys.shape[1]
        places = jnp.arange(S)[None]

        def turn(x, at):
            return x if rope is None else rope_lib.apply(x, at, rope)

        query, (k, v) = turn(q, t), (self._branches(z) for z in (keys, values))
        past = places <= t[..., None]
        if not config.sparse:
            outs = [masked(query, turn(key, places), value, past[:, None])[0] for key, value in zip(k, v, strict=True)]
            return mix(outs, self.gates(x, q.shape[2])).astype(q.dtype)
        starts, first = _starts(S, config), jnp.zeros_like(t)
        summary = turn(self.compress_key(cut(k[0], config)), jnp.asarray(starts)[None])
        compressed = self.compress_value(cut(v[0], config))
        out, blocks = _look(query, summary, compressed, t, first, config=config, length=S)
        chosen = jnp.repeat(blocks, config.select_block, axis=-1)[..., :S] & past[:, None]
        near = past & (t[..., None] - places < config.window)
        outs = [
            out,
            masked(query, turn(k[1], places), v[1], chosen)[0],
            masked(query, turn(k[2], places), v[2], near[:, None])[0],
        ]
        return mix(outs, self.gates(x, q.shape[2])).astype(q.dtype)

    def gates(self, x: Float[Array, "B T D"], num_heads: int) -> Float[Array, "B T N 3"]:
        return jnp.full((*x.shape[:2], num_heads, 3), 1 / 3) if self.gate is None else self.gate(x)

    def _branches(self, x: Float[Array, "B S M H"]) -> list[Float[Array, "B S K H"]]:
        if not self.config.separate:
            return [x] * 3
        B, S, M, H = x.shape
        return [constrain(part, "BTKH") for part in jnp.moveaxis(x.reshape(B, S, M // 3, 3, H), 3, 0)]

    def _compressed(self, q, k, v, *, t, first, length: int):
        """`_look` for QUERIES queries at a time, computed again in the backward pass; each device looks with its own heads."""
        look = functools.partial(_look, config=self.config, length=length)

        def on_shard(q, k, v, t, first):
            T = q.shape[1]
            if T <= QUERIES:
                return look(q, k, v, t, first)

            def split(x):
                x = jnp.pad(x, ((0, 0), (0, -T % QUERIES)) + ((0, 0),) * (x.ndim - 2))
                return x.reshape(x.shape[0], -1, QUERIES, *x.shape[2:]).swapaxes(0, 1)

            some = jax.checkpoint(lambda part: look(part[0], k, v, *part[1:]), prevent_cse=False)
            out, blocks = lax.map(some, (split(q), split(t), split(first)))
            out = out.swapaxes(0, 1).reshape(len(q), -1, *out.shape[3:])[:, :T]
            return out, jnp.moveaxis(blocks, 0, 2).reshape(*blocks.shape[1:3], -1, blocks.shape[-1])[:, :, :T]

        letters = ("B.K.", "B.K.", "B.K.", "B.", "B.")
        return map_shards(on_shard, (q, k, v, t, first), letters, ("B.K.", "BK.."))


class BranchGate(nnx.Module):
    """sigmoid(x W), [B, T, N, 3] in float32; W ~ N(0, 0.02^2)."""

    def __init__(self, d_model: int, num_heads: int, *, param_dtype, rngs: nnx.Rngs):
        self.kernel = nnx.Param(INIT_STD * jax.random.normal(rngs.params(), (d_model, num_heads, 3), param_dtype))

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T N 3"]:
        return jax.nn.sigmoid(project(x, self.kernel[...], out_dtype=jnp.float32))


def mix(outs, gates: Float[Array, "B T N 3"]) -> Float[Array, "B T N C"]:
    return sum(gates[..., i, None] * out.astype(jnp.promote_types(out.dtype, jnp.float32)) for i, out in enumerate(outs))


def _look(q, k, v, t, first, *, config: NSAConfig, length: int):
    """The compressed branch, and the blocks that its probabilities choose."""
    out, p = masked(q, k, v, compressed_seen(t, first, _starts(length, config), config))
    return out, select(p, t, first, overlap(length, config), config)
