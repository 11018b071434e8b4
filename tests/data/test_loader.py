import dataclasses
import json
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from gatedattn.config import ConfigError, DataConfig
from gatedattn.data import cache, load, prefetch, tokenizers

KEYS = {"tokens", "targets", "loss_mask", "segment_ids", "positions"}


@pytest.fixture
def corpus(tmp_path):
    """Thirty small documents; bytes tokens; everything the load prepares goes to a folder of the test's own."""
    (tmp_path / "a").mkdir()
    for i in range(30):
        (tmp_path / "a" / f"{i}.txt").write_text(f"Document {i}: " + "the state of the union is strong. " * (i % 5))
    return DataConfig(
        source=f"text:{tmp_path}/a/*.txt", tokenizer="bytes", valid_fraction=0.2, cache_dir=str(tmp_path / "cache")
    )


def same(a, b):
    return a.keys() == b.keys() and all((a[k] == b[k]).all() for k in a)


def ids_of_rows(batch):
    return [row.tobytes() for row in np.concatenate([batch["tokens"], batch["targets"], batch["segment_ids"]], axis=1)]


def test_batches_are_a_pure_function_of_seed_and_step(corpus):
    data, fresh = load(corpus, seq_len=32, batch_size=4, seed=7), load(corpus, seq_len=32, batch_size=4, seed=7)
    assert data.train(0).keys() == KEYS and all(v.shape == (4, 32) for v in data.train(0).values())
    later = data.train(10**7)  # far beyond the first epoch, at once
    for step in (5, 0, 3):
        assert same(data.train(step), fresh.train(step))
    assert same(fresh.train(10**7), later)
    other = load(corpus, seq_len=32, batch_size=4, seed=8)
    assert not same(other.train(0), data.train(0))
    assert same(other.valid[corpus.source](0), data.valid[corpus.source](0))


def test_a_host_reads_only_its_rows(corpus):
    data = load(corpus, seq_len=32, batch_size=4, seed=7)
    parts = [data.train(3, rows) for rows in (slice(0, 2), slice(2, 4))]
    assert all((np.concatenate([p[k] for p in parts]) == v).all() for k, v in data.train(3).items())


def test_every_row_once_an_epoch_in_a_new_order(corpus):
    data = load(corpus, seq_len=32, batch_size=1, seed=7)
    n = data.train.num_rows
    epochs = [[ids_of_rows(data.train(e * n + i))[0] for i in range(n)] for e in range(3)]
    assert n > 20 and epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
    tokens = sum(data.train(i)["loss_mask"].sum() for i in range(n))
    assert tokens == data.train.num_tokens


def test_epochs_join_without_dropping_the_tail(corpus):
    single, by_four = (load(corpus, seq_len=32, batch_size=b, seed=7) for b in (1, 4))
    rows = [ids_of_rows(single.train(i))[0] for i in range(80)]
    assert [r for step in range(20) for r in ids_of_rows(by_four.train(step))] == rows


def test_validation_is_one_pass_in_order(corpus):
    data = load(corpus, seq_len=32, batch_size=4, seed=7)
    valid = data.valid[corpus.source]
    batches = [valid(i) for i in range(valid.num_batches)]
    targets = np.concatenate([b["targets"][b["loss_mask"]] for b in batches])
    assert len(targets) == valid.num_tokens == data.valid_bytes[corpus.source] + data.corpora[0].documents["valid"]
    text = data.tokenizer.decode(targets)
    assert text.count("Document") == data.corpora[0].documents["valid"] > 0
    assert all(b["tokens"].shape == (4, 32) for b in batches)
    for step in (-1, valid.num_batches):
        with pytest.raises(IndexError, match="no batch"):
            valid(step)


def test_held_out_text_is_not_in_training(corpus):
    data = load(corpus, seq_len=32, batch_size=4, seed=7)
    texts = {s: data.tokenizer.decode(p.stream.tokens) for s, p in data.corpora[0].packed.items()}
    heads = {s: {w.split(":")[0] for w in t.split("Document ")[1:]} for s, t in texts.items()}
    assert not heads["train"] & heads["valid"] and len(heads["train"] | heads["valid"]) == 30


def test_mixture_by_weight(tmp_path, corpus):
    (tmp_path / "b.txt").write_text("zzz zzz\n\n" * 40)
    source = f"{corpus.source}@3,text:{tmp_path}/b.txt@1"
    data = load(dataclasses.replace(corpus, source=source), seq_len=16, batch_size=8, seed=0)
    batches = [data.train(i)["tokens"] for i in range(50)]
    share = np.mean([np.isin(b, [ord("z"), ord("\n")]).any(1).mean() for b in batches])
    assert share == pytest.approx(0.25, abs=0.01) and data.weights == (0.75, 0.25)
    assert list(data.valid) == [corpus.source, f"text:{tmp_path}/b.txt"]
    assert same(load(dataclasses.replace(corpus, source=source), seq_len=16, batch_size=8, seed=0).train(9), data.train(9))


