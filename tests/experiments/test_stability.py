"""The study of stability: its tables, and two small runs from beginning to end."""

import pytest

from experiments.stability import sweep


def test_tables():
    curve = dict(loss=4.0, spikes=1, rise=[0.5, 1.5], gradient_spikes=7, grad_norm=[1.0, 2.0, 3.0], diverged=False)
    found = curve | dict(activation_by_layer=[1.0, 20.0, 30.0, 40.0])
    results = [{"row": "G1", "times": 4, "seed": 0} | found]
    results += [
        {"row": "baseline, bfloat16", "times": 16, "seed": 0} | found | dict(loss=None, activation_by_layer=None, diverged=True)
    ]
    text = sweep.tables(results)
    assert (
        "| G1 | x4 | 1 | 4 | 1 | 0.5 | 1.5 | 7 | 1 | 2 | 3 | 0 |" in text
        and "| baseline, bfloat16 | x16 | 1 | - | 1 | 0.5 | 1.5 | 7 | 1 | 2 | 3 | 1 |" in text
    )
    assert "| G1 | x4 | 1 | 20 | 30 | 40 |" in text


@pytest.mark.slow
def test_two_runs(tmp_path):
    sweep.main([f"--out={tmp_path / 'out'}", f"--runs={tmp_path / 'runs'}", "--smoke"])
    assert "| baseline | x1 | 1 | " in (tmp_path / "out" / "tables.md").read_text()
    assert (tmp_path / "out" / "stability.png").stat().st_size > 10_000
