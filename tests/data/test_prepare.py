import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gatedattn.config import ConfigError, DataConfig
from gatedattn.data import load, records
from gatedattn.data.packing import Packed, Stream, unpack
from gatedattn.data.prepare import PLAN, prepare

BOS = 9


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 8), max_size=12), min_size=1, max_size=8),
    st.integers(2, 9),
    st.sampled_from(("document", "row")),
)
def test_rows_come_out_of_their_windows_as_they_went_in(documents, seq_len, bos):
    packed = Packed(Stream.of(map(np.array, documents), BOS), seq_len, BOS, bos)
    index = np.arange(len(packed) + 2)  # two rows of padding
    windows = [*packed.windows(0, len(packed)), np.zeros(0, np.int32), np.zeros(0, np.int32)]
    ours, theirs = unpack(windows, seq_len, BOS), packed.rows(index)
    for name in theirs:
        np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)
        assert ours[name].dtype == theirs[name].dtype


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "a").mkdir()
    for i in range(40):
        (tmp_path / "a" / f"{i}.txt").write_text(f"Document {i}: " + "the state of the union is strong. " * (i % 7))
    return dict(
        source=f"text:{tmp_path}/a/*.txt", tokenizer="bpe:300", bos="row", valid_fraction=0.2, cache_dir=str(tmp_path / "cache")
    )


def config_of(corpus, folder):
    return DataConfig(**{k: v for k, v in corpus.items() if k != "source"}, source=f"prepared:{folder}")


