"""The reader of XLA's programs, on programs small enough to count by hand, and on what XLA really makes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from gatedattn.aot.hlo import Collective, Program, Shape

LOOPS = """HloModule jit_step, is_scheduled=true, num_partitions=8

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%gather_body (p: bf16[4,16]) -> bf16[32,16] {
  %p = bf16[4,16]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %all-gather.9 = bf16[32,16]{1,0:T(8,128)(2,1)} all-gather(%p), channel_id=1, replica_groups=[1,8]<=[8], dimensions={0}
}

%inner_body (i: (s32[], f32[100])) -> (s32[], f32[100]) {
  %i = (s32[], f32[100]{0}) parameter(0)
  %n = s32[] get-tuple-element(%i), index=0
  %v = f32[100]{0} get-tuple-element(%i), index=1
  %all-reduce.1 = f32[100]{0} all-reduce(%v), channel_id=2, replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add
  ROOT %t = (s32[], f32[100]{0}) tuple(%n, %all-reduce.1)
}

%inner_condition (i.1: (s32[], f32[100])) -> pred[] {
  %i.1 = (s32[], f32[100]{0}) parameter(0)
  %n.1 = s32[] get-tuple-element(%i.1), index=0
  %limit = s32[] constant(7)
  ROOT %lt = pred[] compare(%n.1, %limit), direction=LT
}

%outer_body (o: (s32[], f32[100])) -> (s32[], f32[100]) {
  %o = (s32[], f32[100]{0}) parameter(0)
  ROOT %while.1 = (s32[], f32[100]{0}) while(%o), condition=%inner_condition, body=%inner_body
}

%outer_condition (o.1: (s32[], f32[100])) -> pred[] {
  %o.1 = (s32[], f32[100]{0}) parameter(0)
  ROOT %true = pred[] constant(true)
}

