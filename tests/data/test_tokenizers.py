import io

import numpy as np
import pytest
import sentencepiece
import tokenizers as hf
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models

from gatedattn.config import ConfigError
from gatedattn.data import tokenizers

TEXTS = ["The state of the union is strong.\n\nFellow citizens, " * 20, "naïve café – 漢字 🙂\n" * 5]
BPE = tokenizers.train_bpe(TEXTS, 300)


@pytest.fixture(scope="session")
def sentencepiece_file(tmp_path_factory):
    model = io.BytesIO()
    lines = iter([f"the {a} of the {b} union" for a in ("state", "word", "page", "line") for b in ("old", "new", "big")])
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines, model_writer=model, vocab_size=60, hard_vocab_limit=False, minloglevel=2
    )
    path = tmp_path_factory.mktemp("sp") / "x.model"
    path.write_bytes(model.getvalue())
    return path


@pytest.mark.parametrize("tokenizer", [tokenizers.Bytes(), BPE], ids=["bytes", "bpe"])
@given(text=st.text())
def test_round_trip(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32 and tokenizer.bos_id not in ids and (ids < tokenizer.vocab_size).all()
    assert tokenizer.decode(ids) == tokenizer.decode([tokenizer.bos_id, *ids]) == text


def test_special_tokens_in_the_text_stay_text():
    for name in ("<|bos|>", "<s>", "<|endoftext|>"):
        for tokenizer in (BPE, tokenizers.Bytes()):
            ids = tokenizer.encode(f"say {name} twice")
            assert tokenizer.bos_id not in ids
            assert tokenizer.decode(ids) == f"say {name} twice"


def test_bytes_decode_of_broken_utf8_and_foreign_ids():
    assert tokenizers.Bytes().decode([0xC3, 65, 256, 300, -1]) == "�A"


def test_bpe_is_deterministic_and_small_texts_give_fewer_ids():
    assert tokenizers.train_bpe(TEXTS, 300).fingerprint == BPE.fingerprint
    assert 257 < tokenizers.train_bpe(["ab ab"], 4096).vocab_size < 265


def test_long_documents_encode_in_pieces_as_the_whole_does(monkeypatch):
    text = TEXTS[0].replace(" ", "\n", 30) * 3 + "end!\n\n\n  x"
    whole = BPE.encode(text)
    monkeypatch.setattr(tokenizers, "LONG_TEXT", 50)
    assert len(list(tokenizers.pieces(text, 50))) > 10 and "".join(tokenizers.pieces(text, 50)) == text
    assert BPE.encode(text).tolist() == whole.tolist()
    many = [ids.tolist() for ids in BPE.encode_many([text, "", "short", text])]
    assert many == [whole.tolist(), [], BPE.encode("short").tolist(), whole.tolist()]


def test_only_a_text_without_words_is_cut_anywhere():
    for text in ("\0" * 1000, "x" * 1000, "1 2 " * 250):
        cut = list(tokenizers.pieces(text, 50))
        assert "".join(cut) == text and max(map(len, cut)) <= 50 * tokenizers.LONGEST
    assert all(part[0] == " " for part in list(tokenizers.pieces("two words " * 100, 50))[1:])
    assert list(tokenizers.pieces("", 50)) == [""]


def test_save_and_load(tmp_path, sentencepiece_file):
    kinds = [BPE, tokenizers.Bytes(), tokenizers.Characters("ab\n"), tokenizers.from_name(str(sentencepiece_file))]
    for i, tokenizer in enumerate(kinds):
        tokenizer.save(tmp_path / str(i))
        again = tokenizers.load(tmp_path / str(i))
        assert type(again) is type(tokenizer) and again.fingerprint == tokenizer.fingerprint
        assert again.encode("ab a").tolist() == tokenizer.encode("ab a").tolist()
    assert len({t.fingerprint for t in kinds}) == 4
    assert tokenizers.load(tmp_path) is None


def test_sentencepiece(sentencepiece_file):
    tokenizer = tokenizers.from_name(str(sentencepiece_file))
    ids = tokenizer.encode("the state of the union <s>")
    assert tokenizer.bos_id == 1 not in ids and tokenizer.eos_ids == (2,)
    assert tokenizer.decode(tokenizer.encode("the state of the union")) == "the state of the union"


def test_characters_drop_what_they_do_not_know():
    tokenizer = tokenizers.Characters("eb\na")
    assert tokenizer.vocab_size == 5 and tokenizer.bos_id == 4
    assert tokenizer.encode("abc\nzé🙂e").tolist() == [3, 1, 2, 0]
    assert tokenizer.decode([4, 3, 1, 2, 0]) == "ab\ne"


@pytest.mark.parametrize("name", ["<s>", "<|begin_of_text|>", "<|endoftext|>", "[BOS]", "<bos>"])
def test_any_tokenizer_json(tmp_path, name):
    backend = hf.Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    backend.add_special_tokens([name])
    backend.post_processor = hf.processors.TemplateProcessing(single=f"{name} $A", special_tokens=[(name, 3)])
    backend.enable_truncation(1)
    backend.save(str(tmp_path / "t.json"))
    tokenizer = tokenizers.from_name(str(tmp_path / "t.json"))
    assert (tokenizer.bos_id, tokenizer.vocab_size) == (3, 4)
    assert tokenizer.encode("a").tolist() == [0]  # the post-processor's BOS is not added


def test_refusals(tmp_path):
    backend = hf.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    backend.save(str(tmp_path / "none.json"))
    (tmp_path / "bad.json").write_text("{}")
    (tmp_path / "bad.model").write_text("nonsense")
    for name, words in {
        str(tmp_path / "none.json"): "looked for <|bos|>, <s>",
        str(tmp_path / "bad.json"): "not a tokenizer.json",
        str(tmp_path / "bad.model"): "not a SentencePiece model",
        str(tmp_path / "gone.json"): "No such file",
        "byte": "did you mean 'bytes'",
    }.items():
        with pytest.raises(ConfigError, match=words.replace("|", r"\|")):
            tokenizers.from_name(name)
    for name in ("bpe:", "bpe:x", "bpe:256", "bpe"):
        with pytest.raises(ConfigError, match="from 257"):
            tokenizers.bpe_size(name)
    assert tokenizers.bpe_size("bytes") is None and tokenizers.bpe_size("bpe:257") == 257
