"""Every form of the gate against NumPy written from the paper's equations, in float64 and with a loop over the heads."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gatedattn import gates
from gatedattn.gates import CHOICES, GateSpec

B, T, D, M, H = 2, 3, 8, 4, 5
VALUES = 2 * H  # two value heads


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


NUMPY_ACTIVATIONS = {
    "sigmoid": sigmoid,
    "silu": lambda z: z * sigmoid(z),
    "ns_sigmoid": lambda z: 0.5 + 0.5 * sigmoid(z),
    "tanh": np.tanh,
    "softplus": lambda z: np.log1p(np.exp(z)),
    "identity": lambda z: z,
}


def reference(spec: GateSpec, params: dict, source, y):
    """The gated tensor, token by token and head by head. y: [B, T, M, H], or [B, T, D] for g5."""
    act = NUMPY_ACTIVATIONS[spec.activation]
    params = {name: np.asarray(value, np.float64) for name, value in params.items()}
    headless = spec.position == "g5"
    y = y[:, :, None] if headless else y
    batch, length, heads, width = y.shape
    shared = spec.sharing == "shared"
    logits = np.zeros((batch, length, heads, width))
    for b, t, h in itertools.product(range(batch), range(length), range(heads)):
        if spec.source == "none":
            z = params["table"] if headless or shared else params["table"][h]
        else:
            if spec.source in ("hidden", "value"):
                x = source[b, t, : spec.in_dim] if spec.in_dim else source[b, t]
                w = params["kernel"] if headless or shared else params["kernel"][:, h]
            else:
                x = source[b, t] if headless else source[b, t, h]
                w = params["kernel"] if headless or shared else params["kernel"][h]
            z = x @ w
            if spec.init == "bias":
                z = z + (params["bias"] if headless or shared else params["bias"][h])
        logits[b, t, h] = z  # a headwise score is one number: NumPy spreads it over the channels
    if spec.sharing == "mean_logits":
        logits[:] = logits.mean(2, keepdims=True)
    score = act(logits)
    if spec.sharing == "mean":
        score[:] = score.mean(2, keepdims=True)
    out = y * spec.scale * score if spec.op == "multiply" else y + spec.scale * score
    return out[:, :, 0] if headless else out


def make(spec: GateSpec, seed: int = 0, std: float = 0.6):
    """Random parameters (not the initial ones: zeros would hide mistakes), source and gated tensor."""
    rng = np.random.default_rng(seed)
    params = {
        name: rng.normal(0, std, shape).astype(np.float32)
        for name, shape in gates.parameter_shapes(spec, D, M, H, VALUES).items()
    }
    y = rng.normal(size=(B, T, M, H) if spec.per_head else (B, T, D)).astype(np.float32)
    hidden = rng.normal(size=(B, T, D)).astype(np.float32)
    query = rng.normal(size=(B, T, M, H)).astype(np.float32)
    value = rng.normal(size=(B, T, VALUES)).astype(np.float32)
    sources = {"hidden": hidden, "query": query, "value": value, "slice": hidden.reshape(B, T, M, -1), "self": y, "none": None}
    return params, sources[spec.source], y


def gated(spec, params, source, y):
    return gates.apply(spec, jnp.asarray(y), gates.scores(spec, params, None if source is None else jnp.asarray(source)))


def is_valid(fields: dict) -> bool:
    """The rules of the GateSpec docstring, stated a second time."""
    return not (
        (fields["position"] == "g5" and fields["sharing"] != "specific")
        or (fields["source"] == "query" and fields["position"] not in ("g1", "g4"))
        or (fields["source"] == "value" and fields["position"] != "g1")
        or (fields["source"] == "slice" and fields["position"] == "g5")
        or (fields.get("in_dim", 0) and fields["source"] != "hidden")
        or (fields.get("bias", 0.0) and fields.get("init") != "bias")
    )


@pytest.mark.parametrize(
    "position,source",
    [
        ps
        for ps in itertools.product(CHOICES["position"], CHOICES["source"])
        if is_valid(dict(zip(("position", "source"), ps), sharing="specific"))
    ],
)
def test_every_form_equals_numpy(position, source):
    names = ("granularity", "sharing", "op", "activation")
    # init, scale and in_dim are laid over the product in turn: 3 x 2 x 2 settings against 96 forms a case
    extras = itertools.cycle(itertools.product(CHOICES["init"], (1.0, 1.7), (0, 4)))
    for values in itertools.product(*(CHOICES[name] for name in names)):
        init, scale, in_dim = next(extras)
        fields = dict(zip(names, values), position=position, source=source, init=init, scale=scale)
        fields["in_dim"] = in_dim if source == "hidden" else 0
        if not is_valid(fields):
            continue
        spec = GateSpec(**fields)
        params, x, y = make(spec)
        out = gated(spec, params, x, y)
        assert out.shape == y.shape and out.dtype == jnp.float32
        np.testing.assert_allclose(
            np.asarray(out, np.float64), reference(spec, params, x, y), atol=1e-5, rtol=1e-5, err_msg=str(spec)
        )


@pytest.mark.parametrize(
    "text", ["g1", "g1:headwise", "g1:mean", "g2:shared", "g1:add:silu", "g3:self", "g4:query", "g5", "g1:none"]
)
def test_bfloat16_input_is_scored_in_float32(text):
    spec = GateSpec.parse(text)
    params, x, y = make(spec)
    x16, y16 = (None if a is None else jnp.asarray(a, jnp.bfloat16) for a in (x, y))
    score = gates.scores(spec, params, x16)
    out = gates.apply(spec, y16, score)
    assert score.dtype == jnp.float32 and out.dtype == jnp.bfloat16
    # the matmul rounds the weights to the source's dtype, so the reference gets rounded weights; what is left is one rounding
    rounded = {
        k: v if spec.source == "none" else np.asarray(jnp.asarray(v, jnp.bfloat16), np.float32) for k, v in params.items()
    }
    want = reference(spec, rounded, None if x is None else np.asarray(x16, np.float64), np.asarray(y16, np.float64))
    np.testing.assert_allclose(np.asarray(out, np.float64), want, atol=1e-5, rtol=2**-8)


# --- properties over the whole space of specs --------------------------------------------------------------------------------


@st.composite
def specs(draw, **fixed):
    fields = {name: draw(st.sampled_from(allowed)) for name, allowed in CHOICES.items()} | fixed
    if fields["position"] == "g5":
        fields["sharing"] = "specific"
    if fields["source"] == "query" and fields["position"] not in ("g1", "g4"):
        fields["position"] = draw(st.sampled_from(("g1", "g4")))
    if fields["source"] == "value" or (fields["source"], fields["position"]) == ("slice", "g5"):
        fields["position"] = "g1"
    fields.setdefault("scale", draw(st.sampled_from((0.5, 1.0, 2.0)) | st.floats(1e-3, 10)))
    if fields["init"] == "bias":
        fields["bias"] = draw(st.just(0.0) | st.floats(-3, 3, width=32))
    if fields["source"] == "hidden":
        fields["in_dim"] = draw(st.integers(0, D))
    return GateSpec(**fields)


quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
compiling = settings(quick, max_examples=15)  # every new shape compiles anew


@compiling
@given(specs())
def test_shape_broadcasts_and_gradients_are_finite(spec):
    params, x, y = make(spec)

    def loss(params, x, y):
        score = gates.scores(spec, params, x)
        assert jnp.broadcast_shapes(score.shape, y.shape) == y.shape
        assert score.shape[-1] == (1 if spec.granularity == "headwise" else y.shape[-1])
        return (gates.apply(spec, y, score) ** 2).sum()

    gradients = jax.grad(loss, argnums=(0, 2) if x is None else (0, 1, 2))(params, x, y)
    for leaf in jax.tree.leaves(gradients):
        assert np.isfinite(leaf).all()
    for name, leaf in gradients[0].items():
        assert np.any(np.asarray(leaf)), f"no gradient reaches {name}"


@quick
@given(specs())
def test_any_spec_equals_numpy(spec):
    params, x, y = make(spec, seed=1)
    want = reference(spec, params, x, y)
    np.testing.assert_allclose(np.asarray(gated(spec, params, x, y), np.float64), want, atol=1e-4, rtol=1e-5)


@quick
@given(specs(op="multiply", activation="sigmoid", scale=2.0, init="zeros"))
def test_scale_two_and_zero_init_is_the_identity(spec):
    _, x, y = make(spec)
    params = gates.init(jax.random.key(0), spec, D, M, H, value_dim=VALUES)
    np.testing.assert_array_equal(gated(spec, params, x, y), y)


@quick
@given(specs())
def test_score_depends_on_its_source_and_on_nothing_else(spec):
    params, x, _ = make(spec)
    if spec.source == "none":
        scores = [gates.scores(spec, params, s) for s in (None, jnp.ones((B, T, D)))]
        np.testing.assert_array_equal(*scores)
        return
    before = gates.scores(spec, params, jnp.asarray(x))
    moved = np.array(x)
    moved[0, 1] += 1.0  # one token of one row
    after = gates.scores(spec, params, jnp.asarray(moved))
    changed = np.any(np.asarray(before) != np.asarray(after), axis=tuple(range(2, before.ndim)))
    assert changed[0, 1] and changed.sum() == 1, "a token's score must follow its own source and no other token's"
    if spec.in_dim:
        beyond = np.array(x)
        beyond[..., spec.in_dim :] += 1.0
        np.testing.assert_array_equal(before, gates.scores(spec, params, jnp.asarray(beyond)))


@quick
@given(specs())
def test_short_form_round_trips(spec):
    assert GateSpec.parse(str(spec)) == spec
    assert gates.parse(gates.format((spec,))) == (spec,)


@compiling
@given(specs())
def test_init_has_the_declared_shapes(spec):
    params = gates.init(jax.random.key(0), spec, D, M, H)
    assert {k: v.shape for k, v in params.items()} == gates.parameter_shapes(spec, D, M, H)
    constant = [v for k, v in params.items() if k != "kernel" or spec.init == "zeros"]
    assert all(np.all(np.asarray(v) == np.float32(spec.bias)) for v in constant)


# --- initial values ----------------------------------------------------------------------------------------------------------


def test_normal_init_has_the_stated_std():
    kernel = gates.init(jax.random.key(0), GateSpec(), 256, 8, 32)["kernel"]
    assert abs(float(kernel.std()) - gates.INIT_STD) < 2e-4 and abs(float(kernel.mean())) < 3e-4


def test_bias_opens_the_gate_as_far_as_asked():
    spec = GateSpec.parse("g1:headwise:bias=-1.0986123")
    params = gates.init(jax.random.key(0), spec, D, M, H)
    score = gates.scores(spec, params, jnp.zeros((1, 1, D)))
    np.testing.assert_allclose(score, 0.25, atol=1e-6)


def test_input_independent_gate_starts_half_open():
    spec = GateSpec.parse("g1:none")
    score = gates.scores(spec, gates.init(jax.random.key(0), spec, D, M, H), None)
    assert score.shape == (M, H) and np.all(np.asarray(score) == 0.5)


# --- refusals ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHOICES)
def test_unknown_value_names_field_value_and_alternatives(name):
    with pytest.raises(ValueError) as error:
        GateSpec(**{name: "nonsense"})
    message = str(error.value)
    assert f"GateSpec.{name}='nonsense'" in message and all(word in message for word in CHOICES[name])


def test_unknown_value_suggests_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'headwise'"):
        GateSpec(granularity="headwize")


@pytest.mark.parametrize(
    "fields,named,allowed",
    [
        ({"position": "g5", "sharing": "mean"}, "sharing='mean'", "specific"),
        ({"position": "g5", "sharing": "mean_logits"}, "sharing='mean_logits'", "specific"),
        ({"position": "g5", "sharing": "shared"}, "sharing='shared'", "specific"),
        *[({"position": p, "source": "query"}, "source='query'", "hidden, self or none") for p in ("g2", "g3", "g5")],
        *[({"position": p, "source": "value"}, "source='value'", "hidden, self or none") for p in ("g2", "g4", "g5")],
        ({"position": "g5", "source": "slice"}, "source='slice'", "hidden, self or none"),
        *[({"source": s, "in_dim": 3}, "in_dim=3", "must be 0") for s in ("query", "value", "slice", "self", "none")],
        *[({"init": i, "bias": 0.5}, "bias=0.5", "init=bias") for i in ("normal", "zeros")],
        ({"scale": 0}, "scale=0", "positive"),
        ({"scale": -1.0}, "scale=-1.0", "positive"),
        ({"scale": float("nan")}, "scale=nan", "finite"),
        ({"scale": "2"}, "scale='2'", "finite number"),
        ({"scale": True}, "scale=True", "finite number"),
        ({"init": "bias", "bias": float("inf")}, "bias=inf", "finite"),
        ({"in_dim": -1}, "in_dim=-1", "0 for all"),
        ({"in_dim": 1.5}, "in_dim=1.5", "whole number"),
        ({"in_dim": True}, "in_dim=True", "whole number"),
        ({"position": ["g1"]}, "position=['g1']", "g1, g2, g3, g4, g5"),
    ],
)
def test_invalid_combinations_are_refused(fields, named, allowed):
    with pytest.raises(ValueError) as error:
        GateSpec(**fields)
    assert f"GateSpec.{named}" in str(error.value) and allowed in str(error.value)


def test_exactly_the_meaningless_combinations_are_refused():
    names = [n for n in CHOICES if n not in ("op", "activation", "granularity")]
    for values in itertools.product(*(CHOICES[n] for n in names), (0.0, 0.5), (0, 3)):
        fields = dict(zip([*names, "bias", "in_dim"], values))
        try:
            GateSpec(**fields)
            accepted = True
        except ValueError:
            accepted = False
        assert accepted == is_valid(fields), fields


# --- the short form ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text,spec",
    [
        ("g1", GateSpec()),
        ("sdpa", GateSpec()),
        ("value:headwise", GateSpec(position="g2", granularity="headwise")),
        ("g1:elementwise:mean:add:silu", GateSpec(sharing="mean", op="add", activation="silu")),
        ("query:query", GateSpec(position="g4", source="query")),
        ("g1:silu:add", GateSpec(op="add", activation="silu")),
        ("g1:headwise:scale=2:zeros:in_dim=12", GateSpec(granularity="headwise", scale=2.0, init="zeros", in_dim=12)),
        ("g1:bias=-1.1", GateSpec(init="bias", bias=-1.1)),
        ("g1:bias", GateSpec(init="bias")),
        ("g1:bias:bias=0.5", GateSpec(init="bias", bias=0.5)),
        ("g1:none:zeros", GateSpec(source="none")),
        (" g5 ", GateSpec(position="g5")),
    ],
)
def test_short_form(text, spec):
    assert GateSpec.parse(text) == spec


@pytest.mark.parametrize("text", ["g1", "g1:headwise", "g2:mean:add:silu", "g1:none", "g1:headwise:bias=-1.1"])
def test_canonical_short_forms_are_their_own_str(text):
    assert str(GateSpec.parse(text)) == text


@pytest.mark.parametrize(
    "text,message",
    [
        ("g6", "g1, g2, g3, g4, g5"),
        ("g1:headwize", "did you mean 'headwise'"),
        ("g1:headwise:elementwise", "granularity is given twice"),
        ("g1:silu:silu", "activation is given twice"),
        ("g1:scale=two", "needs a number"),
        ("g1:in_dim=1.5", "needs a number"),
        ("g1:width=3", "unknown setting 'width=3'"),
        ("g1:scale=1:scale=2", "scale is given twice"),
        ("g1:zeros:bias=0.5", "zeros"),
        ("g1:bias=0.5:zeros", "zeros|twice"),
        ("", "must be one of"),
    ],
)
def test_short_form_errors(text, message):
    with pytest.raises(ValueError, match=message):
        GateSpec.parse(text)


def test_layer_of_gates_from_any_spelling():
    both = (GateSpec(), GateSpec(position="g2"))
    assert gates.parse("g1+g2") == gates.parse(["g1", GateSpec(position="g2")]) == gates.parse(" g1 + value ") == both
    assert gates.parse("none") == gates.parse("") == gates.parse(None) == gates.parse(()) == ()
    assert gates.parse(GateSpec()) == (GateSpec(),)
    assert gates.format(both) == "g1+g2" and gates.format(()) == "none"
    with pytest.raises(ValueError, match="twice"):
        gates.parse("g1+sdpa")


def test_spec_is_a_frozen_hashable_value():
    assert len({GateSpec(), GateSpec.parse("sdpa"), GateSpec(scale=1)}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        GateSpec().position = "g2"