ENTRY %main (a: f32[100], b: bf16[4,16]) -> (f32[100], bf16[32,16]) {
  %a = f32[100]{0} parameter(0)
  %b = bf16[4,16]{1,0:T(8,128)(2,1)} parameter(1)
  %zero = s32[] constant(0)
  %start = (s32[], f32[100]{0}) tuple(%zero, %a)
  %while.2 = (s32[], f32[100]{0}) while(%start), condition=%outer_condition, body=%outer_body, backend_config={"known_trip_count":{"n":"3"}}
  %reduced = f32[100]{0} get-tuple-element(%while.2), index=1
  %async = ((bf16[4,16]{1,0:T(8,128)(2,1)}), bf16[32,16]{1,0}, u32[]) async-start(%b), calls=%gather_body
  %gathered = bf16[32,16]{1,0} async-done(%async)
  %rs = f32[25]{0} reduce-scatter(%reduced), channel_id=3, replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}, to_apply=%add
  %permuted = f32[100]{0} collective-permute(%reduced), channel_id=4, source_target_pairs={{0,1},{1,2}}
  ROOT %out = (f32[100]{0}, bf16[32,16]{1,0}) tuple(%permuted, %gathered)
}
"""


def test_collectives_are_counted_as_often_as_they_run():
    program = Program(LOOPS, slice_of=[0, 0, 0, 0, 1, 1, 1, 1])
    found = {c.kind: c for c in program.collectives()}
    assert {kind: (c.times, c.bytes, c.group, c.spans > 1) for kind, c in found.items()} == {
        "all-reduce": (3 * 7, 400, 2, False),  # loops multiply: one count is XLA's, one is read off the condition
        "all-gather": (1, 128, 8, True),
        "reduce-scatter": (1, 400, 4, True),  # {0, 2, 4, 6} and {1, 3, 5, 7}: both slices
        "collective-permute": (1, 400, 2, False),
    }
    assert found["all-gather"].payload == 1024 and found["all-gather"].received == 7 * 128
    assert found["all-reduce"].received == found["all-reduce"].wire == 400  # 2 (n - 1) / n
    assert found["reduce-scatter"].received == 300
    # Each slice's four gather the other slice's four parts, one each, over the network; then six parts from within.
    assert found["all-gather"].network == 128 and found["all-gather"].wire == 6 * 128
    assert found["reduce-scatter"].network == 100 and found["reduce-scatter"].wire == 200
    assert program.unknown_loops == []


@pytest.mark.parametrize(
    "kind,group,spans,network,wire",
    [
        # 96 bytes of operands a device; over `spans` hosts.
        ("all-reduce", 8, 1, 0, 2 * 84),
        ("all-reduce", 8, 8, 2 * 84, 0),
        ("all-reduce", 8, 2, 24, 144),  # one host's eighth of the sum to the other, and back
        ("all-to-all", 8, 2, 48, 36),  # half of the 96 for the other host, three of eight for neighbours
        ("collective-permute", 2, 2, 96, 0),
        ("collective-broadcast", 8, 2, 24, 72),  # a quarter of it comes to each of the host's four
    ],
)
def test_what_goes_over_the_network(kind, group, spans, network, wire):
    found = Collective(kind, "c", 1, 96, group, (), spans)
    assert (found.network, found.wire) == (pytest.approx(network), pytest.approx(wire))


@pytest.mark.parametrize(
    "written,groups",
    [
        ("{{0,1},{2,3}}", [[0, 1], [2, 3]]),
        ("{}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("[2,4]<=[8]", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("[4,2]<=[2,4]T(1,0)", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_0'}", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_1'}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_0','axis_1'}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("mesh['x'=8] {'x':(2)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
    ],
)
def test_every_way_to_write_groups(written, groups):
    line = f"  %g = f32[100]{{0}} all-reduce(%reduced), channel_id=9, replica_groups={written}, to_apply=%add\n  ROOT %out"
    program = Program(LOOPS.replace("  ROOT %out", line))
    assert program.groups(program.computations["main"].instructions["g"]) == groups


def test_what_the_tpu_compiler_writes_instead():
    """A reduce-scatter is a fusion around an all-reduce; what comes from another slice, a `recv` of the megascale runtime."""
    fused = LOOPS.replace("%gather_body", "%all-reduce-scatter.1").replace(
        "all-gather(%p), channel_id=1, replica_groups=[1,8]<=[8], dimensions={0}",
        "all-reduce(%p), channel_id=1, replica_groups=[2,4]<=[8], to_apply=%add",
    )
    received = (
        "  %after = token[] after-all()\n"
        "  %recv.1 = (f32[100]{0}, u32[]{:S(2)}, token[]) recv(%after), channel_id=7, is_host_transfer=true, "
        'frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime"}\n'
    )
    program = Program(fused.replace("  ROOT %out", received + "  ROOT %out"), slice_of=[0] * 4 + [1] * 4)
    found = {c.name: c for c in program.collectives()}
    scattered, recv = found["all-gather.9"], found["recv.1"]
    assert (scattered.kind, scattered.bytes, scattered.received) == ("reduce-scatter", 128, 96)
    assert (recv.kind, recv.times, recv.network, recv.wire) == ("recv", 1, 400, 0)


def test_a_kernels_settings_have_lines_of_their_own():
    """Mosaic's do: a computation does not end at a brace that begins one of them."""
    kernel = '  %k = f32[100]{0} custom-call(%a), custom_call_target="tpu_custom_call", backend_config={"custom": {\n}}, metadata={}\n'
    program = Program(LOOPS.replace("  %zero = s32[] constant(0)\n", kernel + "  %zero = s32[] constant(0)\n"))
    assert "k" in program.computations["main"].instructions and len(list(program.collectives())) == 4
    with pytest.raises(ValueError, match="no ROOT in main"):
        Program(LOOPS.replace("  ROOT %out", "}\n  ROOT %out"))


def test_a_loop_of_unknown_length_is_told():
    text = LOOPS.replace(', backend_config={"known_trip_count":{"n":"3"}}', "")
    program = Program(text)
    assert program.unknown_loops == ["while.2"]
    assert next(c.times for c in program.collectives() if c.kind == "all-reduce") == 7


TRAFFIC = """HloModule jit_step

%sliced (stack: f32[10,64], i: s32[], v: f32[64]) -> f32[10,64] {
  %stack = f32[10,64]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %v = f32[64]{0} parameter(2)
  %zero = s32[] constant(0)
  %row = f32[1,64]{1,0} dynamic-slice(%stack, %i, %zero), dynamic_slice_sizes={1,64}
  %flat = f32[64]{0} bitcast(%row)
  %sum = f32[64]{0} add(%flat, %v)
  %back = f32[1,64]{1,0} bitcast(%sum)
  ROOT %update = f32[10,64]{1,0} dynamic-update-slice(%stack, %back, %i, %zero)
}

ENTRY %main (p: f32[10,64], n: s32[], w: f32[64]) -> f32[10,64] {
  %p = f32[10,64]{1,0} parameter(0)
  %n = s32[] parameter(1)
  %w = f32[64]{0:T(128)S(1)} parameter(2)
  %double = f32[64]{0} add(%w, %w)
  ROOT %f = f32[10,64]{1,0} fusion(%p, %n, %double), kind=kLoop, calls=%sliced
}
"""


