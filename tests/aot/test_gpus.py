"""The training step compiled by the CUDA compiler for GPUs. `python -m pytest -m aot tests/aot/test_gpus.py`, after
`pip install 'jax[cuda13]'`; minutes. What a GPU that is not here would refuse is found here."""

import dataclasses
import functools
import importlib.util
import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from configs import dense1b7, moe15b
from gatedattn import aot, kernels
from gatedattn.aot import gpus
from gatedattn.aot.compile import step
from gatedattn.aot.hlo import Program
from gatedattn.aot.topologies import devices, parse
from gatedattn.config import ConfigError, MeshConfig, MoEConfig
from gatedattn.kernels.grouped import grouped_matmul
from gatedattn.training.placement import make_mesh
from tests.aot.runs import SMALL, recipe

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(not importlib.util.find_spec("jax_cuda13_plugin"), reason="the CUDA compiler is not installed"),
]

EXPERTS = MoEConfig(num_experts=32, top_k=2, expert_dim=256)
SMALL_MOE = dataclasses.replace(SMALL, model=dataclasses.replace(SMALL.model, num_layers=2, moe=EXPERTS))


def mesh_of(name: str):
    found = devices(parse(name))
    return make_mesh({"fsdp": len(found)}, found)


def compiled(mesh, f, *arrays):
    """f compiled for arrays given as (shape, dtype, spec)."""
    shapes = [jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec)) for shape, dtype, spec in arrays]
    with jax.set_mesh(mesh):
        return jax.jit(f).lower(*shapes).compile(compiler_options=gpus.OPTIONS)


def dot_flops(program: Program) -> float:
    """FLOPs of XLA's own matrix products on one device; those inside our kernels are hidden from it."""
    total = 0.0
    for name, (times, _) in program.weights.items():
        instructions = program.computations[name].instructions
        for dot in (i for i in instructions.values() if i.opcode == "dot"):
            left = instructions[dot.operands[0]].shapes[0].dims
            summed = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", dot.rest)[1]
            total += 2.0 * times * math.prod(dot.shapes[0].dims) * math.prod(left[int(d)] for d in summed.split(",") if d)
    return total


