"""Every attention implementation against a loop in float64, against JAX's own attention, and for isolation of documents."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from gatedattn import kernels, sharding
from gatedattn.config import KERNELS
from gatedattn.kernels import CAPABILITIES, Request, chunked, reference

PALLAS = ("splash", "triton")  # their programs also run step by step on a CPU


def here(name):
    """Whether an implementation can run on this machine, perhaps interpreted."""
    row = CAPABILITIES[name]
    packages = not row.requires or importlib.util.find_spec(row.requires)
    return name in PALLAS or (packages and (not row.platforms or jax.default_backend() in row.platforms))


def exact(name):
    """The precision to compare in."""
    return np.float64 if "float64" in CAPABILITIES[name].dtypes else np.float32


RUNNABLE = [name for name in CAPABILITIES if here(name)]


def inputs(seed=0, B=2, T=37, N=4, K=2, H=8, C=5, documents=3, dtype=np.float64):
    rng = np.random.default_rng(seed)
    q, k, v = (rng.normal(size=shape).astype(dtype) for shape in ((B, T, N, H), (B, T, K, H), (B, T, K, C)))
    segments = np.sort(rng.integers(1, documents + 1, (B, T)), axis=1).astype(np.int32)
    return q, k, v, segments


def run(kernel, q, k, v, segments=None, window=0, sinks=None):
    options = dict(segment_ids=segments, window=window, kernel=kernel, interpret=kernel in PALLAS)
    return jax.jit(lambda q, k, v, sinks: kernels.attention(q, k, v, sinks=sinks, **options))(q, k, v, sinks)


def loop(q, k, v, segments, window, scale):
    """The definition, one query at a time."""
    B, T, N, _ = q.shape
    G = N // k.shape[2]
    out, lse = np.zeros((B, T, N, v.shape[-1])), np.zeros((B, N, T))
    for b in range(B):
        for t in range(T):
            keys = [s for s in range(t + 1) if segments[b, s] == segments[b, t] and (not window or t - s < window)]
            for n in range(N):
                scores = np.array([scale * q[b, t, n] @ k[b, s, n // G] for s in keys])
                weights = np.exp(scores - scores.max())
                lse[b, n, t] = np.log(weights.sum()) + scores.max()
                out[b, t, n] = weights / weights.sum() @ v[b, keys, n // G]
    return out, lse


def windows(name):
    return [0, 1, 7] if CAPABILITIES[name].window else [0]


@pytest.mark.parametrize("kernel", RUNNABLE)
@pytest.mark.parametrize("heads,window", [((4, 2), 0), ((4, 2), 1), ((3, 3), 7), ((4, 1), 0)])
def test_equals_the_definition(x64, kernel, window, heads):
    if window and not CAPABILITIES[kernel].window:
        window = 0
    q, k, v, segments = inputs(N=heads[0], K=heads[1], H=16)
    expected_out, expected_lse = loop(q, k, v, segments, window, 16**-0.5)
    atol = 1e-12 if exact(kernel) == np.float64 else 2e-6
    with jax.enable_x64(exact(kernel) == np.float64):  # Pallas knows 32-bit indices only
        out, lse = run(kernel, *(x.astype(exact(kernel)) for x in (q, k, v)), segments, window)
    np.testing.assert_allclose(out, expected_out, atol=atol)
    np.testing.assert_allclose(lse, expected_lse, atol=atol)


GRADIENTS = [name for name in RUNNABLE if name != "reference"]


@pytest.mark.parametrize("kernel", GRADIENTS)
@pytest.mark.parametrize("sinks,window", [(False, 0), (True, 150)])
def test_gradients_equal_the_reference(x64, kernel, sinks, window):
    """Over several tiles of keys, with documents, sink logits and a window, against float64."""
    row = CAPABILITIES[kernel]
    if sinks and not row.sinks or window and not row.window:
        pytest.skip("refused: see test_what_a_kernel_cannot_do_is_refused")
    q, k, v, segments = inputs(B=1, T=300, N=4, K=2, H=16, C=16)
    logits = np.array([0.3, -1.0, 2.0, 0.0], np.float32) if sinks else None

    def gradients(name, dtype):
        def scalar(q, k, v, logits):
            options = dict(segment_ids=segments, window=window, kernel=name, interpret=name in PALLAS)
            return jnp.sin(kernels.attention(q, k, v, sinks=logits, **options)[0]).sum()

        wanted = (0, 1, 2, 3) if sinks else (0, 1, 2)
        with jax.enable_x64(dtype == np.float64):
            return jax.jit(jax.grad(scalar, wanted))(*(x.astype(dtype) for x in (q, k, v)), logits)

    for ours, exactly in zip(gradients(kernel, exact(kernel)), gradients("reference", np.float64)):
        np.testing.assert_allclose(ours, exactly, atol=1e-10 if exact(kernel) == np.float64 else 3e-5)


@pytest.mark.parametrize(
    "T,block,window", [(37, 8, 0), (37, 8, 1), (37, 8, 9), (32, 8, 0), (32, 8, 8), (32, 8, 30), (7, 16, 5), (9, 1, 3)]
)
def test_blocks_and_gradients(x64, T, block, window):
    q, k, v, segments = inputs(T=T)

    def value_and_gradients(call):
        def scalar(q, k, v):
            out, lse = call(q, k, v)
            return jnp.sin(out).sum() + jnp.cos(lse).sum()  # uneven cotangents for both results

        return jax.jit(jax.value_and_grad(scalar, (0, 1, 2)))(q, k, v)

    def dense(q, k, v):
        return kernels.attention(q, k, v, segment_ids=segments, window=window, scale=0.3, kernel="reference")

    def blocks(q, k, v):
        return chunked.attention(q, k, v, segment_ids=segments, window=window, scale=0.3, block=block)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-11), value_and_gradients(blocks), value_and_gradients(dense)
    )


@pytest.mark.parametrize("kernel,window", [(name, window) for name in RUNNABLE for window in windows(name)[:2]])
def test_equals_jax_nn(kernel, window):
    q, k, v, _ = inputs(H=16, C=16, dtype=np.float32)
    peer = jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=(window - 1, 0) if window else None)
    out, _ = run(kernel, q, k, v, window=window)
    np.testing.assert_allclose(out, peer, atol=2e-6)


@pytest.mark.parametrize("kernel", CAPABILITIES)
def test_documents_do_not_see_each_other(kernel):
    """Keys and values of one document are changed: no bit of another document's result may move. Or the request is refused."""
    q, k, v, segments = inputs(T=140, H=16, dtype=np.float32)
    if not CAPABILITIES[kernel].segment_ids:
        with pytest.raises(ValueError, match="cannot keep packed documents apart"):
            q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in (q, k, v))
            kernels.attention(q, k, v, segment_ids=segments, kernel=kernel, interpret=True)
        return
    if not here(kernel):
        pytest.skip(f"{kernel} cannot run here")
    changed = k + (segments == 1)[..., None, None], v + (segments == 1)[..., None, None]
    before, _ = run(kernel, q, k, v, segments)
    after, _ = run(kernel, q, *changed, segments)
    others = segments != 1
    assert others.any() and not np.array_equal(before[~others], after[~others])
    np.testing.assert_array_equal(before[others], after[others])


