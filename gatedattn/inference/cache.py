"""The key-value cache: of fixed shape, written in place, with a policy for what it forgets.

Rows of a batch are aligned at their last token. The *column* of a token counts from the start of the padded batch and is the
same for all rows; its *position* is its column less the row's padding, negative for padding itself. So one number tells where
the next token goes, and a ring of S slots holds column c in slot c mod S: which column a slot holds follows from the newest.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from gatedattn.config import ConfigError, RopeConfig, TransformerConfig
from gatedattn.kernels import cached
from gatedattn.kernels.prefix import Prefix
from gatedattn.kernels.weights import Weights
from gatedattn.layers import rope as rope_lib
from gatedattn.sharding import constrain, map_shards


@dataclass(frozen=True)
class CachePolicy:
    """Which tokens stay in the cache. The short form is what `parse` reads and `str` writes.

    full           all of them
    window:W       the last W, the newest included. Positions stay what they were, so that each layer computes what it would
                   with `config.window=W` (deeper layers still hear of earlier tokens through the values)
    streaming:N+W  the first N and the last W, and positions are counted inside the cache (StreamingLLM, arXiv 2309.17453):
                   with tokens 0-3 and 6-9 in it, they stand at 0-7. The newest token is one of the W. A layer with a window of its
                   own counts so, too: it sees of the first N those that stand within it.
    """

    window: int = 0  # 0: all
    sinks: int = 0
    streaming: bool = False

    @classmethod
    def parse(cls, policy: str | CachePolicy) -> CachePolicy:
        """Raises `ConfigError` for anything but the forms above."""
        if isinstance(policy, CachePolicy):
            return policy
        if policy == "full":
            return cls()
        if match := re.fullmatch(r"window:([1-9]\d*)", policy):
            return cls(window=int(match[1]))
        if match := re.fullmatch(r"streaming:(\d+)\+([1-9]\d*)", policy):
            return cls(window=int(match[2]), sinks=int(match[1]), streaming=True)
        raise ConfigError(f"cache={policy!r}: must be full, window:512 or streaming:4+508 (any numbers)")

    @classmethod
    def of(cls, policy: str | CachePolicy, config: TransformerConfig) -> CachePolicy:
        """`parse`, for a model. Raises `ConfigError` also if its attention must be able to look at everything, or cannot be moved."""
        policy = cls.parse(policy)
        if config.nsa.enabled and str(policy) != "full":
            raise ConfigError(f"cache={policy}: native sparse attention (model.nsa) chooses among all tokens: use full")
        if config.position == "learned" and policy.streaming:
            raise ConfigError(f"cache={policy}: learned positions cannot change after the embedding: use full or window:W")
        return policy

    def __str__(self) -> str:
        return f"streaming:{self.sinks}+{self.window}" if self.streaming else f"window:{self.window}" if self.window else "full"

    @property
    def size(self) -> int:
        """Tokens the cache holds when it is full; 0: no limit."""
        return self.sinks + self.window


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Keys and values of all layers, heads first: attention then reads them as they lie.

    `keys` and `values` are the ring, `sink_keys` and `sink_values` the first tokens of each row (n may be 0). Keys are cached
    rotated by their position, except under a streaming policy, which rotates them anew at every step.
    """

    keys: Float[Array, "L B K S H"]
    values: Float[Array, "L B K S H"]
    sink_keys: Float[Array, "L B K n H"]
    sink_values: Float[Array, "L B K n H"]

    @classmethod
    def empty(cls, config: TransformerConfig, policy: CachePolicy, batch: int, columns: int, dtype=None) -> KVCache:
        """Room for `columns` columns, or fewer if the policy or the model's own window let go of them sooner. All layers have as much
        as the one that looks furthest back."""
        widest = max(layer.window or columns for layer in config.period)
        windows = [w for w in (policy.window, widest) if w]
        slots = min([columns, *windows])

        def zeros(size: int) -> Array:
            shape = (config.num_layers, batch, config.cache_heads, size, config.head_dim)
            return constrain(jnp.zeros(shape, dtype or config.dtype), "LBKSH")

        return cls(zeros(slots), zeros(slots), zeros(policy.sinks), zeros(policy.sinks))

    def unstack(self) -> list[KVCache]:
        """One cache per layer, of arrays [B * K, S, H]. In any other shape XLA's CPU back end fails to see that a loop may write
        the new token in place and then read the whole, and copies the cache several times a step."""
        L, B, K, _, H = self.keys.shape
        return [jax.tree.map(lambda x: x[i].reshape(B * K, x.shape[3], H), self) for i in range(L)]


