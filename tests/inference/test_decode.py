import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gatedattn.config import ConfigError, MoEConfig, NSAConfig, SwitchConfig
from gatedattn.inference import CachePolicy, Generator, decode, generate
from gatedattn.inference.sampling import Kind, Sampling, choose

RNG = np.random.default_rng(2)
PROMPTS = [RNG.integers(0, 61, n).tolist() for n in (5, 18, 1)]


def check_greedy(model, prompts, outputs):
    """Every generated token is the most likely one of a full forward pass over the whole row."""
    longest = max(len(p) + len(o) for p, o in zip(prompts, outputs, strict=True))
    rows = np.array([p + o + [0] * (longest - len(p) - len(o)) for p, o in zip(prompts, outputs, strict=True)])
    graphdef, params = nnx.split(model)
    logits = np.asarray(jax.jit(lambda params: nnx.merge(graphdef, params)(rows)[0])(params))
    for row, prompt, output in zip(logits, prompts, outputs, strict=True):
        at = row[len(prompt) - 1 : len(prompt) + len(output) - 1]
        np.testing.assert_allclose(at[np.arange(len(output)), output], at.max(-1), atol=1e-4)


def run(generator, prompts, **options):
    pieces = np.concatenate(list(generator.stream(prompts, **options)), axis=1)
    return [row[row >= 0].tolist() for row in pieces]


@pytest.mark.slow
def test_prompts_of_unequal_length_and_ways_to_visit_the_layers(model):
    """Unrolled with transposed weights, the same with a batch of one, and by a scan."""
    outputs = generate(model, PROMPTS, max_tokens=20)
    assert [len(o) for o in outputs] == [20, 20, 20]
    check_greedy(model, PROMPTS, outputs)
    assert generate(model, PROMPTS[:1], max_tokens=20) == outputs[:1]
    assert run(Generator(model, unroll=False), PROMPTS, max_tokens=20) == outputs


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        dict(gates="g1:headwise+g4:query+g5:self:headwise", tie_embeddings=False, attention_bias=True),
        dict(
            gates="g1+g2:shared+g3:in_dim=4",
            moe=MoEConfig(num_experts=4, top_k=2, expert_dim=8, shared_dim=8, shared_gate=True),
        ),
        dict(gates="g1:value", registers=3, pattern="window=4|window=0", switch=SwitchConfig("kvo", num_experts=2)),
        dict(nsa=NSAConfig(True, compress_block=2, compress_stride=1, select_block=2, select_count=3, window=3)),
        dict(remat="attn"),
    ],
    ids=["untied", "moe", "registers, experts", "nsa", "remat"],
)
def test_rearranged_weights_compute_the_same(build, changes):
    model = build(**changes)
    check_greedy(model, PROMPTS, generate(model, PROMPTS, max_tokens=4))


@pytest.mark.slow
def test_long_prompts_pass_in_pieces(model, monkeypatch):
    monkeypatch.setattr(decode, "PREFILL", 8)
    check_greedy(model, PROMPTS, generate(model, PROMPTS, max_tokens=2))


def test_stop_tokens_end_a_row(model):
    free = generate(model, PROMPTS, max_tokens=20)
    stop = free[0][7]
    stopped = generate(model, PROMPTS, max_tokens=20, stop=[stop, 60])
    for whole, cut in zip(free, stopped, strict=True):
        ends = [i for i, token in enumerate(whole) if token in (stop, 60)]
        assert cut == whole[: min(ends, default=20)]


def test_draws_depend_on_the_seed_alone(model):
    options = dict(max_tokens=8, temperature=1.5, top_k=20, top_p=0.9)
    draws = generate(model, PROMPTS[:2], seed=1, **options)
    assert draws == generate(model, PROMPTS[:2], seed=1, **options)
    assert draws != generate(model, PROMPTS[:2], seed=2, **options)


@pytest.mark.slow
def test_the_decode_step_writes_its_cache_in_place(model, optimized):
    """A step makes no copy of the cache: its buffers are donated, and what it needs besides does not grow with them."""
    temporary = {}
    for columns in (256, 4096):
        generator = Generator(model)
        tokens, padding = generator._pad(PROMPTS[:1], 4)
        request = decode.Request(jax.random.split(jax.random.key(0), 1), jnp.float32(0), jnp.float32(1), jnp.array([-1]))
        static = dict(graphdef=generator.graphdef, policy=CachePolicy(), kind=Kind.of(Sampling()))
        prefill = dict(columns=columns, cache_dtype=jnp.dtype("float32"), unstack=True)
        state = jax.eval_shape(lambda r: decode._prefill(generator.params, tokens, padding, r, **static, **prefill), request)
        stored = generator._arranged(False)
        memory = decode._decode.lower(generator.params, stored, state, request, jnp.int32(4), transpose=False, **static)
        memory = memory.compile().memory_analysis()
        cache = sum(x.size * 4 for x in jax.tree.leaves(state.caches))
        assert memory.alias_size_in_bytes >= cache
        temporary[columns] = memory.temp_size_in_bytes / cache
    assert temporary[4096] < 0.75, temporary