@pytest.mark.parametrize("kernel", RUNNABLE)
def test_an_indicator_shows_the_attention_mass(kernel):
    """What the probes do: values of one channel, 1 at some keys, give the probability on them."""
    q, k, _, segments = inputs(H=16, dtype=np.float32)
    marked = np.random.default_rng(1).integers(0, 2, segments.shape).astype(np.float32)
    mass, _ = run(kernel, q, k, np.repeat(marked[..., None, None], 2, axis=2), segments)
    probs, _ = reference.probabilities(q, k, segment_ids=segments, scale=0.25)
    np.testing.assert_allclose(mass[..., 0], jnp.einsum("bnts,bs->btn", probs, marked), atol=2e-6)


@pytest.mark.parametrize("kernel", RUNNABLE)
def test_bfloat16_stays_close(kernel):
    q, k, v, segments = inputs(H=16, dtype=np.float32)
    exact, _ = run(kernel, q, k, v, segments)
    low, lse = run(kernel, *(jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)), segments)
    assert low.dtype == jnp.bfloat16 and lse.dtype == jnp.float32
    np.testing.assert_allclose(low.astype(np.float32), exact, atol=0.05)


# --- what is refused, and what "auto" means ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kernel,request_,message",
    [
        ("splash", dict(platform="cpu"), "runs on tpu, not on cpu: use auto"),
        ("cudnn", dict(platform="gpu", dtype="bfloat16", segment_ids=True), "cannot keep packed documents apart"),
        ("cudnn", dict(platform="gpu", dtype="float32"), "computes in bfloat16, float16, not in float32"),
        ("cudnn", dict(platform="gpu", dtype="bfloat16", head_dim=60), "multiples of 8 up to 128, not 60"),
        ("triton", dict(platform="gpu", window=512), "has no window"),
        ("triton", dict(platform="gpu", sinks=True), "has no sink logits"),
        ("triton", dict(platform="gpu", context=4, seq_len=4096), "cannot spread a sequence"),
        ("splash", dict(platform="tpu", context=4, seq_len=1000), "only multiples of 512 tokens over 4 devices, not 1000"),
        ("flash", dict(), "must be auto or one of reference, chunked"),
    ],
)
def test_what_a_kernel_cannot_do_is_refused(kernel, request_, message):
    with pytest.raises(ValueError, match=message):
        kernels.choose(kernel, Request(**request_))


