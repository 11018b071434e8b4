"""Generation with a cache: the whole prompt at once, then a token at a time in a loop that stays on the device."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Int32, PRNGKeyArray, PyTree

from gatedattn.config import ConfigError, TransformerConfig
from gatedattn.inference import weights
from gatedattn.inference.cache import CachePolicy, KVCache, LayerCache
from gatedattn.inference.sampling import Kind, Sampling, choose
from gatedattn.kernels.prefix import Prefix
from gatedattn.linear import transposed_weights
from gatedattn.sharding import constrain
from gatedattn.transformer import Transformer

PREFILL = 256  # prompt tokens that pass through the layers together
CHUNK = 16  # new tokens between two looks of the host


class State(NamedTuple):
    """Where generation stands. `token` is chosen but not yet fed; `column` is where it will go."""

    caches: KVCache | list[KVCache]  # stacked, or one per layer
    token: Int[Array, " B"]
    done: Bool[Array, " B"]
    column: Int[Array, ""]
    padding: Int[Array, " B"]
    step: Int[Array, ""]
    prefix: list[Prefix | None]


class Request(NamedTuple):
    """What is asked for, as arrays: changing it compiles nothing anew."""

    keys: PRNGKeyArray  # [B]
    temperature: Float[Array, ""]
    top_p: Float[Array, ""]
    stop: Int[Array, " n"]


def forward(
    model: Transformer,
    tokens: Int[Array, "B T"],
    caches: KVCache | list[KVCache],
    column: Int[Array, ""],
    padding: Int[Array, " B"],
    policy: CachePolicy,
    layers: list[PyTree] | None = None,
    prefix: list[Prefix | None] | None = None,
) -> tuple[Float[Array, "B T D"], KVCache | list[KVCache]]:
    """The final hidden states of T new tokens, and the caches with these in them.

    Scans over the model's stacked layers with a stacked cache; or, given `layers` and a list of caches, loops over these. `prefix`:
    what `model.prefix()` returned, if that is known already.
    """
    prefix = model.prefix() if prefix is None else prefix
    positions = jnp.maximum(column + jnp.arange(tokens.shape[1]) - padding[:, None], 0)
    if model.position is not None:  # padding after a text may stand beyond the table
        positions = jnp.minimum(positions, model.config.max_seq_len - 1)
    x = model.embed(tokens, positions)
    graphdefs, stacked = zip(*map(nnx.split, model.stacks), strict=True)
    P = len(stacked)

    def block(number, x, params, prefix, arrays, layer):
        cache = LayerCache(arrays, layer, column, padding, policy)
        x, aux = nnx.merge(graphdefs[number % P], params)(x, positions, cache=cache, prefix=prefix)
        return x, aux["cache"].arrays

    if layers is not None:
        grown = []
        for number, (params, arrays) in enumerate(zip(layers, caches, strict=True)):
            own = jax.tree.map(lambda z: z[number // P], prefix[number % P])
            x, arrays = block(number, x, params, own, arrays, None)
            grown.append(arrays)
        return model.final_norm(x), grown

    def body(carry, period):
        x, caches, layer = carry
        for number, (params, own) in enumerate(zip(*period, strict=True)):
            x, caches = block(number, x, params, own, caches, layer)
            layer = layer + 1
        return (x, caches, layer), None

    (x, caches, _), _ = jax.lax.scan(body, (x, caches, jnp.int32(0)), (stacked, tuple(prefix)))
    return model.final_norm(x), caches


def _advance(kind: Kind, logits, state: State, request: Request) -> State:
    keys = jax.vmap(jax.random.fold_in, (0, None))(request.keys, state.step)
    logits = constrain(logits, "..")  # each device chooses all rows' tokens
    token = choose(kind, logits, keys, request.temperature, request.top_p)
    done = state.done | (token[:, None] == request.stop).any(-1)
    return state._replace(token=token, done=done, step=state.step + 1)


@functools.partial(jax.jit, static_argnames=("graphdef", "policy", "kind", "columns", "cache_dtype", "unstack"))
def _prefill(params, tokens, padding, request, *, graphdef, policy, kind, columns, cache_dtype, unstack) -> State:
    """Feed the prompts, in pieces of at most PREFILL tokens, and choose the first new token."""
    model = nnx.merge(graphdef, params)
    B, P = tokens.shape
    size = min(P, PREFILL)
    caches, prefix = KVCache.empty(model.config, policy, B, columns, cache_dtype), model.prefix()

    def piece(carry, tokens):
        caches, column = carry
        x, caches = forward(model, tokens, caches, column, padding, policy, prefix=prefix)
        return (caches, column + size), x[:, -1:]

    start = (caches, jnp.int32(0))
    (caches, column), last = jax.lax.scan(piece, start, tokens.reshape(B, -1, size).swapaxes(0, 1))
    logits = model.logits(last[-1])[:, 0]
    if unstack:
        caches = caches.unstack()
    state = State(caches, jnp.zeros(B, jnp.int32), jnp.zeros(B, bool), column, padding, jnp.int32(0), prefix)
    return _advance(kind, logits, state, request)


@functools.partial(jax.jit, static_argnames=("graphdef", "policy", "kind", "transpose"), donate_argnames="state")
def _decode(params, stored, state, request, steps, *, graphdef, policy, kind, transpose) -> tuple[State, Int[Array, "B CHUNK"]]:
    """Up to `steps` more tokens (at most CHUNK); -1 for rows that are done."""
    layers = None
    if stored:
        config = nnx.merge(graphdef, params).config
        params, layers = weights.restore(params, stored, config, transpose=transpose)
    model = nnx.merge(graphdef, params)
    transpose_head = transpose or (stored is not None and model.head is None)  # a tied table lies as [V, D]

    def lies(transposed: bool):
        return transposed_weights() if transposed else nullcontext()

    def body(carry):
        i, state, out = carry
        with lies(transpose):
            x, caches = forward(
                model, state.token[:, None], state.caches, state.column, state.padding, policy, layers, state.prefix
            )
        with lies(transpose_head):
            logits = model.logits(x)[:, 0]
        state = _advance(kind, logits, state._replace(caches=caches, column=state.column + 1), request)
        return i + 1, state, out.at[:, i].set(jnp.where(state.done, -1, state.token))

    def unfinished(carry):
        i, state, _ = carry
        return (i < steps) & ~state.done.all()

    out = jnp.full((len(state.token), CHUNK), -1, jnp.int32)
    _, state, out = jax.lax.while_loop(unfinished, body, (jnp.int32(0), state, out))
    return state, out


class Generator:
    """A model made ready to generate: its weights are arranged once, and programs compiled once per shape.

    Args:
        policy: what the cache keeps, see `CachePolicy`.
        cache_dtype: of cached keys and values; the model's computation dtype by default.
        unroll: loop over the layers in Python, with a copy of their weights, one tree per layer, rather than scan. The default
            on CPUs without a mesh, where it is several times faster (a scan copies the weights of each layer that it visits).

    Raises:
        ConfigError: a policy that is none, or that the model cannot have (`CachePolicy.of`).
    """

    def __init__(self, model: Transformer, policy: str | CachePolicy = "full", *, cache_dtype=None, unroll: bool | None = None):
        self.config: TransformerConfig = model.config
        self.policy = CachePolicy.of(policy, model.config)
        self.graphdef, params = nnx.split(model)
        params = nnx.as_pure(params)
        meshless = jax.sharding.get_abstract_mesh().empty
        self.unroll = jax.default_backend() == "cpu" and meshless if unroll is None else unroll
        self.can_transpose = self.unroll and jax.default_backend() == "cpu" and meshless
        self.cache_dtype = jnp.dtype(cache_dtype or self.config.dtype)
        self.params = jax.jit(weights.cast, static_argnames="config")(params, config=self.config)
        self._stored: dict[bool, tuple] = {}

    def stream(
        self, prompts: Sequence[Sequence[int]], *, max_tokens: int, sampling: Sampling = Sampling(), stop: Sequence[int] = ()
    ) -> Iterator[Int32[np.ndarray, "B n"]]:
        """New tokens, in pieces of up to CHUNK for all rows at once; -1 from where a row has met one of `stop`."""
        tokens, padding = self._pad(prompts, max_tokens)
        kind, B = Kind.of(sampling), len(prompts)
        request = Request(
            jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(sampling.seed), jnp.arange(B)),
            jnp.float32(sampling.temperature),
            jnp.float32(sampling.top_p),
            jnp.array([*stop] or [-1], jnp.int32),
        )
        columns = -(-(tokens.shape[1] + max_tokens) // 64) * 64
        static = dict(graphdef=self.graphdef, policy=self.policy, kind=kind)
        state = _prefill(
            self.params, tokens, padding, request, columns=columns, cache_dtype=self.cache_dtype, unstack=self.unroll, **static
        )
        done = np.asarray(state.done)
        yield np.where(done, -1, np.asarray(state.token))[:, None]
        transpose = self.can_transpose and B > 1
        stored = self._arranged(transpose) if self.unroll and max_tokens > 1 else None
        left = max_tokens - 1
        while left > 0 and not done.all():
            steps = min(left, CHUNK)
            state, out = _decode(self.params, stored, state, request, jnp.int32(steps), transpose=transpose, **static)
            done, left = np.asarray(state.done), left - steps
            yield np.asarray(out)[:, :steps]

    def _arranged(self, transpose: bool) -> tuple:
        if transpose not in self._stored:
            self._stored[transpose] = weights.store(self.params, self.config, transpose=transpose)
        return self._stored[transpose]

    def _pad(self, prompts, max_tokens: int) -> tuple[Int32[np.ndarray, "B P"], Int32[np.ndarray, " B"]]:
        """The prompts, right-aligned; their length rounded up, so that few lengths are compiled."""
        if max_tokens < 1:
            raise ConfigError(f"max_tokens={max_tokens}: must be at least 1")
        if not len(prompts) or not all(map(len, prompts)):
            raise ConfigError("an empty prompt has no next token: begin it with the tokenizer's bos_id")
        lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        longest, V = int(lengths.max()), self.config.vocab_size
        if self.config.position == "learned" and longest + max_tokens - 1 > self.config.max_seq_len:
            raise ConfigError(
                f"a prompt of {longest} tokens and max_tokens={max_tokens} need {longest + max_tokens - 1} positions, "
                f"and the model has learned {self.config.max_seq_len}: shorten the one or lower the other"
            )
        unit = 16 if longest <= PREFILL else PREFILL
        P = -(-longest // unit) * unit
        tokens = np.zeros((len(prompts), P), np.int32)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[P - len(prompt) :] = prompt
        if (strange := tokens[(tokens < 0) | (tokens >= V)]).size:
            raise ConfigError(f"a prompt holds token {strange[0]}: must be in [0, {V})")
        return tokens, P - lengths


def generate(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    stop: Sequence[int] = (),
    policy: str | CachePolicy = "full",
) -> list[list[int]]:
    """Up to `max_tokens` new tokens after each prompt. A row ends at one of the tokens in `stop`, which is not returned.

    Prompts may differ in length and do not influence each other. See `Sampling` for how tokens are chosen and `CachePolicy` for
    the policies. To generate again with the same model, hold a `Generator`: it arranges the weights once.

    Raises:
        ConfigError: a value outside its range, an empty prompt, more tokens than learned positions.
    """
    sampling = Sampling(temperature, top_k, top_p, seed)
    pieces = Generator(model, policy).stream(prompts, max_tokens=max_tokens, sampling=sampling, stop=stop)
    tokens = np.concatenate(list(pieces), axis=1)
    return [row[row >= 0].tolist() for row in tokens]