@pytest.mark.slow
def test_square_matrices_are_told_apart_by_name(build):
    """Several rows decode with transposed weights, one row without: with F = D = N H the shapes do not tell which is which."""
    model = build(ffn_dim=16, head_dim=4, tie_embeddings=False)
    together = generate(model, PROMPTS[:2], max_tokens=6)
    assert together == [generate(model, [prompt], max_tokens=6)[0] for prompt in PROMPTS[:2]]


@pytest.mark.parametrize("policy", [pytest.param(p, marks=pytest.mark.slow) for p in ("window:3", "streaming:2+3")])
def test_a_policy_decides_what_generation_sees(build, model, policy):
    outputs = generate(model, PROMPTS, max_tokens=12, policy=policy)
    assert run(Generator(model, policy, unroll=False), PROMPTS, max_tokens=12) == outputs
    assert generate(model, PROMPTS[:1], max_tokens=12, policy=policy) == outputs[:1]
    if policy == "window:3":
        check_greedy(build(window=3), PROMPTS, outputs)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("axes", [dict(data=2, tensor=2), dict(fsdp=2)])
def test_a_mesh_changes_nothing(model, axes, kind):
    from gatedattn import sharding

    prompts = PROMPTS[:2]
    expected = generate(model, prompts, max_tokens=4)
    kinds = (jax.sharding.AxisType[kind],) * len(axes)
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=kinds)
    graphdef, params = nnx.split(model)
    with jax.set_mesh(mesh):
        placed = nnx.merge(graphdef, jax.device_put(params, sharding.shardings(params, mesh)))
        assert generate(placed, prompts, max_tokens=4) == expected


def chosen(logits, sampling, draws=400):
    rows = jnp.tile(jnp.array(logits, jnp.float32), (draws, 1))
    keys = jax.random.split(jax.random.key(sampling.seed), draws)
    pick = jax.jit(lambda *a: choose(Kind.of(sampling), *a))
    return (
        np.bincount(pick(rows, keys, jnp.float32(sampling.temperature), jnp.float32(sampling.top_p)), minlength=len(logits))
        / draws
    )


def test_sampling_follows_the_distribution():
    probs = np.array([0.4, 0.3, 0.15, 0.1, 0.05])
    logits = np.log(probs)
    assert chosen(logits, Sampling()).tolist() == [1, 0, 0, 0, 0]
    assert np.abs(chosen(logits, Sampling(1.0), 4000) - probs).max() < 0.04
    hot = probs**0.5 / (probs**0.5).sum()
    assert np.abs(chosen(logits, Sampling(2.0), 4000) - hot).max() < 0.04
    assert chosen(logits, Sampling(1e-30)).tolist() == [1, 0, 0, 0, 0]
    assert (chosen(logits, Sampling(1.0, top_k=2)) > 0).tolist() == [True, True, False, False, False]
    assert (chosen(logits, Sampling(1.0, top_p=0.75)) > 0).tolist() == [True, True, True, False, False]
    assert (chosen(logits, Sampling(1.0, top_p=0.1)) > 0).tolist() == [True, False, False, False, False]
    assert (chosen(logits, Sampling(1.0, top_k=2, top_p=0.9)) > 0).tolist() == [True, True, False, False, False]


@pytest.mark.parametrize(
    "options,message",
    [
        (dict(temperature=-1.0), "temperature=-1"),
        (dict(temperature=float("nan")), "temperature=nan"),
        (dict(top_p=1.5), r"top_p=1.5: must be in \(0, 1\]"),
        (dict(top_p=0.0), "top_p=0"),
        (dict(top_k=-1), "top_k=-1"),
        (dict(seed=-1), "seed=-1"),
        (dict(max_tokens=0), "max_tokens=0"),
        (dict(policy="ring"), "cache='ring'"),
        (dict(prompts=[[]]), "empty prompt"),
        (dict(prompts=[[61]]), r"token 61: must be in \[0, 61\)"),
    ],
)
def test_refusals(model, options, message):
    with pytest.raises(ConfigError, match=message):
        generate(model, **dict(prompts=[[1]], max_tokens=2) | options)


def test_learned_positions_are_limited(build):
    learned = build(position="learned", max_seq_len=8)
    assert len(generate(learned, [[1] * 7], max_tokens=2)[0]) == 2
    with pytest.raises(ConfigError, match="7 tokens and max_tokens=3 need 9 positions, and the model has learned 8"):
        generate(learned, [[1] * 7], max_tokens=3)
    with pytest.raises(ConfigError, match="streaming:2.4: learned positions"):
        generate(learned, [[1]], max_tokens=3, policy="streaming:2+4")