PACKED = dict(dtype="bfloat16", head_dim=128, segment_ids=True)


@pytest.mark.parametrize(
    "request_,chosen,passed",
    [
        (dict(platform="cpu"), "chunked", []),
        (dict(platform="tpu", **PACKED), "splash", []),
        (dict(platform="tpu", **PACKED | dict(dtype="float64")), "chunked", ["splash computes in"]),
        (dict(platform="gpu", **PACKED | dict(segment_ids=False)), "cudnn", []),
        (dict(platform="gpu", **PACKED), "triton", ["cudnn cannot keep packed documents apart"]),
        (dict(platform="gpu", **PACKED, window=64), "chunked", ["cudnn cannot keep", "triton has no window"]),
    ],
)
def test_auto_takes_the_best_that_can(request_, chosen, passed):
    name, reasons = kernels.choose("auto", Request(**request_))
    assert name == chosen and len(reasons) == len(passed)
    assert all(reason.startswith(start) for reason, start in zip(reasons, passed))


def test_the_mesh_decides_about_the_platform():
    """Under a mesh of devices that are only described, theirs counts."""
    device = jax.sharding.AbstractDevice(device_kind="TPU v5p", num_cores=1, platform="tpu")
    mesh = jax.sharding.AbstractMesh((2,), ("fsdp",), (AxisType.Auto,), abstract_device=device)
    assert sharding.platform() == "cpu"
    q = jax.ShapeDtypeStruct((2, 128, 4, 16), jnp.bfloat16)
    with jax.sharding.use_abstract_mesh(mesh):
        assert sharding.platform() == "tpu"
        assert "splash" in str(jax.make_jaxpr(lambda q, k, v: kernels.attention(q, k, v)[0])(q, q, q))


def test_a_passed_over_kernel_is_announced():
    device = jax.sharding.AbstractDevice(device_kind="H100", num_cores=132, platform="gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("fsdp",), (AxisType.Auto,), abstract_device=device)
    q = jax.ShapeDtypeStruct((2, 128, 4, 16), jnp.bfloat16)
    with (
        jax.sharding.use_abstract_mesh(mesh),
        pytest.warns(UserWarning, match="chunked in use; cudnn .*; triton has no window"),
    ):
        jax.eval_shape(lambda q, k, v: kernels.attention(q, k, v, window=3, segment_ids=jnp.ones((2, 128), int)), q, q, q)


def test_the_log_sum_exp_of_splash_refuses_a_gradient():
    q, k, v, _ = inputs(H=16, dtype=np.float32)
    with pytest.raises(NotImplementedError, match="no gradient: pass sink logits"):
        jax.grad(lambda q: kernels.attention(q, k, v, kernel="splash", interpret=True)[1].sum())(q)


def test_the_configuration_knows_every_kernel():
    assert KERNELS == ("auto", *CAPABILITIES)


# --- memory ------------------------------------------------------------------------------------------------------------------


def temporaries(T):
    q = jax.ShapeDtypeStruct((1, T, 4, 16), jnp.float32)
    k = jax.ShapeDtypeStruct((1, T, 2, 16), jnp.float32)

    def gradients(q, k, v):
        return jax.grad(lambda *x: kernels.attention(*x, kernel="chunked")[0].sum(), (0, 1, 2))(q, k, v)

    return jax.jit(gradients).lower(q, k, k).compile().memory_analysis().temp_size_in_bytes


def test_chunked_memory_is_linear_in_length():
    short, middle, long = (temporaries(T) for T in (1024, 2048, 4096))
    assert long - middle <= 2.2 * (middle - short) and long < 4096 * 4096 * 4
