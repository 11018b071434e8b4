"""The sweep over the paper's variants: its plan, its tables, its corpus' text, and two small runs from beginning to end."""

import json
import math

import numpy as np
import pytest
from flax import nnx

from experiments.variants import balance, config, corpus, rows, sweep, tables
from gatedattn import Transformer, TransformerConfig, variants
from gatedattn.config import ConfigError, RunConfig, from_mapping


def test_rows_are_the_papers():
    for row in rows.ROWS.values():
        mine = from_mapping(RunConfig, config.get_config(f"gate={row.gate}").to_dict())
        if row.paper:
            assert mine.model == variants.apply(mine.model, row.paper)
    jobs = list(sweep.STUDY.plan(list(rows.ROWS), 2, False))
    assert len({job.name for job in jobs}) == len(jobs) == 2 * (len(rows.ROWS) + 8)
    assert [job.seed for job in jobs] == sorted(job.seed for job in jobs)


def result(row, seed, times=1, **values):
    standard = dict(loss=4.0, mean_gate=None, m_act=10.0, f_attn=0.1, best_head=0.2, floor=0.01, spikes=0, diverged=False,
                    params=10**6, tokens=2_000_000, steps=10)  # fmt: skip
    values = {"loss_by_step": [[5, 6.0], [10, values.get("loss", 4.0)]]} | values
    return {"row": row, "seed": seed, "times": times} | standard | values


def test_tables():
    """Gains are taken seed by seed; the interval is Student's; ranks that agree with the paper's correlate with 1."""
    results = [result("baseline", seed, loss=4.0 + seed) for seed in range(2)]
    for row, gate in (("G1", 0.1), ("G1 headwise", 0.2), ("G1 NS-sigmoid", 0.7)):
        results += [result(row, s, loss=3.9 + s - 0.02 * s, mean_gate=gate, m_act=100 * gate, f_attn=gate) for s in range(2)]
    results += [result("G1", 0, times=4, loss=9.0, diverged=True), result("baseline", 0, times=4, loss=None, diverged=True)]
    text = tables.tables(results)
    # t(0.975, 1) = 12.706; standard deviation / sqrt 2 = 0.49 and 0.01
    assert "| G1 | 2 | 4.39 ± 6.2 | 80.64 | -0.11 ± 0.13 | 5.761 | -0.0450 |" in text
    assert "over 3 gated rows with M-Act 1.00 (the paper's 1.00) and with F-Attn 1.00 (the paper's 1.00)" in text
    assert "| G1 | x4 | 1 | 9 | 0 | - | 1 |" in text and "| baseline | x4 | 1 | - | 0 | - | 1 |" in text


def test_noise_is_what_row_and_seed_do_not_explain():
    """Two rows and two seeds leave one degree of freedom: (a - b - c + d) / 2."""
    square = {"baseline": [4.0, 5.0], "G1": [3.0, 4.2]}

    def told(losses):
        return tables.noise({row: [result(row, seed, loss=x) for seed, x in enumerate(found)] for row, found in losses.items()})

    sure = 12.706 * 0.1  # t(0.975, 1) = 12.706
    assert f"of 0.100 nats (2 rows, 2 seeds): the difference of two such rows is sure to ± {sure:.3f} (95 %)" in told(square)
    added = {row: [x, x + 2, x + 1] for row, x in (("baseline", 4), ("G1", 3), ("G2", 1))}
    assert "of 0.000 nats (3 rows, 3 seeds)" in told(added)
    assert told(square | {"G2": [4.0]}) == told(square) and told({"baseline": [4.0, 5.0]}) == told({}) == ""
    assert told({"baseline": [4.0, 5.0, 9.0], "G1": [3.0, 4.2]}) == told(square)


def test_ladder():
    """A gain that grows by 0.1 nats with every factor of e."""
    results = []
    for d, (without, gated) in rows.LADDER.items():
        for seed in range(2):
            size = d / 64
            results += [result(without, seed, params=1e6 * math.exp(size), loss=5 - size + seed)]
            results += [result(gated, seed, params=1.1e6 * math.exp(size), loss=5 - 1.1 * size + seed)]
    text = tables.ladder(results)
    assert "with G1 | difference at 1M tokens | difference at 2M tokens |" in text
    assert "| 64 | 2.72M | 2.99M | 4.5 ± 6.4 | 4.4 ± 6.4 | 0 ± 0 | -0.1 ±" in text
    assert "loss -1.0000 ± " in text and "with G1 -1.1000 ± " in text and "the difference -0.1000 ± " in text
    assert "d64" not in tables.tables(results).split("A ladder")[0]


