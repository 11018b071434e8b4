"""Queries of one sequence spread over devices, each against all keys (context parallelism)."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int


@dataclasses.dataclass(frozen=True)
class Shard:
    """Which of the S tokens of a sequence the T = S / count queries at hand are.

    Device `index` of `count` has tokens index * T .. index * T + T - 1; if `balanced`, the sequence is cut into 2 * count chunks and
    the device has chunks index and 2 * count - 1 - index: with a causal mask every device then has the same work.
    """

    index: Int[Array, ""] | int = 0
    count: int = 1
    balanced: bool = False

    def positions(self, T: int, xp=jnp) -> Int[Array, " T"]:
        """The token that each query is. `xp`: numpy for a known index."""
        if not self.balanced:
            return self.index * T + xp.arange(T)
        chunk = xp.arange(T // 2)
        return xp.concatenate([self.index * (T // 2) + chunk, (2 * self.count - 1 - self.index) * (T // 2) + chunk])


WHOLE = Shard()


def gather(x: Array | None, axis_name: str) -> Array | None:
    """All tokens [B, S, ...] from each device's own [B, T, ...]. The gradient is a reduce-scatter."""
    return None if x is None else lax.all_gather(x, axis_name, axis=1, tiled=True)


def _routes(count: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Who sends the first, and who the second half of its tokens to whom: chunk j belongs to device min(j, 2 * count - 1 - j)."""
    return tuple([(d, min(j, 2 * count - 1 - j)) for d in range(count) for j in [2 * d + half]] for half in (0, 1))


def balance(x: Array, axis: int, axis_name: str, count: int) -> Array:
    """From consecutive tokens to the two chunks of a balanced `Shard`: each half travels once."""
    first, second = (lax.ppermute(half, axis_name, route) for half, route in zip(jnp.split(x, 2, axis), _routes(count)))
    # Even chunks are first halves: on an odd device the low chunk came as a second half.
    odd = lax.axis_index(axis_name) % 2 == 1
    return jnp.concatenate([jnp.where(odd, second, first), jnp.where(odd, first, second)], axis)


def restore(x: Array, axis: int, axis_name: str, count: int) -> Array:
    """The inverse of `balance`."""
    low, high = jnp.split(x, 2, axis)
    odd = lax.axis_index(axis_name) % 2 == 1
    halves = (jnp.where(odd, high, low), jnp.where(odd, low, high))
    back = ([(to, sender) for sender, to in route] for route in _routes(count))
    return jnp.concatenate([lax.ppermute(half, axis_name, route) for half, route in zip(halves, back)], axis)