def test_sources_without_weights_are_joined(tmp_path, corpus):
    (tmp_path / "b.txt").write_text("zzz zzz\n\n" * 40)
    data = load(dataclasses.replace(corpus, source=f"{corpus.source},text:{tmp_path}/b.txt"), seq_len=16, batch_size=1, seed=0)
    n = data.train.num_rows
    assert n == sum(len(c.packed["train"]) for c in data.corpora)
    rows = [data.train(i)["tokens"] for i in range(n)]
    assert sum(np.isin(r, [ord("z"), ord("\n")]).any() for r in rows) == len(data.corpora[1].packed["train"])


def test_fewer_rows_than_a_batch(tmp_path):
    (tmp_path / "x.txt").write_text("tiny corpus")
    config = DataConfig(source=f"text:{tmp_path}/x.txt", tokenizer="bytes", cache_dir=str(tmp_path / "c"))
    data = load(config, seq_len=64, batch_size=8, seed=0)
    batch = data.train(0)
    assert data.train.num_rows == 1 and (batch["tokens"] == batch["tokens"][0]).all() and batch["tokens"].shape == (8, 64)
    assert data.valid[config.source](0)["segment_ids"][1:].sum() == 0


def test_bpe_is_trained_on_the_training_split_and_kept_with_the_run(tmp_path, corpus):
    config = dataclasses.replace(corpus, tokenizer="bpe:300")
    held_out = "qqqqq" * 50
    data = load(config, seq_len=32, batch_size=2, seed=0, workdir=tmp_path / "run")
    assert (tmp_path / "run" / "tokenizer.json").exists() and data.tokenizer.vocab_size <= 300
    valid_doc = next(p for p in sorted((tmp_path / "a").iterdir()) if p.read_text() in data.tokenizer.decode(
        np.delete(s := data.corpora[0].packed["valid"].stream.tokens, np.flatnonzero(s == data.tokenizer.bos_id))))  # fmt: skip
    valid_doc.write_text(held_out)
    changed = load(config, seq_len=32, batch_size=2, seed=0)
    assert changed.tokenizer.fingerprint == data.tokenizer.fingerprint  # held-out text has no say
    for path in (tmp_path / "a").iterdir():
        path.write_text(held_out + path.name)
    assert load(config, seq_len=32, batch_size=2, seed=0).tokenizer.fingerprint != data.tokenizer.fingerprint
    resumed = load(config, seq_len=32, batch_size=2, seed=0, workdir=tmp_path / "run")
    assert resumed.tokenizer.fingerprint == data.tokenizer.fingerprint  # a run keeps its ids
    with pytest.raises(ConfigError, match="another tokenizer"):
        load(corpus, seq_len=32, batch_size=2, seed=0, workdir=tmp_path / "run")


def test_special_tokens_in_documents_begin_nothing(tmp_path, corpus):
    for path in (tmp_path / "a").iterdir():
        path.write_text("before <|bos|> after <s> end")
    data = load(dataclasses.replace(corpus, tokenizer="bpe:300"), seq_len=32, batch_size=2, seed=0)
    stream = data.corpora[0].packed["train"].stream
    assert (stream.tokens == data.tokenizer.bos_id).sum() == len(stream.starts) == data.corpora[0].documents["train"]


def test_row_bos(corpus):
    data = load(dataclasses.replace(corpus, bos="row"), seq_len=16, batch_size=4, seed=0)
    assert all((data.train(i)["tokens"][:, 0] == data.tokenizer.bos_id).all() for i in range(10))


def test_the_cache_is_used_and_a_damaged_one_rebuilt(tmp_path, corpus, capsys):
    before = load(corpus, seq_len=32, batch_size=4, seed=0).train(0)
    assert "tokenizing" in capsys.readouterr().err
    load(dataclasses.replace(corpus, bos="row"), seq_len=16, batch_size=4, seed=0)
    assert capsys.readouterr().err == ""  # one tokenized corpus serves every row length
    (tokens,) = (tmp_path / "cache" / "tokens").glob("*/train.tokens")
    for damage in (lambda: os.truncate(tokens, 100), lambda: tokens.write_bytes(bytes(tokens.stat().st_size)), tokens.unlink,
                   lambda: (tokens.parent / cache.MANIFEST).write_text("{")):  # fmt: skip
        damage()
        assert same(load(corpus, seq_len=32, batch_size=4, seed=0).train(0), before)
        assert "damaged" in capsys.readouterr().err
    assert [p.name for p in (tmp_path / "cache" / "tokens").iterdir()] == [tokens.parent.name]  # nothing left behind


