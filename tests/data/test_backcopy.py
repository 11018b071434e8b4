import time

import numpy as np
import pytest

from gatedattn.config import ConfigError, DataConfig
from gatedattn.data import backcopy, load


@pytest.fixture(scope="module")
def task():
    return backcopy.from_speeches()


def test_the_process(task):
    batch = task.rows(0, "train", np.arange(512), 128)
    tokens, targets, trigger = batch["tokens"], batch["targets"], batch["trigger"]
    assert task.tokenizer.vocab_size == 65 and task.tokenizer.symbols[:3] == " et"
    assert (tokens[:, 0] == task.tokenizer.bos_id).all() and (targets < 64).all() and (tokens[:, 1:] < 64).all()
    assert not trigger[:, :2].any() and not (trigger[:, 1:] & trigger[:, :-1]).any()  # never adjacent, never after BOS
    assert (targets[:, 1:][trigger[:, 1:]] == tokens[:, :-1][trigger[:, 1:]]).all()
    assert (tokens[:, 1:] == targets[:, :-1]).all()
    assert batch["loss_mask"].all() and (batch["segment_ids"] == 1).all() and (batch["positions"] == np.arange(128)).all()


def test_draws_follow_the_tables(task):
    assert np.allclose(task.table.sum(1), 1)
    x = task.sequences(1, "train", np.arange(4000), 129)
    free = ~task.is_trigger(x[:, :-1])
    counts = np.zeros((65, 64))
    np.add.at(counts, (x[:, :-1][free], x[:, 1:][free]), 1)
    assert (counts[task.table == 0] == 0).all()
    totals = counts.sum(1)
    for i in np.flatnonzero(totals > 5000):
        error = np.abs(counts[i] / totals[i] - task.table[i])
        assert (error < 5 * np.sqrt(task.table[i] / totals[i]) + 3 / totals[i]).all(), task.tokenizer.decode([i])


def test_oracle(task):
    batch = task.rows(2, "train", np.arange(2000), 64)
    loss, entropy = task.oracle_loss(batch["tokens"], batch["targets"]), task.entropy(batch["tokens"])
    assert (loss[batch["trigger"]] == 0).all() and (entropy[batch["trigger"]] == 0).all() and np.isfinite(loss).all()
    assert loss.mean() == pytest.approx(entropy.mean(), abs=0.02)
    first = task.table[task.tokenizer.bos_id]
    assert entropy[0, 0] == pytest.approx(-(first[first > 0] * np.log(first[first > 0])).sum())


def test_symbols_at_the_end_of_the_text_and_of_probability_zero():
    task = backcopy.Backcopy.of("aaaa bbb cc d e f" * 3 + "\x00é", symbols=8)
    assert "\x00" not in task.tokenizer.symbols
    assert np.allclose(task.bigram.sum(1), 1)  # é is the last character: nothing follows it
    x = task.sequences(0, "train", np.arange(300), 50)
    free = ~task.is_trigger(x[:, :-1])
    assert (task.table[x[:, :-1][free], x[:, 1:][free]] > 0).all()


def test_batches_are_a_function_of_seed_and_step(task):
    data = load(DataConfig(source="synthetic:backcopy"), seq_len=64, batch_size=4, seed=3)
    other = load(DataConfig(source="synthetic:backcopy"), seq_len=64, batch_size=4, seed=4)
    a, b = data.train(10), data.train(10)
    assert all((a[k] == b[k]).all() for k in a)
    assert all((data.train(10, slice(1, 3))[k] == a[k][1:3]).all() for k in a)
    assert (a["tokens"] != data.train(11)["tokens"]).any() and (a["tokens"] != other.train(10)["tokens"]).any()
    valid = data.valid["synthetic:backcopy"]
    assert (valid.num_rows, valid.num_batches, data.train.num_rows) == (1024, 256, None)
    assert (valid(0)["tokens"] == other.valid["synthetic:backcopy"](0)["tokens"]).all()
    assert (
        valid(0)["tokens"] != load(DataConfig(source="synthetic:backcopy"), seq_len=64, batch_size=4, seed=0).train(0)["tokens"]
    ).any()
    assert 2 < data.summary()["unigram_entropy"] < 3.5 and data.task.tokenizer is data.tokenizer


def test_fast_enough_not_to_hold_up_a_step(task):
    fastest = min(_seconds(lambda: task.rows(0, "train", np.arange(32), 128)) for _ in range(20))
    assert fastest < 0.01  # about 1.3 ms on an idle core


def _seconds(f):
    start = time.perf_counter()
    f()
    return time.perf_counter() - start


def test_refusals():
    with pytest.raises(ConfigError, match="did you mean 'backcopy'"):
        load(DataConfig(source="synthetic:backcop"), seq_len=8, batch_size=1, seed=0)
    with pytest.raises(ConfigError, match="set model.vocab_size=65"):
        load(DataConfig(source="synthetic:backcopy"), seq_len=8, batch_size=1, seed=0, vocab_size=64)