def test_collectives_of_a_step_that_can_be_counted_by_hand():
    """Five layers of FSDP over two hosts: gathered on the way forward and, recomputed, on the way back; five gradients scattered."""
    layers, width, rows = 5, 1024, 4096
    mesh = mesh_of("h100-16")

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(None, "fsdp"), P("fsdp")), out_specs=P(None, "fsdp"))
    def gradient(params, x):
        @jax.checkpoint
        def layer(x, w):
            return jnp.tanh(x @ jax.lax.all_gather(w, "fsdp", tiled=True)), None

        return jax.grad(lambda params: jax.lax.scan(layer, x, params)[0].astype(jnp.float32).sum())(params)

    shapes = ((layers, width, width), jnp.bfloat16, P(None, "fsdp")), ((rows, width), jnp.bfloat16, P("fsdp"))
    program = Program(
        compiled(mesh, gradient, *shapes).as_text(), [d.process_index for d in mesh.devices.flat], fast_memory=False
    )
    found = list(program.collectives())
    matrix = width * width * 2
    for kind, times in {"all-gather": 2 * layers, "reduce-scatter": layers}.items():
        mine = [c for c in found if c.kind == kind]
        assert sum(c.times for c in mine) == times
        assert sum(c.times * c.payload for c in mine) == times * matrix
        assert all(c.group == 16 and c.spans == 2 for c in mine)
        # Of each matrix a GPU has a sixteenth; its share of the other host's half is another one, and 14 come over NVLink.
        assert sum(c.times * c.network for c in mine) == pytest.approx(times * matrix / 16)
        assert sum(c.times * c.wire for c in mine) == pytest.approx(times * matrix * 14 / 16)
    assert {c.kind for c in found} == {"all-gather", "reduce-scatter"}
    assert program.unknown_loops == []
    products = 2 * (rows // 16) * width * width  # forward, again, and two backward; the last layer's second need not run
    assert 4 * layers - 2 <= dot_flops(program) / products <= 4 * layers


def test_a_small_step_within_a_host_and_across_two(capsys):
    one = step(SMALL, parse("h100-8")).report
    assert one["kernel"] == "triton" and one["kernels_passed_over"] == ["cudnn cannot keep packed documents apart"]
    assert one["argument_bytes"] < one["peak_bytes"] < one["hbm_bytes"] == 84_942_979_072
    state = 3 * 4 * one["params"] / 8
    assert state <= one["argument_bytes"] < 1.1 * state + 2**22  # parameters and Adam's moments, divided by fsdp
    assert 0 < one["roofline"]["mfu_bound"] <= 1
    assert all(entry["network_wire_bytes"] == 0 < entry["wire_bytes"] for entry in one["collectives"].values())
    said = aot.table(one)
    assert "cudnn cannot keep packed documents apart" in said and "xla_gpu_autotune_level=0" in said

    two = step(dataclasses.replace(SMALL, mesh=MeshConfig(data=2)), parse("h200-16")).report
    assert two["hbm_bytes"] > 1.7 * one["hbm_bytes"] and two["mesh"] == {"data": 2, "fsdp": 8}
    # Only gradients (and a few scalars) cross, each GPU's own share of them, but for the unembedding's, which is summed whole:
    # parameters are gathered within a host.
    assert two["collectives"]["all-gather"]["network_wire_bytes"] == 0
    crossing = sum(entry["network_wire_bytes"] for entry in two["collectives"].values())
    unembedding = SMALL.model.vocab_size * SMALL.model.d_model
    assert 0 < crossing < 4 * ((two["params"] - unembedding) / 8 + unembedding) + 2**20


def test_what_cannot_start_is_refused_before_the_compile():
    with pytest.raises(ConfigError, match="train.platform=tpu, but h100-8 is a gpu"):
        step(dataclasses.replace(SMALL, train=dataclasses.replace(SMALL.train, platform="tpu")), parse("h100-8"))
    with pytest.raises(ConfigError, match="does not fit 8 devices"):
        step(dataclasses.replace(SMALL, mesh=MeshConfig(fsdp=3)), parse("h100-8"))
    model = dataclasses.replace(SMALL.model, kernel="cudnn")
    with pytest.raises(ConfigError, match="model.kernel='cudnn' cannot keep packed documents apart"):
        step(dataclasses.replace(SMALL, model=model), parse("h100-8"))
    moe = dataclasses.replace(SMALL_MOE.model, moe=dataclasses.replace(EXPERTS, kernel="ragged_dot"))
    with pytest.raises(ConfigError, match="model.moe.kernel='ragged_dot' runs on tpu, not on gpu"):
        step(dataclasses.replace(SMALL_MOE, model=moe), parse("h100-8"))


@pytest.mark.parametrize("kernel,packed", [("cudnn", False), ("triton", True), ("chunked", True)])
def test_attention_kernels_compile_without_a_square(kernel, packed):
    """Forward and backward, 8192 tokens: one float32 score per pair of tokens and head would be 2 GB."""
    B, T, N, K, H = 1, 8192, 8, 4, 128
    mesh = mesh_of("h100-1")

    def gradients(q, k, v, segment_ids):
        ids = segment_ids if packed else None
        return jax.grad(
            lambda *a: kernels.attention(*a, segment_ids=ids, kernel=kernel)[0].astype(jnp.float32).sum(), (0, 1, 2)
        )(q, k, v)

    heads = [((B, T, n, H), jnp.bfloat16, P()) for n in (N, K, K)]
    executable = compiled(mesh, gradients, *heads, ((B, T), jnp.int32, P()))
    assert executable.memory_analysis().temp_size_in_bytes < 0.2 * 4 * B * N * T * T
    text = executable.as_text()
    called = set(re.findall(r'custom_call_target="([^"]*)"', text))
    wanted = {"cudnn": {"__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"}, "triton": {"__gpu$xla.gpu.triton"}}
    assert wanted.get(kernel, set()) <= called


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_the_grouped_product_is_not_dense(dtype):
    """8192 rows, 64 experts: forward and backward. XLA's own `ragged_dot` multiplies every row with every expert."""
    rows, experts, wide, narrow = 8192, 64, 256, 128
    mesh = mesh_of("h100-1")

    def both(f):
        def gradients(x, w, sizes, dy):
            y, back = jax.vjp(lambda x, w: f(x, w, sizes), x, w)
            return y, back(dy)

        shapes = (
            ((rows, wide), dtype, P()),
            ((experts, wide, narrow), dtype, P()),
            ((experts,), jnp.int32, P()),
            ((rows, narrow), dtype, P()),
        )
        return compiled(mesh, gradients, *shapes)

    ours, theirs = both(grouped_matmul), both(jax.lax.ragged_dot)
    size = jnp.dtype(dtype).itemsize
    assert ours.memory_analysis().temp_size_in_bytes < 4 * size * rows * (wide + narrow)
    assert (
        theirs.memory_analysis().temp_size_in_bytes > size * rows * experts * narrow
    )  # if this fails, ragged_dot has become usable
    assert dot_flops(Program(ours.as_text())) == 0


RUNS = {"dense": (dense1b7, "h100-8", 32), "moe": (moe15b, "h100-64", 256)}
CEILING = {"dense": 6.82e9, "moe": 11.67e9}  # bytes of temporaries a GPU


@pytest.mark.parametrize("name", RUNS)
def test_recipes_fit(name):
    """The recipes' steps at 4 sequences of 4096 tokens a GPU, G1 gate on."""
    module, topology, batch_size = RUNS[name]
    run = step(recipe(module, "gate=g1", batch_size=batch_size), parse(topology))
    report = run.report
    assert report["temp_bytes"] < CEILING[name]
    assert report["loops_of_unknown_length"] == 0

    leaves = jax.tree_util.tree_leaves_with_path(run.executable.input_shardings[0][0])
    specs = {jax.tree_util.keystr(path): sharding.spec for path, sharding in leaves}
    assert all("fsdp" in spec for path, spec in specs.items() if "kernel" in path)
    largest = max(2 * 2048 * 151_936, 2 * report["params"] / 10)  # bytes: the unembedding is the largest single matrix
    assert 0 < report["collectives"]["all-gather"]["largest_bytes"] <= 1.01 * largest

    # What XLA multiplies itself is all but attention, and all but the experts: sixteen times more if every expert took every token.
    executed = report["executed_flops_per_step"] / report["devices"]
    low, high = {"dense": (0.7, 1), "moe": (0.35, 0.5)}[name]
    assert low < dot_flops(run.program) / executed < high
