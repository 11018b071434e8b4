import math

import pytest

from gatedattn.aot.topologies import CHIPS, parse, tori
from gatedattn.config import ConfigError
from gatedattn.training.hardware import peak_flops


@pytest.mark.parametrize(
    "name,chips,devices,torus,slices",
    [
        # docs.cloud.google.com/tpu/docs/v5p: "4x4x4, 128 cores, 64 chips"; v5e and v6e count chips; a TPU7x chip is two devices.
        ("v4-8", 4, 4, (2, 2, 1), 1),
        ("v5p-16", 8, 8, (2, 2, 2), 1),
        ("v5p-64", 32, 32, (2, 4, 4), 1),
        ("v5p-128", 64, 64, (4, 4, 4), 1),
        ("v5p-512", 256, 256, (4, 8, 8), 1),
        ("v5p-2048", 1024, 1024, (8, 8, 16), 1),
        ("v5p-3072", 1536, 1536, (8, 12, 16), 1),
        ("2xv5p-128", 64, 128, (4, 4, 4), 2),
        ("v5e-1", 1, 1, (1, 1), 1),
        ("v5e-8", 8, 8, (2, 4), 1),
        ("v5e-256", 256, 256, (16, 16), 1),
        ("v5litepod-256", 256, 256, (16, 16), 1),
        ("v6e-32", 32, 32, (4, 8), 1),
        ("tpu7x-128", 64, 128, (4, 4, 4), 1),
        ("4xtpu7x-8", 4, 32, (2, 2, 1), 4),
        # GPUs: hosts of eight, one of which may be used in part.
        ("h100-8", 8, 8, (1, 8), 1),
        ("h200-64", 8, 64, (8, 8), 8),
        ("h100-24", 8, 24, (3, 8), 3),
        ("h100-2", 2, 2, (1, 2), 1),
    ],
)
def test_names_mean_what_the_cloud_means(name, chips, devices, torus, slices):
    topology = parse(name)
    assert (topology.chips, topology.devices, topology.torus, topology.slices) == (chips, devices, torus, slices)


@pytest.mark.parametrize(
    "name,said",
    [
        ("v5p-100", "no v5p slice has 100 cores (two a chip): the nearest are v5p-64 and v5p-128"),
        ("v5e-512", "no v5e slice has 512 chips: the nearest are v5e-128 and v5e-256"),
        ("v5p-0", "no v5p slice has 0 cores"),
        ("vp5-128", "unknown topology 'vp5-128' (did you mean 'v5p-128'?)"),
        ("2xv6-256", "unknown topology '2xv6-256'"),
        ("v5p", "unknown topology 'v5p'"),
        ("0xv5p-8", "unknown topology '0xv5p-8'"),
        ("h100-12", "no hosts of 8 have 12 GPUs: the nearest are h100-8 and h100-16"),
        ("h200-6", "no hosts of 8 have 6 GPUs: the nearest are h200-4 and h200-8"),
        ("8xh100-8", "8xh100-8: GPUs are counted over all hosts of 8: h100-64"),
        ("h10-64", "unknown topology 'h10-64' (did you mean 'h100-64'?)"),
    ],
)
def test_other_names_are_refused_with_the_nearest(name, said):
    with pytest.raises(ConfigError) as error:
        parse(name)
    assert said in str(error.value)


def test_shapes_are_compact_and_every_chip_has_a_peak():
    for chip in CHIPS.values():
        sizes = [math.prod(torus) for torus in tori(chip)]
        assert sizes == sorted(set(sizes)) and sizes[-1] <= chip.largest
        assert peak_flops(chip.device_kind)
    for torus in tori(CHIPS["v5p"]):
        if math.prod(torus) > 32:
            assert all(side % 4 == 0 for side in torus) and list(torus) == sorted(torus)


def test_memory_and_rates_are_those_of_a_device():
    assert parse("tpu7x-128").hbm_bytes == 96 * 2**30  # 192 GiB a chip, two devices
    assert parse("v5e-256").hbm_bytes == 16 * 2**30
    assert parse("h100-8").hbm_bytes < 80 * 2**30 < parse("h200-8").hbm_bytes == 141 * 2**30
    assert peak_flops(CHIPS["h100"].device_kind) == peak_flops(CHIPS["h200"].device_kind) == 989.4e12
    assert peak_flops(CHIPS["v5p"].device_kind) == 459e12 and peak_flops(CHIPS["tpu7x"].device_kind) == 2307e12 / 2