def test_two_processes_may_build_at_once(tmp_path):
    barrier = threading.Barrier(4)

    def build(folder):
        barrier.wait()
        (folder / "x").write_text("same")

    results = []
    threads = [threading.Thread(target=lambda: results.append(cache.folder(tmp_path / "f", build))) for _ in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert len(results) == 4 and (tmp_path / "f" / "x").read_text() == "same" and len(list(tmp_path.iterdir())) == 1
    with pytest.raises(ZeroDivisionError):
        cache.folder(tmp_path / "g", lambda folder: 1 / 0)
    assert len(list(tmp_path.iterdir())) == 1


def test_refusals(tmp_path, corpus):
    with pytest.raises(ConfigError, match="257 ids but model.vocab_size=256: set model.vocab_size=257"):
        load(corpus, seq_len=8, batch_size=1, seed=0, vocab_size=256, workdir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match="data.tokenizer='byte'"):
        load(dataclasses.replace(corpus, tokenizer="byte"), seq_len=8, batch_size=1, seed=0)
    for path in (tmp_path / "a").iterdir():
        path.write_bytes(b"\xef\xbb\xbf")
    with pytest.raises(ConfigError, match="holds no text"):
        load(corpus, seq_len=8, batch_size=1, seed=0)
    for path in (tmp_path / "a").iterdir():
        path.write_bytes(b"abc\xff")
    for tokenizer in ("bytes", "bpe:300"):
        with pytest.raises(ConfigError, match="not UTF-8 at byte 3"):
            load(dataclasses.replace(corpus, tokenizer=tokenizer), seq_len=8, batch_size=1, seed=0)


def test_summary(corpus):
    data = load(corpus, seq_len=32, batch_size=4, seed=0)
    summary = json.loads(json.dumps(data.summary()))
    about = summary["sources"][corpus.source]
    assert about["train_documents"] + about["valid_documents"] == 30 and about["weight"] == 1
    assert summary["tokens_per_epoch"] == about["train_tokens"] == data.train.num_tokens
    targets = np.concatenate([b["targets"][b["loss_mask"]] for b in map(data.train, range(data.train.num_rows))])
    p = np.bincount(targets) / len(targets)  # four epochs of them
    assert summary["unigram_entropy"] == pytest.approx(-(p[p > 0] * np.log(p[p > 0])).sum(), abs=1e-6)


def test_prefetch_keeps_order_and_stops():
    made, before = [], threading.active_count()

    def batches(step):
        made.append(step)
        return {"step": np.array(step)}

    assert [int(b["step"]) for b in prefetch(batches, 3, 9)] == [3, 4, 5, 6, 7, 8]
    endless = prefetch(batches, 0, 10**9, depth=2)
    assert int(next(endless)["step"]) == 0
    time.sleep(0.05)
    assert len(made) <= 6 + 4  # no further ahead than depth, one in hand and one being made
    endless.close()
    assert threading.active_count() == before
    assert list(prefetch(batches, 5, 5)) == []


def test_prefetch_raises_what_the_thread_raised():
    def batches(step):
        if step == 2:
            raise OSError("disk gone")
        return {"step": step}

    seen = []
    with pytest.raises(OSError, match="disk gone"):
        for batch in prefetch(batches, 0, 10):
            seen.append(batch["step"])
    assert seen == [0, 1]


def test_the_default_corpus_needs_no_tensorflow(tmp_path):
    script = (
        "import sys\n"
        "from gatedattn.config import DataConfig\n"
        "from gatedattn.data import load\n"
        f"data = load(DataConfig(cache_dir={str(tmp_path)!r}, tokenizer='bytes'), seq_len=256, batch_size=8, seed=0)\n"
        "batch = data.train(0)\n"
        "assert batch['tokens'].shape == (8, 256) and len(data.valid['tfds:sotu'](0)) == 5\n"
        "assert data.train.num_tokens > 10**7 and data.valid_bytes['tfds:sotu'] == 1368746\n"
        "assert 'tensorflow' not in sys.modules and 'torch' not in sys.modules, 'heavy import'\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "" and "preparing tfds:sotu" in done.stderr
    assert tokenizers.load(tmp_path) is None