def tokens_of(data, split="train"):
    batches = data.valid[next(iter(data.valid))] if split == "valid" else data.train
    rows = batches.num_rows
    found = [batches(i) for i in range(-(-rows // batches.batch_size))]
    return sum(int(b["loss_mask"].sum()) for b in found), found


def test_a_prepared_corpus_is_the_same_text(corpus, tmp_path):
    about = prepare(**corpus, folder=tmp_path / "p", seq_len=16, workers=1, part_bytes=500)
    assert len(about["splits"]["train"]["files"]) > 3
    data = load(config_of(corpus, tmp_path / "p"), seq_len=16, batch_size=4, seed=0, vocab_size=300, workdir=tmp_path / "run")
    plain = load(DataConfig(**corpus), seq_len=16, batch_size=4, seed=0)
    assert data.tokenizer.fingerprint == plain.tokenizer.fingerprint and data.train.num_tokens == plain.train.num_tokens
    assert list(data.valid_bytes.values()) == list(plain.valid_bytes.values())
    assert data.corpora[0].documents == plain.corpora[0].documents
    texts = []
    for each in (data, plain):
        _, batches = tokens_of(each, "valid")
        targets = np.concatenate([b["targets"][b["loss_mask"]] for b in batches])
        texts.append(
            sorted(each.tokenizer.decode(part) for part in np.split(targets, np.flatnonzero(targets == each.tokenizer.bos_id)))
        )
    assert texts[0] == texts[1]
    count, _ = tokens_of(dataclasses.replace(data, train=dataclasses.replace(data.train, batch_size=1)))
    assert count == data.train.num_tokens  # every token once an epoch
    np.testing.assert_allclose(data.unigram(), plain.unigram(), atol=0.01)
    again = load(config_of(corpus, tmp_path / "p"), seq_len=16, batch_size=4, seed=0)
    for step in (0, 7, 10**6):
        parts = [again.train(step, rows) for rows in (slice(0, 1), slice(1, 4))]  # two hosts
        for name, whole in data.train(step).items():
            np.testing.assert_array_equal(np.concatenate([p[name] for p in parts]), whole)
    assert sum(len(rows) for rows in data.train.locate(5).values()) == 4


@pytest.mark.slow
def test_the_files_do_not_depend_on_how_many_made_them(corpus, tmp_path):
    one = prepare(**corpus, folder=tmp_path / "one", seq_len=16, workers=1, part_bytes=2000)
    two = prepare(**corpus, folder=tmp_path / "two", seq_len=16, workers=2, part_bytes=2000)
    assert one == two
    for file in one["splits"]["train"]["files"]:
        assert (tmp_path / "one" / file["name"]).read_bytes() == (tmp_path / "two" / file["name"]).read_bytes()


def test_it_goes_on_where_it_was_killed_and_repairs_what_is_damaged(corpus, tmp_path, capsys):
    whole = prepare(**corpus, folder=tmp_path / "whole", seq_len=16, workers=1, part_bytes=500)
    folder, names = tmp_path / "p", [f["name"] for f in whole["splits"]["train"]["files"]]
    prepare(**corpus, folder=folder, seq_len=16, workers=1, part_bytes=500)
    with pytest.raises(ConfigError, match="bytes instead of .* repairs it"):
        os.truncate(folder / names[1], 10)
        records.Prepared(folder)
    (folder / names[0]).unlink()
    (folder / f"{names[2]}.json").write_text("{")
    (folder / records.ABOUT).unlink()  # killed before the end
    with pytest.raises(ConfigError, match="is not finished"):
        records.Prepared(folder)
    kept = (folder / names[3]).stat().st_mtime_ns
    raw = bytearray((folder / names[4]).read_bytes())
    raw[len(raw) // 2] ^= 1
    (folder / names[4]).write_bytes(raw)
    capsys.readouterr()
    assert prepare(**corpus, folder=folder, seq_len=16, workers=1, part_bytes=500) == whole
    err = capsys.readouterr().err
    assert all(f"{names[i]}" in err and "damaged" in err for i in (1, 2, 4)) and "parts are there already" in err
    assert (folder / names[3]).stat().st_mtime_ns == kept
    assert not list(folder.glob(".*")) and not list(folder.glob("*.tmp"))


@pytest.mark.slow
def test_a_kill_leaves_no_worker_behind_and_costs_no_finished_part(corpus, tmp_path):
    script = (
        "from gatedattn.data.prepare import prepare\n"
        f"options = dict({corpus!r}, folder={str(tmp_path / 'p')!r}, seq_len=16, workers=2, part_bytes=400)\n"
        "if __name__ == '__main__': prepare(**options)\n"
    )
    (tmp_path / "go.py").write_text(script)
    started = subprocess.Popen(
        [sys.executable, tmp_path / "go.py"], stderr=subprocess.PIPE, env=os.environ | {"PYTHONPATH": os.getcwd()}
    )
    while started.poll() is None and not list((tmp_path / "p").glob("train-*.array_record")):
        time.sleep(0.002)
    workers = [int(p) for p in open(f"/proc/{started.pid}/task/{started.pid}/children").read().split()]
    started.send_signal(signal.SIGKILL)
    started.wait()
    deadline = time.monotonic() + 20
    while any(os.path.exists(f"/proc/{pid}") for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert workers and not any(os.path.exists(f"/proc/{pid}") for pid in workers)
    about = prepare(**corpus, folder=tmp_path / "p", seq_len=16, workers=1, part_bytes=400)
    assert about == prepare(**corpus, folder=tmp_path / "q", seq_len=16, workers=1, part_bytes=400)


def test_a_full_disk_is_told_in_a_line_and_the_same_command_goes_on(corpus, tmp_path, small_disk):
    """What is prepared, and the cache."""
    random = np.random.default_rng(0)
    for i in range(40):  # nothing that compresses
        (tmp_path / "a" / f"{i}.txt").write_bytes(random.integers(32, 127, 40_000, np.uint8).tobytes())
    options = corpus | dict(tokenizer="bytes", seq_len=128, part_bytes=400_000)
    with small_disk(tmp_path / "disk", "1m") as disk:
        for workers in (1, 2):
            with pytest.raises(ConfigError, match="disk/p cannot be written .No space left on device.: make room; the same"):
                prepare(**options, folder=disk / "p", workers=workers)
            assert not list((disk / "p").glob(".*"))
        made = [path for path in (disk / "p").iterdir() if path.suffix == ".array_record"]
        assert made and not (disk / "p" / records.ABOUT).exists()
        cached = DataConfig(source=corpus["source"], tokenizer="bytes", cache_dir=str(disk / "cache"))
        with pytest.raises(ConfigError, match="No space left on device.: make room, or give another data.cache_dir"):
            load(cached, seq_len=128, batch_size=4, seed=0)
        subprocess.run(["mount", "-o", "remount,size=9m", str(disk)], check=True)
        times = {path: path.stat().st_mtime_ns for path in made}
        about = prepare(**options, folder=disk / "p", workers=1)
        assert about == prepare(**options, folder=tmp_path / "whole", workers=1)
        assert times == {path: path.stat().st_mtime_ns for path in made}
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(ConfigError, match="Read-only file system.: make room, or give another data.cache_dir"):
            load(cached, seq_len=128, batch_size=4, seed=0)


def test_a_damaged_record_is_found_when_it_is_read(corpus, tmp_path):
    about = prepare(**corpus, folder=tmp_path / "p", seq_len=16, workers=1)
    path = tmp_path / "p" / about["splits"]["train"]["files"][0]["name"]
    whole, random = path.read_bytes(), np.random.default_rng(0)
    used = np.flatnonzero(np.frombuffer(whole, np.uint8))  # most of so small a file is padding
    good = records.Prepared(tmp_path / "p").packed["train"].rows(np.arange(50))
    refused = 0
    for _ in range(30):
        raw = bytearray(whole)
        raw[random.choice(used)] ^= 1 << random.integers(8)
        path.write_bytes(raw)
        try:
            rows = records.Prepared(tmp_path / "p").packed["train"].rows(np.arange(50))
        except ConfigError as error:
            assert "repairs it" in str(error)
            refused += 1
        else:
            for name, value in rows.items():
                np.testing.assert_array_equal(value, good[name])
    assert refused > 3


def test_mixtures_of_prepared_corpora(corpus, tmp_path):
    (tmp_path / "b.txt").write_text("zzz zzz\n\n" * 400)
    prepare(**corpus, folder=tmp_path / "p", seq_len=16, workers=1)
    other = corpus | {"source": f"text:{tmp_path}/b.txt", "tokenizer": str(tmp_path / "p/tokenizer.json")}
    prepare(**other, folder=tmp_path / "q", seq_len=16, workers=1)
    source = f"prepared:{tmp_path}/p@3,prepared:{tmp_path}/q@1"
    data = load(DataConfig(source=source, tokenizer="bpe:300", bos="row"), seq_len=16, batch_size=8, seed=0)
    counts = np.sum([[len(data.train.locate(step).get(c.name, ())) for c in data.corpora] for step in range(50)], axis=0)
    assert counts.tolist() == [300, 100] and list(data.valid) == [c.name for c in data.corpora]


def test_refusals(corpus, tmp_path):
    def refused(match, **changes):
        with pytest.raises(ConfigError, match=match) as error:
            prepare(**(corpus | dict(folder=tmp_path / "p", seq_len=16, workers=1) | changes))
        assert len(str(error.value).splitlines()) <= 2

    prepare(**corpus, folder=tmp_path / "p", seq_len=16, workers=1)
    refused("seq_len was 16, is now 32", seq_len=32)
    refused("one tfds: or text: source", source="synthetic:backcopy")
    refused("one tfds: or text: source", source=f"{corpus['source']},tfds:sotu")
    refused("must be positive", seq_len=0, folder=tmp_path / "q")
    refused("holds something else", folder=tmp_path / "a")
    refused("must be one of document, row", bos="rows")
    refused("matches no file", source=f"text:{tmp_path}/none/*.txt")
    refused("cannot be written", folder="/proc/p")

    def cannot(match, **changes):
        options = dict(seq_len=16, batch_size=4, seed=0) | {k: v for k, v in changes.items() if k == "seq_len"}
        config = config_of(corpus, changes.pop("folder", tmp_path / "p"))
        with pytest.raises(ConfigError, match=match):
            load(dataclasses.replace(config, **{k: v for k, v in changes.items() if k != "seq_len"}), **options)

    cannot(r"cannot serve train.seq_len=32 \(it has 16\)", seq_len=32)
    cannot(r"cannot serve data.bos='document' \(it has 'row'\)", bos="document")
    cannot("another data.tokenizer", tokenizer="bytes")
    cannot("in other tokens already", tokenizer="bpe:280")
    cannot("holds no prepared corpus", folder=tmp_path / "none")
    (tmp_path / "a/new.txt").write_text("new")
    refused("has changed since")
    about = json.loads((tmp_path / "p/about.json").read_text())
    for damage in ({"format": 2}, {"splits": {}}, {"seq_len": -1}, {"splits": about["splits"] | {"train": {}}}):
        (tmp_path / "p/about.json").write_text(json.dumps(about | damage))
        cannot("about.json")
    about["splits"]["train"]["files"][0]["name"] = "../../etc/passwd"
    (tmp_path / "p/about.json").write_text(json.dumps(about))
    cannot("values that cannot be")


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_odd_text(tmp_path, tokenizer):
    """NUL bytes, CRLF, a BOM, empty files, a file of one character, and no trailing newline."""
    odd = {
        "nul": b"a\0b\0",
        "crlf": b"x\r\ny\r\n",
        "bom": b"\xef\xbb\xbfbom",
        "empty": b"",
        "one": b"\xc3\xa9",
        "end": b"no newline",
    }
    (tmp_path / "t").mkdir()
    for name, raw in odd.items():
        (tmp_path / "t" / f"{name}.txt").write_bytes(raw)
    options = dict(source=f"text:{tmp_path}/t/*.txt", tokenizer=tokenizer, cache_dir=str(tmp_path / "c"))
    prepare(**options, folder=tmp_path / "p", seq_len=8, workers=1)
    data = load(DataConfig(source=f"prepared:{tmp_path}/p", tokenizer=tokenizer), seq_len=8, batch_size=1, seed=0)
    rows = [data.train(i) for i in range(data.train.num_rows)]
    valid = data.valid[f"prepared:{tmp_path}/p"]
    rows += [valid(i) for i in range(valid.num_batches)]
    text = {data.tokenizer.decode(r["tokens"][0][r["segment_ids"][0] > 0]) for r in rows}
    assert "".join(sorted("".join(text))) == "".join(sorted("a\0b\0x\ny\nbomé" + "no newline"))


@pytest.mark.slow
def test_one_document_of_200_megabytes(tmp_path):
    line = "the state of the union is strong, number 12345\n"
    with open(tmp_path / "big.txt", "w") as file:
        for _ in range(200_000_000 // (len(line) * 1000)):
            file.write(line * 1000)
    options = dict(source=f"text:{tmp_path}/big.txt", tokenizer="bytes", cache_dir=str(tmp_path / "c"))
    about = prepare(**options, folder=tmp_path / "p", seq_len=4096, workers=1)
    files = [f for split in about["splits"].values() for f in split["files"]]
    assert sum(f["tokens"] for f in files) == os.path.getsize(tmp_path / "big.txt") + 2


@pytest.mark.slow
def test_ctrl_c_is_a_line_and_leaves_nothing_half_written(corpus, tmp_path):
    folder, source = tmp_path / "p", tmp_path / "texts"
    source.mkdir()
    for i in range(4):
        (source / f"{i}.txt").write_text("The gates open, and the sinks close. " * 40_000)
    command = [
        sys.executable,
        "-m",
        "gatedattn",
        "prepare",
        f"text:{source}/*.txt",
        folder,
        "--tokenizer=bytes",
        "--seq_len=16",
    ]
    started = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
    while started.poll() is None and not list(folder.glob(".*.tmp")):
        time.sleep(0.002)
    os.killpg(started.pid, signal.SIGINT)  # as a terminal does: to the workers, too
    _, err = started.communicate(timeout=60)
    assert started.returncode == 130 and err.splitlines()[-1] == "gatedattn prepare: interrupted" and "Traceback" not in err
    assert (folder / PLAN).exists() and not list(folder.glob(".*"))