def test_traffic_counts_slices_not_what_they_are_cut_from():
    row = 64 * 4
    # add: reads VMEM, writes a row. fusion: a row of the stack, the index, a row; writes a row.
    assert Program(TRAFFIC).traffic() == row + (row + 4 + row + row)


ASYNCHRONOUS = TRAFFIC.replace(
    "  ROOT %f = f32[10,64]{1,0} fusion(%p, %n, %double), kind=kLoop, calls=%sliced",
    """  %fusion-start = ((f32[10,64]{1,0}, s32[], f32[64]{0}), f32[10,64]{1,0}, u32[]) fusion-start(%p, %n, %double), kind=kLoop, calls=%sliced
  %rs-start = ((f32[64]{0}), f32[8]{0}) reduce-scatter-start(%double), replica_groups={}, dimensions={0}, to_apply=%sliced
  %ag-start = (f32[64]{0}, f32[512]{0:S(1)}) all-gather-start(%double), replica_groups={}, dimensions={0}
  %rs-done = f32[8]{0} reduce-scatter-done(%rs-start)
  %ag-done = f32[512]{0:S(1)} all-gather-done(%ag-start)
  ROOT %done = f32[10,64]{1,0} fusion-done(%fusion-start)""",
)


def test_traffic_of_a_gpu_program():
    """The same fusion on a stream of its own, and two collectives; what lies in space 1 lies in main memory all the same."""
    row = 64 * 4
    fusion = row + 4 + row + row
    assert Program(ASYNCHRONOUS, fast_memory=False).traffic() == 2 * row + row + fusion + (row + 32) + (row + 2048)
    assert Program(ASYNCHRONOUS).traffic() == row + fusion + (row + 32) + row


def test_shapes_of_all_kinds():
    assert Shape("bf16", (3, 5)).bytes == 30 and Shape("pred", (8,)).bytes == 8 and Shape("s4", (16,)).bytes == 8
    assert Shape("f8e4m3fn", (7,)).bytes == 7 and Shape("c64", ()).bytes == 8 and Shape("token", ()).bytes == 0
    with pytest.raises(ValueError, match="no ENTRY"):
        Program("something else")


@pytest.fixture
def mesh():
    return jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)


def test_what_xla_really_makes_of_fsdp(mesh):
    """Five layers, each gathered when it is used: the gathers of a step are five times a layer."""
    layers, width = 5, 64
    params = jax.ShapeDtypeStruct((layers, width, width), jnp.float32, sharding=NamedSharding(mesh, P(None, "fsdp", None)))
    x = jax.ShapeDtypeStruct((8, width), jnp.float32, sharding=NamedSharding(mesh, P("fsdp", None)))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(None, "fsdp"), P("fsdp")), out_specs=P("fsdp"))
    def model(params, x):
        def layer(x, w):
            return jnp.tanh(x @ jax.lax.all_gather(w, "fsdp", tiled=True)), None

        return jax.lax.scan(layer, x, params)[0]

    program = Program(jax.jit(model).lower(params, x).compile().as_text())
    gathers = [c for c in program.collectives() if c.kind == "all-gather"]
    assert sum(c.times for c in gathers) == layers
    assert sum(c.times * c.payload for c in gathers) == layers * width * width * 4
    assert all(c.group == 4 for c in gathers)


def test_traffic_of_a_scan_is_that_of_its_trips():
    """A chain of matrix products over a stack of weights reads each layer's weights once per trip, not the whole stack."""

    def traffic(layers):
        def chain(ws, x):
            return jax.lax.scan(lambda x, w: (jnp.dot(x, w), None), x, ws)[0]

        shapes = jax.ShapeDtypeStruct((layers, 256, 256), jnp.float32), jax.ShapeDtypeStruct((2, 256), jnp.float32)
        return Program(jax.jit(chain).lower(*shapes).compile().as_text()).traffic()

    small, large = traffic(8), traffic(32)
    np.testing.assert_allclose((large - small) / 24, 256 * 256 * 4, rtol=2.5)  # the weights, and at most a copy of them
    assert large < 32 * 32 * 256 * 256 * 4 / 4
