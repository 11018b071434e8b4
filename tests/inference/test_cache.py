"""A model that reads through the cache computes what it computes without: for every kind of layer, and every policy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gatedattn.config import ConfigError, MoEConfig, NSAConfig, RopeConfig, SwitchConfig
from gatedattn.inference import CachePolicy, Generator, score
from gatedattn.inference.cache import KVCache
from gatedattn.inference.decode import forward
from gatedattn.layers import rope as rope_lib

B, T = 2, 14
TOKENS = np.random.default_rng(1).integers(0, 61, (B, T))
FULL = CachePolicy()

NSA = NSAConfig(enabled=True, compress_block=2, compress_stride=1, select_block=2, select_count=3, window=3)
CONFIGS = {
    "hidden gates": dict(gates="g1+g2:headwise+g3:mean+g4:headwise:shared+g5:headwise"),
    "query and self gates": dict(gates="g1:query+g4:query:headwise+g2:self+g3:self:shared+g5:self"),
    "value and slice gates": dict(gates="g1:headwise:value+g1:slice+g2:slice:headwise"),
    "input-independent gates": dict(gates="g1:none+g2:none+g3:none:headwise+g4:none:shared+g5:none:add"),
    "window": dict(window=3),
    "learned sink": dict(sink="learned", gates="none"),
    "off by one": dict(sink="off_by_one", window=5, sdpa_norm=True, sdpa_activation="silu"),
    "sigmoid": dict(attention="sigmoid", sigmoid_length=T, window=5),
    "softpick": dict(attention="softpick"),
    "registers": dict(registers=3, window=5, sink="learned", pattern="window=4|window=0"),
    "switch": dict(switch=SwitchConfig("kvo", num_experts=4, top_k=2, query_routers=True), gates="g2:headwise"),
    "nsa": dict(nsa=NSA),
    "nsa, shared and dense": dict(nsa=NSAConfig(enabled=True, separate=False, sparse=False), gates="g1"),
    "linear": dict(rope=RopeConfig(scaling="linear", factor=4.0), gates="g1:headwise"),
    "yarn": dict(rope=RopeConfig(scaling="yarn", factor=4.0, original_max_len=64, fraction=0.5, theta=100.0)),
    "learned positions": dict(position="learned", max_seq_len=T, tie_embeddings=False, qk_norm=False, embedding_scale=2.0),
    "nope": dict(position="none", num_kv_heads=1, sandwich_norm=True, norm_gate=3, activation_clip=2.0),
    "biases": dict(qk_norm=False, attention_bias=True, output_bias=True, num_kv_heads=4, norm_zero_centered=True),
    "moe": dict(moe=MoEConfig(num_experts=4, top_k=2, expert_dim=8, shared_dim=8, shared_gate=True)),
}


def read(model, tokens, *pieces, policy=FULL, padding=0):
    """Logits of all tokens, read through a cache after `padding` columns of nothing; (3, 5): three chunks of five tokens."""
    tokens = jnp.pad(tokens, ((0, 0), (padding, 0)))
    carry, out = (KVCache.empty(model.config, policy, *tokens.shape), jnp.int32(0)), []
    for times, size in pieces:

        def chunk(carry, tokens, size=size):
            caches, column = carry
            x, caches = forward(model, tokens, caches, column, jnp.full(len(tokens), padding), policy)
            return (caches, column + size), model.logits(x)

        some, tokens = jnp.split(tokens, [times * size], axis=1)
        carry, logits = jax.lax.scan(chunk, carry, some.reshape(B, times, size).swapaxes(0, 1))
        out.append(logits.swapaxes(0, 1).reshape(B, times * size, -1))
    return jnp.concatenate(out, axis=1)[:, padding:], carry[0]


def compiled(f, model, *args):
    """f(model) in one program; level 0 halves the time that it takes to compile."""
    graphdef, params = nnx.split(model)
    return jax.jit(
        lambda params: f(nnx.merge(graphdef, params), *args), compiler_options={"xla_backend_optimization_level": 0}
    )(params)


# By default those that the cache itself must know of; the others only change what surrounds it.
AROUND = (
    "linear",
    "biases",
    "learned positions",
    "nope",
    "input-independent gates",
    "hidden gates",
    "query and self gates",
    "value and slice gates",
    "switch",
    "nsa, shared and dense",
    "moe",
)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in AROUND else n for n in CONFIGS])
def test_cached_logits_equal_the_full_forward_pass(build, name):
    """Two chunks of six, with four columns of padding before the first token, then six tokens one by one."""
    full, cached = compiled(
        lambda model: (model(TOKENS)[0], read(model, TOKENS, (2, 6), (6, 1), padding=4)[0]), build(**CONFIGS[name])
    )
    assert full.std() > 0.1
    np.testing.assert_allclose(cached, full, atol=1e-5)


@pytest.mark.parametrize("pieces", [((14, 1),), ((1, 14),), ((3, 4), (1, 2))])
def test_the_way_of_reading_does_not_matter(build, pieces):
    full, cached = compiled(lambda model: (model(TOKENS)[0], read(model, TOKENS, *pieces)[0]), build(num_layers=1))
    np.testing.assert_allclose(cached, full, atol=1e-5)


def test_window_policy_equals_a_model_with_that_window(build):
    logits, caches = compiled(lambda model: read(model, TOKENS, (2, 5), (4, 1), policy=CachePolicy.parse("window:3")), build())
    assert caches.keys.shape == (2, B, 2, 3, 8)
    np.testing.assert_allclose(logits, compiled(lambda model: model(TOKENS)[0], build(window=3)), atol=1e-5)


class Recomputed:
    """Streaming attention by its definition: for each query the kept tokens are gathered and stand at 0, 1, 2, ..."""

    def __init__(self, sinks, window):
        self.sinks, self.window = sinks, window

    def attend(self, q, k, v, *, rope, window, weights, prefix):
        T, M, H = q.shape[1], self.sinks + self.window, q.shape[-1]
        kept = [[s for s in range(t + 1) if s < self.sinks or s > t - self.window] for t in range(T)]
        count = np.array([len(row) for row in kept])
        index = np.array([row + [0] * (M - len(row)) for row in kept])  # [T, M]
        query, keys = q, k[:, index].reshape(-1, M, k.shape[2], H)
        if rope is not None:
            query = rope_lib.apply(q, np.broadcast_to(count - 1, q.shape[:2]), rope)
            keys = rope_lib.apply(keys, np.broadcast_to(np.arange(M), keys.shape[:2]), rope)
        keys, values = (
            jnp.repeat(z.reshape(-1, T, M, k.shape[2], H), q.shape[2] // k.shape[2], axis=3) for z in (keys, v[:, index])
        )
        scores = jnp.einsum("btnh,btmnh->bntm", query, keys) / np.sqrt(H)
        scores = jnp.where(np.arange(M) < count[:, None], scores, -jnp.inf)
        y = jnp.einsum("bntm,btmnh->btnh", jax.nn.softmax(scores), values)
        return y, jax.nn.logsumexp(scores, axis=-1), self


def recomputed(model, sinks, window):
    x = model.embed(TOKENS, jnp.broadcast_to(jnp.arange(T), TOKENS.shape))
    graphdef, params = nnx.split(model.layers)
    for i in range(model.config.num_layers):
        layer = nnx.merge(graphdef, jax.tree.map(lambda p, i=i: p[i], params))
        x = layer(x, cache=Recomputed(sinks, window))[0]
    return model.logits(model.final_norm(x))


@pytest.mark.parametrize(
    "sinks,changes", [(2, {}), (0, dict(sink="learned")), pytest.param(4, dict(position="none"), marks=pytest.mark.slow)]
)
def test_streaming_policy_equals_a_dense_recomputation(build, sinks, changes):
    policy = CachePolicy.parse(f"streaming:{sinks}+4")

    def both(model):
        return recomputed(model, sinks, 4), *read(model, TOKENS, (2, 5), (6, 1), policy=policy, padding=2)

    expected, logits, caches = compiled(both, build(**changes))
    assert caches.keys.shape[3] + caches.sink_keys.shape[3] == 4 + sinks
    np.testing.assert_allclose(logits, expected, atol=1e-5)


@pytest.mark.parametrize("changes", [dict(window=4), dict(pattern="window=4|window=0")], ids=str)
def test_kept_tokens_obey_a_layers_own_window(build, changes):
    """While nothing is gone a streaming policy is the full pass, whatever it keeps for later."""
    model = build(**changes)
    np.testing.assert_allclose(score(model, TOKENS, "streaming:2+100"), score(model, TOKENS), atol=1e-5)


@pytest.mark.parametrize("policy", ["full", pytest.param("window:4", marks=pytest.mark.slow), "streaming:2+4"])
def test_score_does_not_depend_on_the_chunk(model, policy):
    scores = [score(model, TOKENS, policy, chunk=chunk) for chunk in (1, 5)]
    assert scores[0].shape == (B, T - 1)
    for other in scores[1:]:
        np.testing.assert_allclose(other, scores[0], atol=1e-5)
    if policy == "full":
        logprobs = compiled(lambda model: jax.nn.log_softmax(model(TOKENS)[0]), model)
        np.testing.assert_allclose(scores[0], np.take_along_axis(logprobs[:, :-1], TOKENS[:, 1:, None], -1)[..., 0], atol=1e-5)


def test_bfloat16_cache_stays_close(model):
    def both(model):
        caches = KVCache.empty(model.config, FULL, B, T, jnp.bfloat16)
        x, caches = forward(model, TOKENS, caches, jnp.int32(0), jnp.zeros(B, int), FULL)
        assert caches.keys.dtype == jnp.bfloat16
        return model(TOKENS)[0], model.logits(x)

    full, low = compiled(both, model)
    np.testing.assert_allclose(low, full, atol=0.03 * np.abs(full).max())


def test_policies_round_trip_and_refuse(build):
    for text in ("full", "window:512", "streaming:4+508", "streaming:0+8"):
        assert str(CachePolicy.parse(text)) == text
    for text in ("", "ring", "window", "window:0", "streaming:4", "streaming:4+0", "window:-1"):
        with pytest.raises(ConfigError, match="full, window:512 or streaming"):
            CachePolicy.parse(text)
    for changes, message in ((dict(position="learned"), "learned positions"), (dict(nsa=NSA), "native sparse attention")):
        for use in (Generator, lambda *args: score(args[0], TOKENS, args[1])):  # before anything is read
            with pytest.raises(ConfigError, match=message):
                use(build(**changes), "streaming:2+4")
