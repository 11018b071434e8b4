"""`python -m gatedattn analyze` on every kind of MODEL: numbers equal to the probes', figures with something on them."""

import dataclasses
import json
import re

import jax
import matplotlib.image
import numpy as np
import pytest
from flax import nnx

from gatedattn import Transformer, TransformerConfig, analysis, probes
from gatedattn.__main__ import main
from gatedattn.analysis import collect, write
from gatedattn.config import ConfigError
from gatedattn.data import tokenizers
from gatedattn.interop import models
from gatedattn.interop.build import flat_parameters
from gatedattn.training.checkpoint import Checkpoints

CONFIG = TransformerConfig(
    vocab_size=300, d_model=16, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, ffn_dim=24, gates="g1", init_std=0.2
)
TEXT = "The gates open, <b>and</b> the sinks close.\n" * 40


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A gated and a plain model in converted folders, and the text."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "text.txt").write_text(TEXT)
    tokenizer = tokenizers.train_bpe([TEXT], 280)
    for name, gates in (("gated", "g1+g1:none"), ("plain", "none")):
        config = dataclasses.replace(CONFIG, gates=gates)
        model = Transformer(config, rngs=nnx.Rngs(0))
        models.save_model(models.Source(config, flat_parameters(model), tokenizer), folder / name)
    return folder


@pytest.mark.slow
def test_two_models_side_by_side(saved, tmp_path, capsys):
    argv = ["analyze", str(saved / "plain"), str(saved / "gated"), f"--text={saved / 'text.txt'}", f"--out={tmp_path}"]
    assert main([*argv, "--rows=2", "--length=32", "--window=8", "--layers=0,2"]) == 0
    printed = capsys.readouterr().out
    assert printed == (tmp_path / "table.md").read_text() and printed.count("\n") == 4
    plain, gated = json.loads((tmp_path / "analysis.json").read_text())["models"]
    assert (plain["model"], gated["model"]) == ("plain", "gated") and "gates" in gated["config"]

    # The same from the probes, called directly.
    model, tokenizer = models.load_model(saved / "gated")
    ids = tokenizer.encode(TEXT)[:62].reshape(2, 31)
    tokens = np.concatenate([np.full((2, 1), tokenizer.bos_id), ids], axis=1)
    found, hidden = nnx.jit(probes.inspect)(model, tokens)
    logprobs = np.asarray(jax.nn.log_softmax(model.logits(hidden)))
    loss = -np.take_along_axis(logprobs[:, :-1], tokens[:, 1:, None], axis=-1).mean()
    assert gated["loss"] == pytest.approx(loss, rel=1e-5) and gated["perplexity"] == pytest.approx(np.exp(loss), rel=1e-5)
    np.testing.assert_allclose(gated["bos_share"], found["bos_share"], atol=1e-6)
    assert gated["F-Attn"] == pytest.approx(float(found["bos_share"].mean()), rel=1e-5)
    assert gated["M-Act"] == pytest.approx(float(found["activation_max"].mean()), rel=1e-5)
    assert gated["massive tokens"] == float(found["massive"].max())
    assert gated["mean gate"]["g1"] == pytest.approx(float(found["gates"]["g1"]["mean"].mean()), rel=1e-5)
    assert plain["mean gate"] == {}
    stored = np.load(tmp_path / "gated.npz", allow_pickle=False)
    np.testing.assert_array_equal(stored["tokens"], tokens)
    maps = nnx.jit(probes.attention_maps)(model, tokens[:1, :8])
    np.testing.assert_allclose(stored["maps"], maps[np.array([0, 2]), 0], atol=1e-6)
    assert stored["openness/g1"].shape == (3, 2, 32, 4)

    figures = {path.stem for path in tmp_path.glob("*.png")}
    assert figures == {"heads", "attention", "layers", "positions", "activations", "gates"}
    for path in tmp_path.glob("*.png"):
        assert len(np.unique(matplotlib.image.imread(path)[..., :3].reshape(-1, 3), axis=0)) > 50, path
    page = (tmp_path / "text.html").read_text()
    assert "BOS" in page and "<b>" not in page and "does not look at its input" in page
    words = re.findall(r'<span style="background:rgba\(230,120,20,[\d.]+\)" title="([\d.]+)">', page)
    openness = stored["openness/g1"][:, 0].mean((0, 2))
    np.testing.assert_allclose([float(w) for w in words[:32]], openness, atol=6e-4)


@pytest.mark.slow
def test_a_run_a_checkpoint_and_a_hugging_face_folder(saved, tmp_path):
    """The same parameters, kept in three other ways, give the same analysis."""
    model, tokenizer = models.load_model(saved / "plain")
    reference = analysis.analyze_model(model, tokenizer, TEXT, rows=1, length=16)
    run = tmp_path / "run"
    params = nnx.as_pure(nnx.state(model, nnx.Param))
    from gatedattn.config import RunConfig, to_mapping
    from gatedattn.training.step import TrainState

    config = RunConfig(model=model.config)
    run.mkdir()
    (run / "config.json").write_text(json.dumps(to_mapping(config)))
    tokenizer.save(run)
    with Checkpoints(run) as checkpoints:
        checkpoints.save(TrainState(params, {"m": np.zeros(2)}, np.int32(7)), config)
    models.convert("to-hf", saved / "plain", tmp_path / "hf")
    for path in (run, run / "checkpoints" / "7", tmp_path / "hf"):
        write.analyze([path], saved / "text.txt", tmp_path / "out", rows=1, length=16)
        (found,) = json.loads((tmp_path / "out" / "analysis.json").read_text())["models"]
        assert found["loss"] == pytest.approx(reference.loss, rel=1e-6), path
        np.testing.assert_allclose(found["bos_share"], reference.found["bos_share"], atol=1e-6)


def test_rows_begin_with_bos_and_go_on():
    tokenizer = tokenizers.Bytes()
    rows = collect.rows_of("abcdefgh", tokenizer, 2, 4)
    assert rows.tolist() == [[256, 97, 98, 99], [256, 100, 101, 102]]
    assert collect.rows_of("abcdefgh", tokenizer, 4, 6).tolist() == [[256, *b"abcde"]]
    assert collect.rows_of("ab", tokenizer, 4, 6).tolist() == [[256, 97, 98]]


def test_what_cannot_be_analyzed_is_told(saved, tmp_path, capsys):
    argv = ["analyze", str(saved / "plain"), f"--text={saved / 'text.txt'}", f"--out={tmp_path}"]
    cases = {
        "--layers=0,3": "layer 3: plain has the layers 0 .. 2",
        "--length=2": "must be at least 3",
        "--text=absent.txt": "absent.txt cannot be read",
        "--names=a,b": "2 names for 1 models",
    }
    for extra, words in cases.items():
        assert main([*argv, extra]) == 2
        assert words in capsys.readouterr().err
    learned = Transformer(dataclasses.replace(CONFIG, position="learned", max_seq_len=8), rngs=nnx.Rngs(0))
    with pytest.raises(ConfigError, match="only 8 positions"):
        analysis.analyze_model(learned, tokenizers.Bytes(), TEXT, length=16)


def test_names():
    assert write.name_apart(["a/run", "b/run"]) == ["a/run", "b/run"]
    assert write.name_apart(["x/a", "x/b"]) == ["a", "b"] and write.name_apart(["x/a"]) == ["a"]
    assert write.name_apart(["a", "a"]) == ["a-0", "a-1"]
