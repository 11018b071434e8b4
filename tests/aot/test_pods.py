"""The training step compiled by the TPU compiler for pods: what a machine that is not here would refuse is found here.

`JAX_OPTIMIZATION_LEVEL=O1 python -m pytest -m aot tests/aot/test_pods.py`, after `pip install -e ".[tpu]" libtpu==0.0.52`; minutes."""

import dataclasses
import json

import jax
import pytest

from configs import dense1b7, extend32k, moe15b
from gatedattn import aot
from gatedattn.aot.compile import TooLarge, step
from gatedattn.aot.topologies import parse
from gatedattn.config import ConfigError, MeshConfig, TrainConfig
from tests.aot.runs import SMALL, recipe

pytestmark = [pytest.mark.aot, pytest.mark.usefixtures("optimized")]
pytest.importorskip("libtpu")


@pytest.mark.parametrize("name", ["v5e-8", "v6e-8", "v4-16", "tpu7x-8", "2xv5p-8"])
def test_every_generation(name):
    topology = parse(name)
    config = dataclasses.replace(SMALL, mesh=MeshConfig(data=topology.slices))
    report = step(config, topology).report
    assert report["devices"] == topology.devices
    assert report["argument_bytes"] < report["peak_bytes"] < report["hbm_bytes"]
    state = 3 * 4 * report["params"] * topology.slices / topology.devices
    assert state <= report["argument_bytes"] < 1.1 * state + 2**22  # parameters and Adam's moments, divided by fsdp
    assert 0 < report["roofline"]["mfu_bound"] <= 1
    crossing = sum(entry["network_wire_bytes"] for entry in report["collectives"].values())
    assert (crossing > 0) == (topology.slices > 1)


def test_a_command_line_that_writes_the_report(tmp_path, capsys):
    assert aot.main(SMALL, "v5e-4", str(tmp_path / "report.json")) == 0
    assert "MFU" in capsys.readouterr().out
    report = json.loads((tmp_path / "report.json").read_text())
    fields = "params devices argument_bytes temp_bytes peak_bytes hbm_bytes compile_seconds collectives model_flops_per_step roofline"
    assert set(fields.split()) <= set(report)


def test_too_large_says_by_how_much_and_what_fits(capsys):
    model = dataclasses.replace(SMALL.model, d_model=2048, num_layers=16, ffn_dim=6144)
    config = dataclasses.replace(SMALL, model=model, train=TrainConfig(batch_size=256, seq_len=4096))
    with pytest.raises(TooLarge) as error:
        step(config, parse("v5e-8"))
    assert error.value.needed > error.value.limit > 15e9
    assert aot.main(config, "v5e-8") == 2
    said = capsys.readouterr().out
    assert "too large" in said and "would fit" in said and "--config.train.microbatches=" in said


def test_what_cannot_start_is_refused_before_the_compile():
    with pytest.raises(ConfigError, match="train.platform=gpu, but v5e-8 is a tpu"):
        step(dataclasses.replace(SMALL, train=dataclasses.replace(SMALL.train, platform="gpu")), parse("v5e-8"))
    with pytest.raises(ConfigError, match="does not fit 8 devices"):
        step(dataclasses.replace(SMALL, mesh=MeshConfig(fsdp=3)), parse("v5e-8"))
    with pytest.raises(ConfigError, match="must be a multiple of 2"):
        step(SMALL, parse("2xv5e-8"))


RUNS = {
    "dense": (dense1b7, "v5p-64", 128),
    "moe": (moe15b, "v5p-128", 256),
    "dense on v6e": (dense1b7, "v6e-64", 256),
    "moe on v6e": (moe15b, "v6e-256", 1024),
}
CEILING = {"dense": 5.8e9, "moe": 9.02e9, "dense on v6e": 5.8e9, "moe on v6e": 7.3e9}  # bytes of temporaries a chip


@pytest.fixture(scope="module", params=RUNS)
def pod(request):
    """The recipes' steps at 4 sequences of 4096 tokens a chip, G1 gate on."""
    module, topology, batch_size = RUNS[request.param]
    return request.param, step(recipe(module, "gate=g1", batch_size=batch_size), parse(topology))


def test_recipes_fit_and_are_divided(pod):
    name, compiled = pod
    report = compiled.report
    assert report["temp_bytes"] < CEILING[name] and report["peak_bytes"] < 0.9 * report["hbm_bytes"]

    leaves = jax.tree_util.tree_leaves_with_path(compiled.executable.input_shardings[0][0])
    specs = {jax.tree_util.keystr(path): sharding.spec for path, sharding in leaves}
    kernels = {path: spec for path, spec in specs.items() if "kernel" in path}
    assert kernels and all("fsdp" in spec or "expert" in spec for spec in kernels.values())
    if "moe" in name:
        experts = [spec for path, spec in kernels.items() if "moe" in path and "router" not in path]
        assert len(experts) == 9  # gate, up and down, each with its two moments

    # No device ever holds the whole model: what is made at once from all devices' parts is less than a tenth of it, in bfloat16. On a
    # whole cube of chips the compiler makes all-reduces of all-gathers.
    largest = max(2 * 2048 * 151_936, 2 * report["params"] / 10)  # bytes: the unembedding is the largest single matrix
    made = [entry["largest_bytes"] for kind, entry in report["collectives"].items() if kind in ("all-gather", "all-reduce")]
    assert 0 < max(made) <= 1.01 * largest


def test_sequences_of_32k_tokens_are_spread_over_chips():
    compiled = step(recipe(extend32k, "gate=g1"), parse("v5p-128"))
    report = compiled.report
    assert report["temp_bytes"] < 16.9e9 and report["peak_bytes"] < 0.25 * report["hbm_bytes"]
    tokens = jax.tree_util.tree_leaves(compiled.executable.input_shardings[0][1])
    assert tokens and all("context" in str(sharding.spec) for sharding in tokens)