@dataclass(frozen=True)
class LayerCache:
    """One layer's view: what `GatedAttention` takes as its `cache`."""

    arrays: KVCache
    layer: Int[Array, ""] | None  # index into stacked arrays; None: they are this layer's own, as `unstack` makes them
    column: Int[Array, ""]  # of the first new token
    padding: Int[Array, " B"]
    policy: CachePolicy

    def attend(self, q, k, v, *, rope: RopeConfig | None, window: int, weights: Weights, prefix: Prefix | None):
        """See `gatedattn.layers.attention.Cache`. Sequences and KV heads do not mix, so that each device works on its own."""
        if self.layer is None:
            y, lse, arrays = self._attend(q, k, v, rope, window, weights, prefix)
            return y, lse, replace(self, arrays=arrays)

        def on_shard(q, k, v, keys, values, sink_keys, sink_values, layer, column, padding, *prefix):
            view = replace(
                self, arrays=KVCache(keys, values, sink_keys, sink_values), layer=layer, column=column, padding=padding
            )
            y, lse, arrays = view._attend(q, k, v, rope, window, weights, prefix if prefix[0] is not None else None)
            return y, lse, arrays.keys, arrays.values, arrays.sink_keys, arrays.sink_values

        a, ring = self.arrays, (".BK..",) * 4
        y, lse, *arrays = map_shards(
            on_shard,
            (
                q,
                k,
                v,
                a.keys,
                a.values,
                a.sink_keys,
                a.sink_values,
                self.layer,
                self.column,
                self.padding,
                *(prefix or (None, None)),
            ),
            ("B.K.", "B.K.", "B.K.", *ring, "", "", "B", ".K.", ".K."),
            ("B.K.", "BK.", *ring),
        )
        return y, lse, replace(self, arrays=KVCache(*arrays))

    def extend(self, k, v):
        """See `gatedattn.layers.attention.Cache`. Only for the policy `full`, under which a column is a slot."""
        B, T, M, H = k.shape
        grown = []
        for stored, new in ((self.arrays.keys, k), (self.arrays.values, v)):
            ring, _ = _store(stored, new.swapaxes(1, 2), self.layer, self.column)
            grown.append(ring)

        def by_position(ring):
            held = ring if self.layer is None else jax.lax.dynamic_index_in_dim(ring, self.layer, keepdims=False)
            held = held.reshape(B, M, -1, H)
            columns = jnp.minimum(jnp.arange(held.shape[2]) + self.padding[:, None], held.shape[2] - 1)
            return jnp.take_along_axis(held, columns[:, None, :, None], axis=2).swapaxes(1, 2).astype(k.dtype)

        t = self.column + jnp.arange(T) - self.padding[:, None]
        return *map(by_position, grown), t, replace(self, arrays=replace(self.arrays, keys=grown[0], values=grown[1]))

    def _attend(self, q, k, v, rope: RopeConfig | None, window: int, weights: Weights, prefix: Prefix | None):
        T, n = q.shape[1], self.policy.sinks
        t = self.column + jnp.arange(T) - self.padding[:, None]  # [B, T], positions
        # Under a streaming policy, `gone` tokens are missing between the first n and the ring when query t looks. A rotated
        # score depends on the distance alone, so one rotation of the ring (by the first query's count) serves all T queries.
        gone = jnp.maximum(t - (self.policy.size - 1), 0) if self.policy.streaming else jnp.zeros_like(t)
        base = gone[:, :1]

        def turn(x, positions):
            return x if rope is None else rope_lib.apply(x, positions, rope)

        def part(q, keys, values, positions, visible):
            keys, values = (x.reshape(-1, *x.shape[-2:]).astype(q.dtype) for x in (keys, values))
            if self.policy.streaming:  # heads are sequences here: a cached key has a position, whichever head it is of
                keys = turn(keys[:, :, None], jnp.repeat(positions, len(keys) // len(q), axis=0))[:, :, 0]
            return q, keys, values, visible

        new_keys = (k if self.policy.streaming else turn(k, t)).swapaxes(1, 2)
        new_values = v.swapaxes(1, 2)
        stored = self.arrays
        all_keys, keys = _store(stored.keys, new_keys, self.layer, self.column)
        all_values, values = _store(stored.values, new_values, self.layer, self.column)
        s = _columns(self.column, T, stored.keys.shape[-2]) - self.padding[:, None]  # [B, S], positions of the keys
        distance = t[:, :, None] - s[:, None, :]
        visible = (distance >= 0) & (s >= n)[:, None]
        for limit in filter(None, (window, self.policy.window)):
            visible &= distance < limit
        parts = [part(turn(q, t - base), keys, values, s - base, visible)]

        sink_keys, sink_values = stored.sink_keys, stored.sink_values
        if n:
            sink_keys, keys = _store_first(sink_keys, new_keys, self.layer, t[:, 0])
            sink_values, values = _store_first(sink_values, new_values, self.layer, t[:, 0])
            s = jnp.broadcast_to(jnp.arange(n), (len(t), n))
            seen = s[:, None] <= t[:, :, None]
            if window:  # of the layer itself, which counts as positions do: inside the cache
                seen &= (t - gone)[:, :, None] - s[:, None] < window
            parts.append(part(turn(q, t - gone), keys, values, s, seen))
        if prefix is not None:  # already rotated, to right before position 0
            shape = (len(t), k.shape[2], *prefix[0].shape[::2])
            keys, values = (jnp.broadcast_to(x.swapaxes(0, 1), shape).reshape(-1, *shape[2:]).astype(q.dtype) for x in prefix)
            parts.append((turn(q, t - gone), keys, values, jnp.ones((*t.shape, shape[2]), bool)))
        y, lse = cached.attention(parts, q.shape[-1] ** -0.5, weights)
        return y, lse, KVCache(all_keys, all_values, sink_keys, sink_values)


def _held(column: Int[Array, ""], slots: int) -> Int[Array, " S"]:
    """The column in each slot of a ring when `column` is the newest; negative for a slot not used yet."""
    return column - (column - jnp.arange(slots)) % slots


def _columns(column: Int[Array, ""], new: int, slots: int) -> Int[Array, " S"]:
    """The columns of the keys that `_store` returns."""
    if new == 1:
        return _held(column, slots)
    return jnp.concatenate([_held(column - 1, slots), column + jnp.arange(new)])


def _store(
    stored: Float[Array, "*L Z S H"], new: Float[Array, "B K T H"], layer: Int[Array, ""] | None, column: Int[Array, ""]
) -> tuple[Float[Array, "*L Z S H"], Float[Array, "*Z s H"]]:
    """The ring with the new columns in it, and what the new queries may look at.

    A single token takes the place of one that its own query no longer sees: look at the ring. The first of several may still
    see what the last of them displaces: look at the old ring and the new columns side by side.
    """
    slots, T = stored.shape[-2], new.shape[2]
    new = new.astype(stored.dtype)
    if layer is None:
        ring = jax.lax.dynamic_update_slice(stored, new.reshape(-1, 1, new.shape[-1]), (0, column % slots, 0))
        return ring, ring
    if T == 1:
        stored = jax.lax.dynamic_update_slice(stored, new[None], (layer, 0, 0, column % slots, 0))
        return stored, jax.lax.dynamic_index_in_dim(stored, layer, keepdims=False)
    seen = jnp.concatenate([jax.lax.dynamic_index_in_dim(stored, layer, keepdims=False), new], axis=2)
    held = _held(column + T - 1, slots)
    source = jnp.where(held >= column, slots + held - column, jnp.arange(slots))
    return jax.lax.dynamic_update_index_in_dim(stored, jnp.take(seen, source, axis=2), layer, 0), seen


def _store_first(
    stored: Float[Array, "*L Z n H"], new: Float[Array, "B K T H"], layer: Int[Array, ""] | None, first: Int[Array, " B"]
) -> tuple[Float[Array, "*L Z n H"], Float[Array, "B K n H"]]:
    """The first n tokens of each row, with those among the new ones put in; `first`: position of the first new one."""
    T = new.shape[2]
    at = jnp.arange(stored.shape[-2]) - first[:, None]  # [B, n]: where among the new ones position i is
    found = (0 <= at) & (at < T)
    taken = jnp.take_along_axis(new, at.clip(0, T - 1)[:, None, :, None], axis=2).astype(stored.dtype)
    old = stored if layer is None else jax.lax.dynamic_index_in_dim(stored, layer, keepdims=False)
    kept = jnp.where(found[:, None, :, None], taken, old.reshape(taken.shape))
    if layer is None:
        return kept.reshape(stored.shape), kept
    return jax.lax.dynamic_update_index_in_dim(stored, kept, layer, 0), kept
