import numpy as np
import pytest

from gatedattn.__main__ import main
from gatedattn.data.tokenizers import Bytes, train_bpe
from gatedattn.inference import sample


@pytest.fixture
def spoken(monkeypatch):
    """Let the generator say given tokens, in given pieces."""

    def say(pieces):
        monkeypatch.setattr(sample.Generator, "stream", lambda *a, **k: (np.array([piece]) for piece in pieces))

    return say


@pytest.mark.parametrize("size", [1, 2, 3])
def test_pieces_are_whole_characters(model, spoken, size):
    text = "né€🎉 ok"
    data = list(text.encode())
    spoken([data[i : i + size] for i in range(0, len(data), size)])
    pieces = list(sample.stream_text(model, Bytes(), "Hi "))
    assert "".join(pieces) == text and not any("\ufffd" in piece for piece in pieces)
    assert len(pieces) > 2


def test_what_never_becomes_a_character_is_still_told(model, spoken):
    spoken([[104, 0xE2, 0x82], [-1, -1]])
    assert "".join(sample.stream_text(model, Bytes())) == "h\ufffd"


def test_bos_and_eos_end_a_text(model, monkeypatch):
    asked = {}
    monkeypatch.setattr(sample.Generator, "stream", lambda *a, **k: asked.update(k) or iter(()))
    tokenizer = Bytes()
    tokenizer.set_special(None, [3, "4", -1, 999, 3])
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (256, (3,))
    list(sample.stream_text(model, tokenizer))
    assert asked["stop"] == [256, 3]


def test_stop_ends_the_text(model, spoken):
    spoken([[104], [105, -1, -1]])
    assert sample.text(model, Bytes(), "Hi") == "hi"


def test_pieces_of_a_bpe_model_join_to_its_text(build):
    tokenizer = train_bpe(["the cat and the hat, ça va 🎉"] * 3, 300)
    model = build(vocab_size=tokenizer.vocab_size)
    pieces = list(sample.stream_text(model, tokenizer, "the cat", max_tokens=40, temperature=1.0, stop=[]))
    assert len(pieces) > 1
    assert "".join(pieces) == sample.text(model, tokenizer, "the cat", tokens=40, temperature=1.0) or tokenizer.bos_id == 0


@pytest.mark.parametrize(
    "args,message",
    [
        (["--temperature=-1"], "temperature=-1"),
        (["--top_p=2"], "top_p=2"),
        (["--cache=ring"], "cache='ring': must be full"),
        (["--seed=-3"], "seed=-3"),
        ([], "nowhere does not exist"),
    ],
)
def test_bad_requests_are_one_line(args, message, capsys):
    assert main(["generate", "nowhere", *args]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("gatedattn generate: ") and message in err and err.count("\n") == 1


def test_the_command_writes_text_only(build, monkeypatch, capsys):
    from gatedattn.interop import models

    model = build(vocab_size=257, position="learned", max_seq_len=16)
    monkeypatch.setattr(models, "load_model", lambda path, rope: (model, Bytes()))
    assert main(["generate", "x", "--prompt=Hi", "--max_tokens=6"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and out == sample.text(model, Bytes(), "Hi", tokens=6) + "\n"
    assert main(["generate", "x", "--prompt=" + "a" * 20]) == 2
    assert "21 tokens and max_tokens=256 need 276 positions" in capsys.readouterr().err
    monkeypatch.setattr(models, "load_model", lambda path, rope: (model, None))
    assert main(["generate", "x"]) == 2 and "no tokenizer" in capsys.readouterr().err
