import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from gatedattn import Transformer, TransformerConfig
from gatedattn.__main__ import main
from gatedattn.config import ConfigError
from gatedattn.data.tokenizers import Bytes
from gatedattn.evaluation import perplexity
from gatedattn.interop import models
from gatedattn.interop.build import flat_parameters

CONFIG = TransformerConfig(
    vocab_size=259, d_model=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, ffn_dim=24, kernel="reference"
)
TEXTS = ["The Union is strong. " * 5, "é", "My fellow citizens,\n" * 2, "", "x" * 33]


@pytest.fixture(scope="module")
def model():
    graphdef, shapes = nnx.split(nnx.eval_shape(lambda: Transformer(CONFIG, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(0)
    return nnx.merge(graphdef, jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.3, x.shape), x.dtype), shapes))


@given(st.integers(0, 200), st.integers(1, 50), st.data())
def test_every_target_counts_once_and_sees_enough(targets, length, data):
    stride = data.draw(st.integers(1, length))
    counted = []
    for window in perplexity.windows(targets, length, stride):
        assert 0 <= window.begin <= window.first < window.end <= targets and window.end - window.begin <= length
        counted += range(window.first, window.end)
        for target in range(window.first, window.end):
            assert target - window.begin >= min(target, length - stride)
    assert counted == list(range(targets))


@given(st.lists(st.integers(1, 40), max_size=12), st.integers(1, 16), st.data())
def test_batches_hold_each_target_once(sizes, length, data):
    stride, batch = data.draw(st.integers(1, length)), data.draw(st.integers(1, 3))
    documents = [np.arange(size) + 100 * i for i, size in enumerate(sizes)]
    seen = []
    for rows in perplexity.packed(documents, length, stride, batch):
        assert all(x.shape == (batch, length) for x in rows.values())
        seen += rows["targets"][rows["count"]].tolist()
        inside = rows["segment_ids"] > 0
        np.testing.assert_array_equal(rows["tokens"][inside] + 1, rows["targets"][inside])
        assert (rows["segment_ids"][rows["count"]] > 0).all()
        starts = rows["positions"] == 0
        for tokens, segments, start in zip(rows["tokens"], rows["segment_ids"], starts, strict=True):
            for segment in set(segments.tolist()) - {0}:
                assert (start & (segments == segment)).sum() == 1 and len({t // 100 for t in tokens[segments == segment]}) == 1
    assert sorted(seen) == sorted(t for d in documents for t in d[1:].tolist())


def naive(model, length, stride):
    """One window at a time, all logits at once."""
    total = 0.0
    forward = jax.jit(lambda tokens: model(tokens)[0])
    for text in TEXTS:
        ids = np.array([256, *text.encode()])
        done = 0
        while done < len(ids) - 1:
            end = min(length, len(ids) - 1) if not done else min(done + stride, len(ids) - 1)
            begin = max(end - length, 0)
            logits = np.asarray(forward(ids[None, begin:end]), np.float64)[0]
            logp = (
                logits
                - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
                - logits.max(-1, keepdims=True)
            )
            for t in range(done, end):
                total -= logp[t - begin, ids[t + 1]]
            done = end
    return total


@pytest.mark.slow
def test_equal_to_one_window_at_a_time_whatever_the_batch(model):
    tokens = sum(len(text.encode()) for text in TEXTS)
    for stride, batch in ((16, 1), (16, 3), (7, 2)):
        found = perplexity.measure(model, Bytes(), TEXTS, length=16, stride=stride, batch=batch)
        expected = naive(model, 16, stride)
        assert found["tokens"] == tokens and found["documents"] == 5
        assert found["loss"] == pytest.approx(expected / tokens, rel=1e-6)
        assert found["bits_per_byte"] == pytest.approx(expected / tokens / math.log(2), rel=1e-6)
        assert found["perplexity"] == pytest.approx(math.exp(expected / tokens), rel=1e-5)
        by = found["by_position"]
        assert [(p["from"], p["to"]) for p in by] == [(1, 1), (2, 3), (4, 7), (8, 15), (16, 16)]
        assert sum(p["tokens"] for p in by) == tokens
        assert sum(p["tokens"] * p["loss"] for p in by) == pytest.approx(expected, rel=1e-6)


def test_a_mesh_changes_nothing(model):
    from gatedattn import sharding

    expected = perplexity.measure(model, Bytes(), TEXTS, length=16, batch=2)
    mesh = jax.make_mesh((2, 2), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    graphdef, params = nnx.split(model)
    with jax.set_mesh(mesh):
        placed = nnx.merge(graphdef, jax.device_put(params, sharding.shardings(params, mesh)))
        found = perplexity.measure(placed, Bytes(), TEXTS, length=16, batch=2)
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)


def test_logits_of_a_chunk_are_enough(model):
    rng = np.random.default_rng(1)
    hidden, w = rng.standard_normal((2, 11, 8)).astype(np.float32), rng.standard_normal((8, 13)).astype(np.float32)
    targets = rng.integers(0, 13, (2, 11))
    logits = hidden.astype(np.float64) @ w
    expected = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    for chunk in (1, 4, 11, 100):
        found, least = perplexity.token_losses(hidden, w, targets, chunk)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(np.asarray(found == least), logits.argmax(-1) == targets)


def test_the_command(model, tmp_path, capsys):
    tokenizer = Bytes()
    models.save_model(models.Source(CONFIG, flat_parameters(model), tokenizer), tmp_path / "model")
    for i, text in enumerate(TEXTS):
        (tmp_path / f"{i}.txt").write_text(text)
    command = ["perplexity", str(tmp_path / "model"), f"--text=all={tmp_path}/*.txt", f"--text={tmp_path}/0.txt", "--length=16"]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    expected = perplexity.measure(model, tokenizer, [t for t in TEXTS if t], length=16)
    assert found["sets"]["all"]["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert found["average"]["loss"] == pytest.approx(np.mean([s["loss"] for s in found["sets"].values()]))
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "perplexity" in out and "average" in out
    for wrong, words in (
        (["--text=nowhere*"], "no such file"),
        ([f"--text={tmp_path}/3.txt"], "0 documents without a token"),
        ([f"--text={tmp_path}/0.txt", "--stride=17", "--length=16"], "stride=17: must be in 1..16"),
        ([f"--text={tmp_path}/0.txt", f"--text={tmp_path}/0.txt"], "two sets are called"),
        ([], "--text"),
    ):
        try:
            code = main(["perplexity", str(tmp_path / "model"), *wrong])
        except SystemExit as error:
            code = error.code
        assert code == 2 and words in capsys.readouterr().err


def test_a_tokenizer_of_another_model_is_refused(model):
    tokenizer = Bytes()
    tokenizer.vocab_size = 300
    with pytest.raises(ConfigError, match="do not belong together"):
        perplexity.measure(model, tokenizer, TEXTS)
