import numpy as np
import pytest
import tensorflow_datasets as tfds

from gatedattn.config import ConfigError, DataConfig
from gatedattn.data import sotu, sources
from gatedattn.data.sources import Spec, TextCorpus, TfdsCorpus, parse


def test_parse():
    assert parse("tfds:sotu") == [Spec("tfds", "sotu")]
    assert parse("tfds:sotu@0.7, text:a/*.txt@0.3") == [Spec("tfds", "sotu", 0.7), Spec("text", "a/*.txt", 0.3)]
    assert parse("text:/home/me@host/x.txt") == [Spec("text", "/home/me@host/x.txt")]
    assert parse("tfds:huggingface:x/y:1.0.0@2")[0] == Spec("tfds", "huggingface:x/y:1.0.0", 2.0)
    assert str(parse("text:a@1")[0]) == "text:a"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("tfsd:sotu", "did you mean 'tfds'"),
        ("sotu", "must be kind:name"),
        ("tfds:", "must be kind:name"),
        ("tfds:sotu,", "must be kind:name"),
        ("tfds:sotu@0", "must be positive"),
        ("tfds:sotu@-1", "must be positive"),
        ("tfds:sotu@nan", "must be positive"),
        ("tfds:sotu@inf", "must be positive"),
        ("tfds:sotu@much", "not a number"),
        ("tfds:sotu@0.7,text:a", "text:a has no @weight"),
        ("tfds:sotu,tfds:sotu", "twice"),
        ("tfds:sotu,synthetic:backcopy", "cannot be mixed"),
    ],
)
def test_parse_refuses(source, words):
    with pytest.raises(ConfigError, match=words) as error:
        parse(source)
    assert len(str(error.value).splitlines()) <= 2


def write(folder, **files):
    for name, content in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".txt").write_bytes(content if isinstance(content, bytes) else content.encode())
    return f"{folder}/**/*.txt"


def both(corpus):
    return list(corpus.documents("train")), list(corpus.documents("valid"))


def test_text_files_are_split_by_name(tmp_path):
    names = [f"n{i}" for i in range(60)]
    glob = write(tmp_path / "a", **{n: f"text {n}" for n in names})
    train, valid = both(TextCorpus(glob, 0.2))
    assert sorted(train + valid) == sorted(f"text {n}" for n in names) and 4 <= len(valid) <= 24
    write(tmp_path / "a", more="text more")
    more_train, more_valid = both(TextCorpus(glob, 0.2))
    assert set(train) <= set(more_train) and set(valid) <= set(more_valid)  # an added file moves no other
    elsewhere = write(tmp_path / "b__c".replace("__", "/"), **{n: f"text {n}" for n in names})
    assert both(TextCorpus(elsewhere, 0.2)) == (train, valid)
    assert TextCorpus(elsewhere, 0.2).fingerprint != TextCorpus(glob, 0.2).fingerprint
    assert TextCorpus(elsewhere, 0.2).fingerprint != TextCorpus(elsewhere, 0.1).fingerprint


def test_two_files_give_one_to_each_split(tmp_path):
    for fraction in (0.001, 0.999):
        train, valid = both(TextCorpus(write(tmp_path, a="aa", b="bb"), fraction))
        assert len(train) == len(valid) == 1


def test_a_lone_file_is_cut_between_paragraphs(tmp_path):
    text = "\n\n".join(f"Paragraph {i} has\nwords." for i in range(100))
    train, valid = both(TextCorpus(write(tmp_path, a=text), 0.1))
    assert train[0] + valid[0] == text and valid[0].startswith("Paragraph ")
    assert 0.05 < len(valid[0]) / len(text) < 0.15
    train, valid = both(TextCorpus(write(tmp_path, a="Title\n\n" + "word " * 500), 0.1))  # one far paragraph does not decide
    assert 0.05 < len(valid[0]) / 2500 < 0.15 and train[0].endswith(" ")
    with pytest.raises(ConfigError, match="nowhere to cut"):
        both(TextCorpus(write(tmp_path, a="x"), 0.1))


def test_bom_and_line_ends(tmp_path):
    glob = write(tmp_path, a=b"\xef\xbb\xbfone\r\ntwo\n", b=b"\xef\xbb\xbfone\r\ntwo\n", c=b"", d=b"\xef\xbb\xbf")
    train, valid = both(TextCorpus(glob, 0.1))
    assert train + valid == ["one\ntwo\n"] * 2  # a file that is empty, or only a BOM, is no document


def test_text_refusals(tmp_path):
    with pytest.raises(ConfigError, match="matches no file"):
        TextCorpus(str(tmp_path / "*.txt"), 0.1)
    with pytest.raises(ConfigError, match="is not a file"):
        TextCorpus(str(tmp_path / "gone.txt"), 0.1)
    with pytest.raises(ConfigError, match=r"write text:.*/\*.txt"):
        TextCorpus(str(tmp_path), 0.1)
    with pytest.raises(ConfigError, match="all 2 files are empty"):
        TextCorpus(write(tmp_path, a="", b=""), 0.1)
    with pytest.raises(ConfigError, match=r"b\.txt: not UTF-8 at byte 2 \(0xe9\)"):
        both(TextCorpus(write(tmp_path, a="good", b=b"caf\xe9 au lait"[1:]), 0.1))


def test_speeches():
    speeches = list(sotu.speeches())
    assert len(speeches) == 249 and speeches[0][:3] == ("1790-Washington-1", 1790, "Washington")
    held_out = [year for _, year, _, _ in speeches if year % 10 == 0]
    assert len(held_out) == 26 and held_out[0] == 1790 and held_out[-1] == 2020


def test_tfds_sotu(tmp_path):
    corpus = TfdsCorpus("sotu", tmp_path, 0.05)
    train, valid = both(corpus)
    texts = {text: year for _, year, _, text in sotu.speeches()}
    assert (len(train), len(valid)) == (223, 26) and set(train + valid) == set(texts)
    assert {texts[t] % 10 for t in valid} == {0} and 0 not in {texts[t] % 10 for t in train}
    again = TfdsCorpus("sotu", tmp_path, 0.05)
    assert again.fingerprint == corpus.fingerprint and list(again.documents("valid")) == valid
    record = tfds.data_source("sotu", split="validation", data_dir=tmp_path)[0]
    assert set(record) == {"text", "year", "president"} and int(record["year"]) % 10 == 0


class Notes(tfds.core.GeneratorBasedBuilder):
    """A dataset as a user would bring it: training split only, its text under another name."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        return tfds.core.DatasetInfo(
            builder=self, features=tfds.features.FeaturesDict({"n": np.int32, "body": tfds.features.Text()})
        )

    def _split_generators(self, dl_manager):
        return {"train": ((i, {"n": i, "body": f"note {i} é"}) for i in range(200))}

    def _generate_examples(self):
        raise NotImplementedError


def test_a_tfds_dataset_of_ones_own(tmp_path):
    Notes(data_dir=tmp_path, file_format="array_record").download_and_prepare()
    train, valid = both(TfdsCorpus("notes", tmp_path, 0.1))
    assert (len(train), len(valid)) == (180, 20) and set(train + valid) == {f"note {i} é" for i in range(200)}


def test_tfds_refusals(tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'sotu' or 'opus'"):  # the nearest names
        sources.open_corpus(parse("tfds:sotus")[0], DataConfig(cache_dir=str(tmp_path)))
    with pytest.raises(ConfigError, match="did you mean 'tiny_shakespeare'"):
        TfdsCorpus("tiny_shakespear", tmp_path, 0.1)
