"""Losses under cache policies: read whole, cut into rows, not measured twice."""

import json

import numpy as np
import pytest
from flax import nnx

from experiments.streaming import measure
from gatedattn.config import ConfigError, TransformerConfig
from gatedattn.data import tokenizers
from gatedattn.interop import models
from gatedattn.interop.build import flat_parameters
from gatedattn.transformer import Transformer

MODEL = TransformerConfig(
    vocab_size=257, d_model=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, ffn_dim=16, init_std=0.5
)


@pytest.fixture
def folders(tmp_path):
    (tmp_path / "a.txt").write_text("My fellow citizens, the state of our union is " + "good, better, best, " * 3)
    (tmp_path / "b.txt").write_text("I come before you to report. " * 2)
    for seed in (0, 1):
        params = flat_parameters(Transformer(MODEL, rngs=nnx.Rngs(seed)))
        models.save_model(models.Source(MODEL, params, tokenizers.Bytes(), 64), tmp_path / f"m{seed}")
    return [str(tmp_path / "m0"), str(tmp_path / "m1")]


@pytest.mark.slow
def test_from_models_to_table(folders, tmp_path, capsys):
    argv = [
        *folders,
        f"--text={tmp_path}/*.txt",
        f"--out={tmp_path}/out",
        "--names=m,m",
        "--cache=8",
        "--tokens=64",
        "--rows=2",
    ]
    measure.main(argv)
    held = json.loads((tmp_path / "out/losses.json").read_text())
    text = (tmp_path / "a.txt").read_bytes() + (tmp_path / "b.txt").read_bytes()
    rows = np.array([[256, *text[:64]], [256, *text[64:128]]])
    model, tokenizer = models.load_model(folders[0])
    assert tokenizer.bos_id == 256
    logits = np.asarray(model(rows[:, :-1])[0], np.float64)
    losses = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, rows[:, 1:, None], 2)[..., 0]
    found = held["runs"][0]["losses"]
    np.testing.assert_allclose(found["all tokens"], losses.mean(0), atol=2e-5)
    for kept in ("last 8", "first, last 7", "first 4, last 4"):
        np.testing.assert_allclose(
            found[kept][:8], found["all tokens"][:8], atol=2e-5
        )  # until the cache is full nothing is lost
        assert np.abs(np.subtract(found[kept], found["all tokens"])[8:]).max() > 1e-2
    table = (tmp_path / "out/table.md").read_text().splitlines()
    assert (
        len(table) == 2 + 4
        and table[2].startswith("| m | 2 | all tokens |")
        and "| 0.000 ± 0.000 |" in table[2]
        and table[5].endswith("| 0.000 ± 0.000 |")
    )
    assert (tmp_path / "out/streaming.png").stat().st_size > 10_000
    capsys.readouterr()
    measure.main(argv)
    assert "until the cache is full" not in capsys.readouterr().out.split("| model")[0]


@pytest.mark.parametrize(
    "option,message",
    [
        ("--rows=5", "5 rows of 64 need 320"),
        ("--cache=64", "must be from 8 to below --tokens=64"),
        ("--names=a", "1 names for 2 models"),
        ("--text=nothing/*", "no such file"),
    ],
)
def test_refused(folders, tmp_path, option, message):
    argv = [*folders, f"--text={tmp_path}/*.txt", f"--out={tmp_path}/out", "--cache=8", "--tokens=64", "--rows=2"]
    with pytest.raises(ConfigError, match=message):
        measure.main([*argv, option])
