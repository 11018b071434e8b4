"""Choosing the next token."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from gatedattn.config import ConfigError


@dataclass(frozen=True)
class Sampling:
    """A draw from softmax(logits / temperature), limited to the `top_k` most likely tokens (0: all) and then to the fewest of
    those whose probabilities sum to `top_p` or more. Temperature 0 is the most likely token.

    Raises:
        ConfigError: a value outside its range; the message names it.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ConfigError(f"temperature={self.temperature:g}: must be 0 (the most likely token) or a positive number")
        if self.top_k < 0:
            raise ConfigError(f"top_k={self.top_k}: must be a positive number of tokens, or 0 for all")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p:g}: must be in (0, 1]; 1 keeps all tokens")
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"seed={self.seed}: must be in [0, 2^32)")


@dataclass(frozen=True)
class Kind:
    """The part of a `Sampling` that the compiled program depends on."""

    greedy: bool
    top_k: int
    top_p: bool

    @classmethod
    def of(cls, sampling: Sampling) -> Kind:
        greedy = sampling.temperature == 0
        return cls(greedy, 0 if greedy else sampling.top_k, not greedy and sampling.top_p < 1)


def choose(
    kind: Kind, logits: Float[Array, "B V"], keys: PRNGKeyArray, temperature: Float[Array, ""], top_p: Float[Array, ""]
) -> Int[Array, " B"]:
    """A token for each row. `keys` [B]: a row's draws depend on its own key alone."""
    if kind.greedy:
        return logits.argmax(-1).astype(jnp.int32)
    logits = logits.astype(jnp.float32)
    logits = (logits - logits.max(-1, keepdims=True)) / temperature  # the largest is 0, however small the temperature
    if 0 < kind.top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, kind.top_k)[0][:, -1:]
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    if kind.top_p:
        ordered = -jnp.sort(-logits, axis=-1)
        probs = jax.nn.softmax(ordered, axis=-1)
        needed = jnp.cumsum(probs, axis=-1) - probs < top_p  # what comes before a token does not suffice yet
        least = jnp.where(needed, ordered, jnp.inf).min(-1, keepdims=True)
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)
