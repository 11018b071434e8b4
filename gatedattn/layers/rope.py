"""Rotary position embedding and its extensions to longer contexts."""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from gatedattn.config import RopeConfig


def inverse_frequencies(config: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Radians per position of each rotated pair, and the factor on cos and sin.

    plain    theta_i = theta^(-2i/R),  R = fraction * H rotated dimensions, i = 0 .. R/2 - 1
    linear   theta_i / factor                                                      (arXiv 2306.15595)
    yarn     (1 - gamma_i) theta_i / factor + gamma_i theta_i, where gamma falls linearly in i from 1 at the pair that turns
             beta_fast times within original_max_len to 0 at the one that turns beta_slow times; cos and sin are multiplied
             by 0.1 ln(factor) + 1 (arXiv 2309.00071). The paper has gamma linear in the number of turns; the authors' code,
             transformers and vLLM have it linear in i with the ends rounded outwards, and so have we.
    """
    rotated = int(head_dim * config.fraction)
    pair = np.arange(rotated // 2, dtype=np.float64)
    plain = config.theta ** (-2 * pair / rotated)
    if config.scaling == "none":
        return plain, 1.0
    if config.scaling == "linear":
        return plain / config.factor, 1.0

    def pair_that_turns(times: float) -> float:
        return rotated * math.log(config.original_max_len / (2 * math.pi * times)) / (2 * math.log(config.theta))

    low = max(math.floor(pair_that_turns(config.beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(config.beta_slow)), rotated - 1)
    gamma = 1 - np.clip((pair - low) / max(high - low, 1e-3), 0, 1)
    temperature = config.attention_factor or (0.1 * math.log(config.factor) + 1 if config.factor > 1 else 1.0)
    return (1 - gamma) * plain / config.factor + gamma * plain, temperature


class Turns(NamedTuple):
    """What rotates: cosines and sines, in at least float32."""

    cos: Float[Array, "B T 1 R"]
    sin: Float[Array, "B T 1 R"]


def turns(positions: Int[Array, "B T"], config: RopeConfig, head_dim: int, dtype=jnp.float32) -> Turns:
    """For all layers at once, in place of the positions: sines are dear, both to compute and to compile."""
    frequencies, temperature = inverse_frequencies(config, head_dim)
    wide = jnp.promote_types(dtype, jnp.float32)
    angle = positions[..., None, None].astype(wide) * jnp.asarray(frequencies, wide)
    return Turns(temperature * jnp.cos(angle), temperature * jnp.sin(angle))


def apply(x: Float[Array, "B T N H"], positions: Int[Array, "B T"] | Turns, config: RopeConfig) -> Float[Array, "B T N H"]:
    """Rotate the first fraction * H dimensions of each head by position (dimension i is paired with i + R/2), the rest pass through."""
    cos, sin = positions if isinstance(positions, Turns) else turns(positions, config, x.shape[-1], x.dtype)
    rotated = 2 * cos.shape[-1]
    first, second = jnp.split(x[..., :rotated].astype(cos.dtype), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
    return jnp.concatenate([turned, x[..., rotated:]], axis=-1) if rotated < x.shape[-1] else turned
