"""Files that somebody else made: whatever is in them, they are read as what they are, or refused with a `ConfigError`.

A few examples of each here; FUZZ=2000 in the environment asks for so many.

Nothing is allocated that the file does not hold (`frugal`), and nothing is written outside the folder that was given.
"""

import contextlib
import json
import os
import struct
import tracemalloc
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gatedattn.config import CheckpointConfig, ConfigError, RunConfig, TransformerConfig, from_mapping, to_mapping
from gatedattn.data import records, tokenizers
from gatedattn.interop import gguf, models, tensors
from gatedattn.training import recorder
from gatedattn.training.checkpoint import Checkpoints
from gatedattn.training.resume import PassedOver
from gatedattn.training.step import TrainState

fuzz = settings(
    max_examples=int(os.environ.get("FUZZ", 40)), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
HUGE = st.sampled_from([2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1, 10**30, -1, 0])
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 300)
    | HUGE
    | st.floats()
    | st.text(max_size=6)
    | st.sampled_from(["F32", "I64", "../x"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)


@contextlib.contextmanager
def frugal(limit=30_000_000):
    """Fails if more than `limit` bytes are allocated at one time."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()


def mutate(value, data):
    """A JSON value with one part of it, at any depth, replaced, removed or doubled."""
    if isinstance(value, (dict, list)) and value and data.draw(st.integers(0, 9)) < 9:
        keys = sorted(value) if isinstance(value, dict) else range(len(value))
        key = data.draw(st.sampled_from(list(keys)))
        copy = dict(value) if isinstance(value, dict) else list(value)
        if data.draw(st.integers(0, 9)) == 0:
            del copy[key]
        else:
            copy[key] = mutate(value[key], data)
        return copy
    return data.draw(JSON)


def flip(raw, data):
    """Bytes with a few of them changed, a number written over them, or cut short."""
    raw = bytearray(raw)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw) - 1))
        kind = data.draw(st.sampled_from(["bit", "number", "cut"]))
        if kind == "bit":
            raw[at] ^= 1 << data.draw(st.integers(0, 7))
        elif kind == "number":
            raw[at : at + 8] = struct.pack("<Q", data.draw(HUGE) % 2**64)
        elif at:
            del raw[at:]
    return bytes(raw)


# --- safetensors -------------------------------------------------------------------------------------------------------------

HEADER = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "I64", "shape": [1], "data_offsets": [24, 32]},
}


def safetensors(header, body=bytes(32), length=None):
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def read_safetensors(path):
    with frugal(), contextlib.suppress(ConfigError):
        file = tensors.File(path)
        for name in file:
            array = file[name]
            assert array.nbytes <= path.stat().st_size
            np.asarray(array).sum()


@fuzz
@given(st.data())
def test_a_safetensors_header(tmp_path, data):
    path = tmp_path / "model.safetensors"
    length = data.draw(st.none() | HUGE.filter(lambda n: 0 <= n < 2**64))
    path.write_bytes(safetensors(mutate(HEADER, data), length=length))
    read_safetensors(path)
    path.write_bytes(flip(safetensors(HEADER), data))
    read_safetensors(path)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 0]},  # 2^64 elements are 0 in 64 bits
        {"dtype": "F32", "shape": [10**9, 10**9], "data_offsets": [0, 32]},
        {"dtype": "F32", "shape": [2], "data_offsets": [2**63, 2**63 + 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]},
        {"dtype": "F32", "shape": [2], "data_offsets": [30, 38]},
        {"dtype": "F32", "shape": [True, 2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [1e300], "data_offsets": [0, 8]},
        {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": "ab", "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": {"0": 8}},
    ],
)
def test_a_hostile_safetensors_header_is_refused(tmp_path, entry):
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors({"a": entry}))
    with frugal(1_000_000), pytest.raises(ConfigError):
        tensors.File(path)


# --- GGUF --------------------------------------------------------------------------------------------------------------------


def gguf_bytes():
    def string(text):
        return struct.pack("<Q", len(text)) + text.encode()

    raw = b"GGUF" + struct.pack("<IQQ", 3, 1, 4)
    raw += string("general.architecture") + struct.pack("<I", 8) + string("llama")
    raw += string("llama.block_count") + struct.pack("<II", 4, 2)
    raw += string("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 2) + string("a") + string("b")
    raw += string("tokenizer.ggml.scores") + struct.pack("<IIQ2f", 9, 6, 2, 0.0, 1.0)
    raw += string("token_embd.weight") + struct.pack("<IQQIQ", 2, 4, 2, 0, 0)
    raw += bytes(-len(raw) % 32)
    return raw + np.arange(8, dtype=np.float32).tobytes()


def test_the_gguf_file_that_is_fuzzed_is_one(tmp_path):
    pytest.importorskip("gguf")
    (tmp_path / "m.gguf").write_bytes(gguf_bytes())
    file = gguf.File(tmp_path / "m.gguf")
    assert file["token_embd.weight"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]] and file.metadata["tokenizer.ggml.tokens"] == [
        "a",
        "b",
    ]


@fuzz
@given(st.data())
def test_a_gguf_header(tmp_path, data):
    pytest.importorskip("gguf")
    path = tmp_path / "m.gguf"
    path.write_bytes(flip(gguf_bytes(), data))
    with frugal(), contextlib.suppress(ConfigError):
        file = gguf.File(path)
        for name in file:
            assert file.entries[name].end <= path.stat().st_size
            file[name]
    with frugal(), contextlib.suppress(ConfigError):
        models.open_model(path)


# --- tokenizers --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer_json():
    return json.loads(tokenizers.train_bpe(["the state of the union is strong. " * 20], 300).content)


@fuzz
@given(st.data())
def test_a_tokenizer_json(tokenizer_json, data):
    content = mutate(tokenizer_json, data)
    with frugal(), contextlib.suppress(ConfigError):
        tokenizer = tokenizers.Json(json.dumps(content).encode())
        ids = tokenizer.encode("the state of the union")
        assert all(0 <= i < tokenizer.vocab_size for i in ids) and isinstance(tokenizer.decode(ids), str)


@fuzz
@given(st.binary(max_size=200), st.sampled_from([tokenizers.Json, tokenizers.SentencePiece]))
@example(b"[" * 100_000, tokenizers.Json)
@example(b'{"a":' * 100_000, tokenizers.Json)
@example(b"\xff\xfe", tokenizers.Json)
def test_a_tokenizer_of_any_bytes(kind_content, kind):
    with frugal(), contextlib.suppress(ConfigError):
        kind(kind_content)


# --- folders of ours ---------------------------------------------------------------------------------------------------------


@fuzz
@given(st.data())
def test_a_converted_folders_config(tmp_path, data):
    about = {"format": "gatedattn", "model": to_mapping(TransformerConfig()), "bos_id": 1}
    (tmp_path / "config.json").write_text(json.dumps(mutate(about, data)))
    with frugal(), contextlib.suppress(ConfigError):
        models.open_model(tmp_path)


@fuzz
@given(st.data())
def test_any_mapping_is_a_config_or_refused(data):
    with contextlib.suppress(ConfigError):
        config = from_mapping(RunConfig, mutate(to_mapping(RunConfig()), data) or {})
        assert from_mapping(RunConfig, json.loads(json.dumps(to_mapping(config)))) == config


@fuzz
@given(st.binary(max_size=100), st.data())
def test_lines_of_a_run(tmp_path, raw, data):
    line = json.dumps({"step": 1, "loss": 2.0}).encode()
    (tmp_path / "metrics.jsonl").write_bytes(line + b"\n" + raw + b"\n" + flip(line, data) + b"\n" + line + b"\n")
    lines = recorder.read_lines(tmp_path / "metrics.jsonl")
    assert {"step": 1, "loss": 2.0} in lines and all(isinstance(each, dict) for each in lines)
    recorder._truncate(tmp_path / "metrics.jsonl", 1)
    assert {"step": 1, "loss": 2.0} in recorder.read_lines(tmp_path / "metrics.jsonl")


@fuzz
@given(st.data())
def test_what_a_prepared_folder_and_a_run_say_of_themselves(tmp_path, data):
    file = {"name": "train-00000.array_record", "rows": 1, "tokens": 3, "bytes": 9, "sha256": "x"}
    split = {"files": [file], "documents": 1, "text_bytes": 3}
    about = {"format": 1, "seq_len": 4, "bos": "row", "tokenizer": "x", "splits": {"train": split, "valid": split}}
    tokenizers.Bytes().save(tmp_path)
    (tmp_path / "about.json").write_text(json.dumps(mutate(about, data)))
    with frugal(), contextlib.suppress(ConfigError):
        records.Prepared(tmp_path)
    (tmp_path / "passed_over.json").write_text(json.dumps(mutate([{"batches": [1, 2], "rewound_to": 0}], data)))
    with frugal(), contextlib.suppress(ConfigError):
        PassedOver(tmp_path)


# --- checkpoints -------------------------------------------------------------------------------------------------------------

NAMES = st.text(st.characters(exclude_characters="/\0", exclude_categories=("Cs",)), min_size=1, max_size=12)


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(NAMES, st.sampled_from(["folder", "file", "link"])), max_size=5))
@example([("3", "link"), ("007", "folder"), ("-1", "folder"), ("1e3", "folder"), ("٣", "folder"), ("9", "file")])
def test_names_in_the_folder_of_checkpoints(tmp_path_factory, names):
    """Folders, files and links of any name: a save goes where it must, and what a link points to stays as it is."""
    tmp_path = tmp_path_factory.mktemp("run")
    outside, run = tmp_path / "outside", tmp_path / "run"
    (outside / "precious").mkdir(parents=True)
    (outside / "precious/file").write_text("mine")
    (run / "checkpoints").mkdir(parents=True)
    for name, kind in names:
        path = run / "checkpoints" / name
        if name in (".", "..", "50") or os.path.lexists(path) or len(name.encode()) > 200:
            continue
        {"folder": path.mkdir, "file": path.touch, "link": lambda path=path: path.symlink_to(outside / "precious")}[kind]()
    state = TrainState(nnx.State({"w": jax.numpy.arange(3.0)}), {}, np.int32(50))
    with contextlib.suppress(ConfigError), Checkpoints(run, CheckpointConfig(keep=1)) as checkpoints:
        with contextlib.suppress(Exception):
            checkpoints.save(state, RunConfig())
            checkpoints.finish()
    assert (outside / "precious/file").read_text() == "mine" and sorted(p.name for p in outside.iterdir()) == ["precious"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["outside", "run"]
    assert Path(run / "checkpoints").is_dir()


def test_no_pickle_is_ever_loaded():
    sources = [p for p in Path(__file__).parent.parent.glob("gatedattn/**/*.py")]
    assert len(sources) > 50
    for path in sources:
        text = path.read_text()
        assert "import pickle" not in text and "torch.load" not in text and "allow_pickle=True" not in text, path
        assert not any(word in text for word in ("tarfile", "zipfile", "unpack_archive")), (
            f"{path} opens archives: check their names"
        )
