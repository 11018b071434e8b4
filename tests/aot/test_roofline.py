import pytest

from gatedattn.aot.roofline import roofline
from gatedattn.aot.topologies import parse


def test_a_step_by_hand():
    """64 v5p chips: 459 TFLOP/s, 2765 GB/s of HBM and 600 GB/s of links each."""
    bound = roofline(
        parse("v5p-128"),
        model_flops=64 * 459e12 * 0.6,
        executed_flops=64 * 459e12 * 0.8,
        traffic=2765e9 / 2,
        wire=600e9,
        network=0,
    )
    assert bound.compute_seconds == pytest.approx(0.8)
    assert bound.hbm_seconds == pytest.approx(0.5)
    assert bound.interconnect_seconds == bound.step_seconds == pytest.approx(1.0)
    assert bound.bound_by == "interconnect" and bound.mfu_bound == pytest.approx(0.6)


def test_two_devices_share_a_chip():
    """A TPU7x device has half its chip's memory bandwidth, links and FLOP/s."""
    bound = roofline(parse("tpu7x-8"), model_flops=1e15, executed_flops=1e15, traffic=3690e9, wire=300e9, network=6.25e9)
    assert bound.hbm_seconds == bound.interconnect_seconds == bound.network_seconds == pytest.approx(1.0)
    assert bound.compute_seconds == pytest.approx(1e15 / (4 * 2307e12))


def test_hosts_of_gpus():
    """An H100 has NVLink of 450 GB/s and 50 GB/s of the network in one direction, 3350 GB/s of memory and 989.4 TFLOP/s."""
    bound = roofline(
        parse("h100-64"),
        model_flops=64 * 989.4e12 / 2,
        executed_flops=64 * 989.4e12,
        traffic=3350e9 / 4,
        wire=225e9,
        network=100e9,
    )
    assert bound.compute_seconds == pytest.approx(1.0) and bound.hbm_seconds == pytest.approx(0.25)
    assert bound.interconnect_seconds == pytest.approx(0.5) and bound.network_seconds == bound.step_seconds == pytest.approx(
        2.0
    )
    assert bound.bound_by == "network" and bound.mfu_bound == pytest.approx(0.25)


def test_without_recomputation_and_traffic_the_bound_is_the_peak():
    assert roofline(parse("v6e-8"), model_flops=1e15, executed_flops=1e15, traffic=0, wire=0, network=0).mfu_bound == 1.0
