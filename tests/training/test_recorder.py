import json

import numpy as np

from gatedattn.training import recorder
from gatedattn.training.hardware import peak_flops

MAP = np.array([[0.1, 0.5], [0.2, 0.9]], np.float32)
STATISTICS = {"mean": MAP, "below_0.1": MAP, "above_0.9": MAP}
PROBE = {"bos_share": MAP, "activation_max": np.ones(2), "attention_self": MAP, "attention_previous": MAP}


def test_gate_lists_are_plain_for_one_gate_keyed_for_several_and_absent_without():
    assert recorder.heads_line(5, PROBE | {"gates": {"g1": STATISTICS}})["gate_mean"] is MAP
    two = recorder.heads_line(5, PROBE | {"gates": {"g1": STATISTICS, "g2:headwise": STATISTICS}})
    assert set(two["gate_below_0.1"]) == {"g1", "g2:headwise"}
    none = recorder.heads_line(5, PROBE)
    assert not any(name.startswith("gate") for name in none)
    assert none["sink_rate"] == 0.5


def test_numbers_that_are_not_finite_become_null():
    line = {
        "a": float("nan"),
        "b": np.array([1.5, np.inf], np.float32),
        "c": {"d": [np.float64("-inf"), 2]},
        "e": True,
        "f": None,
    }
    assert recorder.finite(line) == {"a": None, "b": [1.5, None], "c": {"d": [None, 2]}, "e": True, "f": None}


def test_several_gates_and_a_resume_write_clean_files(config, tmp_path):
    for start in (0, 5):
        record = recorder.Recorder(tmp_path, config, {"kernel": "x"}, start)
        for step in (5, 10):
            if step > start:
                record.metrics({"step": step, "loss": float("inf")})
                record.heads(recorder.heads_line(step, PROBE | {"gates": {"g1": STATISTICS, "g2": STATISTICS}}))
        record.close()
    for name in ("metrics.jsonl", "heads.jsonl"):
        assert [json.loads(line)["step"] for line in (tmp_path / name).read_text().splitlines()] == [5, 10]
    assert recorder.read_config(tmp_path) == config


def test_a_heat_map_is_white_at_zero_and_dark_at_one():
    image = recorder.heat_map(np.array([[0.0, 1.0, np.nan]]), cell=4)
    assert image.shape == (4, 12, 3)
    assert image[0, 0].tolist() == [255, 255, 255] and image[0, 4].tolist() == [8, 48, 107]


def test_peak_rates_by_the_names_that_jax_reports():
    kinds = {
        "TPU v4": 275, "TPU v5 lite": 197, "TPU v5p": 459, "TPU v5": 459, "TPU v6 lite": 918, "TPU7x": 1153.5,
        "NVIDIA H100 80GB HBM3": 989.4, "NVIDIA H100 PCIe": 756, "NVIDIA H200": 989.4,
        "NVIDIA A100-SXM4-80GB": 312, "NVIDIA B200": 2250,
    }  # fmt: skip
    assert {kind: peak_flops(kind) for kind in kinds} == {kind: peak * 1e12 for kind, peak in kinds.items()}
    assert peak_flops("cpu") is None
