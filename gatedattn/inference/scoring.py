"""How likely a model finds a text, when it reads it through a cache."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from gatedattn.config import ConfigError
from gatedattn.inference.cache import CachePolicy, KVCache
from gatedattn.inference.decode import forward
from gatedattn.transformer import Transformer


def score(
    model: Transformer, tokens: Int[Array, "B T"], policy: str | CachePolicy = "full", *, chunk: int = 256
) -> Float[np.ndarray, "B T-1"]:
    """log p(tokens[:, t + 1] | what the cache still holds of tokens[:, : t + 1]), float32.

    Reads `chunk` tokens at a time. That changes speed and memory, not the result: each token of a chunk sees exactly what the
    policy would have kept if tokens had come one by one. Memory grows with chunk x (chunk + cache), and not with T unless the
    policy is to keep everything.

    Raises:
        ConfigError: a policy that is none or that the model cannot have, too few tokens, more than learned positions.
    """
    tokens, policy, config = np.asarray(tokens, np.int32), CachePolicy.of(policy, model.config), model.config
    if tokens.ndim != 2 or tokens.shape[1] < 2:
        raise ConfigError(f"score: tokens of shape {tokens.shape}: must be [B, T] with T of at least 2")
    T = tokens.shape[1]
    if config.position == "learned" and T - 1 > config.max_seq_len:
        raise ConfigError(f"score: {T - 1} tokens need as many positions, and the model has learned {config.max_seq_len}")
    chunk = min(chunk, T - 1)
    pad = -(T - 1) % chunk  # after the last token, where no query looks
    inputs, targets = (np.pad(x, ((0, 0), (0, pad))) for x in (tokens[:, :-1], tokens[:, 1:]))
    graphdef, params = nnx.split(model)
    logprobs = _score(nnx.as_pure(params), inputs, targets, graphdef=graphdef, policy=policy, chunk=chunk)
    return np.asarray(logprobs)[:, : T - 1]


@functools.partial(jax.jit, static_argnames=("graphdef", "policy", "chunk"))
def _score(params, inputs, targets, *, graphdef, policy, chunk):
    model = nnx.merge(graphdef, params)
    B, T = inputs.shape
    padding, prefix = jnp.zeros(B, jnp.int32), model.prefix()

    def piece(carry, tokens):
        caches, column = carry
        inputs, targets = tokens
        x, caches = forward(model, inputs, caches, column, padding, policy, prefix=prefix)
        logprobs = jax.nn.log_softmax(model.logits(x), axis=-1)
        return (caches, column + chunk), jnp.take_along_axis(logprobs, targets[..., None], axis=-1)[..., 0]

    pieces = jax.tree.map(lambda x: x.reshape(B, -1, chunk).swapaxes(0, 1), (inputs, targets))
    start = (KVCache.empty(model.config, policy, B, T), jnp.int32(0))
    return jax.lax.scan(piece, start, pieces)[1].swapaxes(0, 1).reshape(B, T)
