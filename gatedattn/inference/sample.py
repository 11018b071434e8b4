"""Text from a model, by a full forward pass per token over a buffer of fixed length."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int, PRNGKeyArray

from gatedattn.data import Tokenizer
from gatedattn.transformer import Transformer


def sample(
    model: Transformer, prompt: Int[Array, "B P"], length: int, *, temperature: float = 0.0, key: PRNGKeyArray | None = None
) -> Int[Array, "B length"]:
    """Continue each prompt to `length` tokens in all, the prompt included.

    The next token is the most likely one at temperature 0, else a draw from softmax(logits / temperature) with `key`. Compiled once
    per shape. Raises ValueError for an empty prompt, one longer than `length`, or a temperature without a key.
    """
    prompt = jnp.asarray(prompt, jnp.int32)
    if not 0 < prompt.shape[1] <= length:
        raise ValueError(f"a prompt of {prompt.shape[1]} tokens cannot be continued to {length}: give 1 to {length} tokens")
    if temperature < 0 or (temperature and key is None):
        raise ValueError(f"temperature={temperature}: must be 0, or positive and come with a key")
    key = jax.random.key(0) if key is None else key
    graphdef, params = nnx.split(model)
    buffer = jnp.pad(prompt, ((0, 0), (0, length - prompt.shape[1])))
    return _fill(params, buffer, prompt.shape[1], jnp.float32(temperature), key, graphdef=graphdef)


@functools.partial(jax.jit, static_argnames="graphdef")
def _fill(params, buffer, start, temperature, key, *, graphdef):
    model = nnx.merge(graphdef, params)

    def extend(at, buffer):
        hidden, _ = model.hidden(buffer)  # causal: what stands at `at` and after does not matter
        logits = (hidden[:, at - 1] @ model.unembedding().astype(hidden.dtype)).astype(jnp.float32)
        drawn = jax.random.categorical(jax.random.fold_in(key, at), logits / jnp.maximum(temperature, 1e-6))
        token = jnp.where(temperature > 0, drawn, logits.argmax(-1))
        return buffer.at[:, at].set(token.astype(buffer.dtype))

    return jax.lax.fori_loop(start, buffer.shape[1], extend, buffer)


def text(model: Transformer, tokenizer: Tokenizer, prompt: str = "", *, tokens: int = 60, temperature: float = 0.0, seed: int = 0) -> str:
    """`tokens` new tokens after BOS and the prompt, decoded; the prompt is not repeated."""
    ids = [tokenizer.bos_id, *tokenizer.encode(prompt).tolist()]
    out = sample(model, jnp.array([ids]), len(ids) + tokens, temperature=temperature, key=jax.random.key(seed))
    return tokenizer.decode(out[0, len(ids) :].tolist())