def test_text_of_a_page():
    page = "<head><title>x</title></head><h1>One &amp; two</h1><p>three\n <b>four</b><script>no</script></p><pre>no</pre><p> </p>five<br>six"
    assert corpus.of_html(page) == "One & two\nthree four\nfive\nsix"
    text = "\n".join(["word " * 100] * 300)
    parts = list(corpus.pieces(text))
    assert "\n".join(parts) == text and len(parts) == 3 and max(map(len, parts)) <= corpus.PIECE


def test_a_tool_that_is_missing_is_named(tmp_path):
    with pytest.raises(ConfigError, match="no-such-tool is not installed; it would run: no-such-tool x"):
        corpus.fetch(["no-such-tool", "x"], str(tmp_path), "*")


def test_ratio_of_the_first_layer():
    """Embeddings a tenth as large are normed before the layer, so that it is ten times as loud beside them; the second layer plays no part."""
    tokens = np.arange(32, dtype=np.int32).reshape(2, 16)

    def of(**changes):
        config = TransformerConfig(
            vocab_size=32, d_model=16, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=8, ffn_dim=16, **changes
        )
        return balance.ratio(Transformer(config, rngs=nnx.Rngs(0)), tokens)

    np.testing.assert_allclose(of(embedding_scale=10.0, norm_eps=1e-12) * 10, of(norm_eps=1e-12), rtol=1e-2)


def test_unknown_row(tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'baseline'"):
        sweep.main([f"--out={tmp_path}", f"--runs={tmp_path}", "--rows=baselin"])


def test_results_of_other_settings_are_not_mixed(tmp_path):
    (tmp_path / "baseline-x1-0.json").write_text(json.dumps({"settings": []}))
    (tmp_path / "G2-x1-0.json").write_text(json.dumps({"settings": ["--config.train.steps=7"]}))
    with pytest.raises(ConfigError, match=r"holds results of other settings \(--config.train.steps=7\): give another --out"):
        sweep.main([f"--out={tmp_path}", f"--runs={tmp_path}", "--rows=G1"])


def test_what_is_not_finite_is_no_error():
    """JSON lines write it as null."""
    assert math.isnan(sweep.mean([1.0, None]))


@pytest.mark.slow
def test_two_runs_side_by_side_and_not_again(tmp_path, capsys):
    argv = [f"--out={tmp_path / 'out'}", f"--runs={tmp_path / 'runs'}", "--smoke", "--jobs=2", "--", "--config.train.steps=10"]
    sweep.main(argv)
    found = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "out").glob("*.json")}
    assert set(found) == {"baseline-x1-0", "g1-x1-0"} and all(r["steps"] == 10 for r in found.values())
    assert found["baseline-x1-0"]["mean_gate"] is None and 0.3 < found["g1-x1-0"]["mean_gate"] < 0.7
    assert (tmp_path / "out" / "variants.png").stat().st_size > 10_000
    capsys.readouterr()
    sweep.main(argv)
    told = capsys.readouterr().out
    assert "baseline-x1-0: loss" not in told and "| G1 | 1 |" in told


def test_a_run_that_broke_off_is_no_divergence():
    """Only so many skipped steps in a row are; a run may have any number of spikes, and skipped steps apart from each other."""
    skipped = [{"step": step, "update": "skipped"} for step in range(40, 50)]
    spikes = [{"step": step, "update": "applied"} for step in range(40)]
    assert sweep.by_guard(spikes + skipped) and sweep.by_guard(skipped)
    assert not sweep.by_guard(spikes) and not sweep.by_guard(skipped[1:]) and not sweep.by_guard([])
    assert not sweep.by_guard([{"step": 7, "update": "skipped"}, *skipped[1:]])


@pytest.mark.slow
def test_a_run_that_diverges_is_a_result(tmp_path):
    """A learning rate at which the loss is soon finite no more: `run.py` stops with an error, the sweep goes on and says so."""
    more = ["--config.optimizer.learning_rate=1e30", "--config.optimizer.warmup_steps=1", "--config.optimizer.clip_norm=0"]
    sweep.main([f"--out={tmp_path / 'out'}", f"--runs={tmp_path / 'runs'}", "--smoke", "--", *more])
    found = [json.loads(path.read_text()) for path in (tmp_path / "out").glob("*.json")]
    assert len(found) == 2 and all(r["diverged"] and r["loss"] is None for r in found)
    assert "| baseline | x1 | 1 | - | " in (tmp_path / "out" / "tables.md").read_text()
