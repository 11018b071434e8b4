"""RULER's texts as lm_eval makes them (lm_eval/tasks/ruler, which follows NVIDIA's code), and ours: the same but for what is drawn."""

import json
import random
import re
from collections import Counter
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

for package in ("lm_eval", "wonderwords", "nltk", "transformers"):
    pytest.importorskip(package)
pytestmark = pytest.mark.hf

from gatedattn.data import tokenizers  # noqa: E402
from gatedattn.evaluation.ruler.material import BOUNDARY, Essay, Material, Questions, Words  # noqa: E402
from gatedattn.evaluation.ruler.samples import Suite, score  # noqa: E402
from gatedattn.evaluation.ruler.tasks import NOISE, TASKS  # noqa: E402

SPEECH = "The Union is strong. Is it? It is! We have built roads, schools and ships. " * 300
NIAH = {  # lm_eval's arguments
    "niah_single_1": dict(type_haystack="repeat", type_needle_k="words", type_needle_v="numbers"),
    "niah_single_2": dict(type_haystack="essay", type_needle_k="words", type_needle_v="numbers"),
    "niah_single_3": dict(type_haystack="essay", type_needle_k="words", type_needle_v="uuids"),
    "niah_multikey_1": dict(type_haystack="essay", type_needle_k="words", type_needle_v="numbers", num_needle_k=4),
    "niah_multikey_2": dict(type_haystack="needle", type_needle_k="words", type_needle_v="numbers"),
    "niah_multikey_3": dict(type_haystack="needle", type_needle_k="uuids", type_needle_v="uuids"),
    "niah_multivalue": dict(type_haystack="essay", type_needle_k="words", type_needle_v="numbers", num_needle_v=4),
    "niah_multiquery": dict(type_haystack="essay", type_needle_k="words", type_needle_v="numbers", num_needle_q=4),
}
UUID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"


@pytest.fixture(scope="module")
def theirs():
    """Their modules, offline: the sentence splitter that they would download is replaced by ours."""
    with pytest.MonkeyPatch.context() as patch:
        import nltk

        patch.setattr(nltk.data, "find", lambda *a, **k: None)
        from lm_eval.tasks.ruler import common_utils, cwe_utils, fwe_utils, niah_utils, prepare_niah, qa_utils, vt_utils

        patch.setattr(prepare_niah, "cached_sent_tokenize", BOUNDARY.split)
        yield SimpleNamespace(
            niah=prepare_niah, niah_template=niah_utils.TEMPLATE, vt=vt_utils, cwe=cwe_utils, fwe=fwe_utils, qa=qa_utils,
            common=common_utils,
        )  # fmt: skip


@pytest.fixture(scope="module")
def material():
    return Material(Words(), Essay(SPEECH), {})


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizers.train_bpe([SPEECH, NOISE * 9, "1234567890 " * 9, " ".join(Words().nouns)], 1000)


def as_theirs(tokenizer):
    return lambda text: SimpleNamespace(input_ids=[0, *tokenizer.encode(text)])  # with BOS


def haystack(kind):
    return SPEECH.split() if kind == "essay" else NOISE if kind == "repeat" else None


def generated(theirs, tokenizer, name, length, count):
    """lm_eval's documents, as it puts them before a model."""
    kind = NIAH[name]
    hay = haystack(kind["type_haystack"]) or theirs.niah.get_haystack("needle")
    random.seed(0)
    docs = theirs.niah.generate_samples(
        hay, as_theirs(tokenizer), max_seq_length=length, template=theirs.niah_template, num_samples=count, **kind
    )
    return [(f"{doc['input']} {doc['gen_prefix']}", doc["outputs"]) for doc in docs]


def skeleton(prompt):
    """Keys and values replaced; needles out of their places."""
    prompt = re.sub(r" for [^.?]+? mentioned", lambda m: f" for {'K, ' * m[0].count(', and ')}K mentioned", prompt)
    prompt = re.sub(r" for (?:(?! is: ).)+ is: ", " for K is: ", prompt)
    prompt = re.sub(rf"{UUID}|\d{{7}}", "V", prompt)
    needles = re.findall(r"One of the special magic \w+ for K is: V\.", prompt)
    return Counter(needles), re.sub(r"\s+", " ", re.sub(r"One of the special magic \w+ for K is: V\.", "", prompt)).strip()


@pytest.mark.parametrize("name", NIAH)
def test_needles(theirs, material, tokenizer, name):
    suite = Suite(material, tokenizer)
    for prompt, references in generated(theirs, tokenizer, name, 1500, 3):
        unit = {"repeat": NOISE, "needle": "is: ", "essay": None}[NIAH[name]["type_haystack"]]
        words = len(prompt.split("afterwards.\n")[1].split("\nWhat")[0].split())
        size = prompt.count(unit) - (unit == "is: ") if unit else words - 10 * len(re.findall(" is: ", prompt))
        for seed in range(200):  # a key of two words is a word more
            ours = TASKS[name].draft(Random(seed), material, size, 1500, 0)
            if skeleton(ours.prompt) == skeleton(prompt):
                break
        else:
            assert skeleton(ours.prompt) == skeleton(prompt)
        assert len(ours.references) == len(references)
        assert {len(r) for r in ours.references} == {len(r) for r in references}
        assert suite.size(name, 1500) >= size  # theirs grow by steps


def test_variable_tracking(theirs, material):
    def words(text):  # about as many tokens as usual vocabularies make of a noise line: 24
        return SimpleNamespace(input_ids=re.findall(r"\w+|[^\w\s]", text))

    random.seed(0)
    example = theirs.vt.sys_vartrack_w_noise_random(words, 1, 500, incremental=5)[0]
    docs = theirs.vt.sys_vartrack_w_noise_random(words, 3, 2000, icl_example=example)

    def parts(prompt):
        text = re.sub(r"\b[A-Z]{3}\b(?<!VAR)", "XXX", re.sub(r"\b[A-Z]{5}\b", "XXXXX", re.sub(r"\d{5}", "N", prompt)))
        return Counter(re.findall(r"\s+|\S+", text)), text[:85], text[-250:]

    for doc in docs:
        prompt = f"{doc['input']} {doc['gen_prefix']}"
        size = prompt.count(NOISE) - 10
        ours = TASKS["vt"].draft(Random(0), material, size, 2000, 0)
        assert parts(ours.prompt) == parts(prompt)
        assert len(ours.references) == len(doc["outputs"])


@settings(deadline=None)
@given(st.integers(20, 400), st.sampled_from([2048, 8192]), st.integers(0, 99))
def test_common_words(theirs, material, size, length, seed):
    random.seed(seed)
    example, text, answer = theirs.cwe.generate_input_output(size, length)
    ours = TASKS["cwe"].draft(Random(seed), material, size, length, 0)

    def words(prompt):
        return re.sub(r"(\d+\. )(.+?)(?= \d+\. |\n|$)", r"\1w", prompt)

    assert words(ours.prompt) == words(f"{example}\n{text}")
    assert len(ours.references) == len(answer) == 10
    assert set(theirs.cwe.WORDS) == set(material.words.all)


@settings(deadline=None)
@given(st.integers(100, 3000), st.sampled_from([1024, 4096]), st.integers(0, 99))
def test_frequent_words(theirs, material, size, length, seed):
    random.seed(seed)
    text, answer, _ = theirs.fwe.generate_input_output(
        10**9, lambda text: SimpleNamespace(input_ids=[]), num_words=size, vocab_size=length // 50
    )
    ours = TASKS["fwe"].draft(Random(seed), material, size, length, 0)

    def parts(prompt):
        head, context, tail = re.split(r"(?<=coded words\. )|(?=\nQuestion)", prompt)
        return head, sorted(Counter(context.split()).values()), tail

    assert parts(ours.prompt) == parts(text)
    assert len(ours.references) == len(answer) == 3


def test_question_answering(theirs, material, tmp_path):
    paragraphs = [f"Paragraph {i}." for i in range(40)]
    qas = [{"query": "Which?", "outputs": ["Paragraph 3"], "context": [3], "more_context": [4, 5]}]
    random.seed(0)
    text, answers = theirs.qa.generate_input_output(0, 12, qas, paragraphs)
    asked = {3: [{"question": "Which?", "answers": [{"text": "Paragraph 3"}]}]}
    articles = [[3, 4, 5], [i for i in range(40) if not 3 <= i <= 5]]
    written = [[{"context": paragraphs[i], "qas": asked.get(i, [])} for i in article] for article in articles]
    (tmp_path / "qa.json").write_text(json.dumps({"data": [{"paragraphs": article} for article in written]}))
    own = Material(material.words, material.essay, {"qa_1": Questions.read(tmp_path / "qa.json")})
    ours = TASKS["qa_1"].draft(Random(0), own, 12, 4096, 0)

    def blank(prompt):
        return re.sub(r"Paragraph \d+", "P", prompt)

    assert blank(ours.prompt) == blank(f"{text} Answer:") and ours.references == answers
    for prompt in (ours.prompt, text):
        assert {3, 4, 5} <= {int(i) for i in re.findall(r"Paragraph (\d+)\.", prompt)}


@settings(deadline=None)
@given(st.lists(st.text("aB1\n\x01 ", min_size=1).filter(str.strip), min_size=1, max_size=4), st.text("aB1\n\x01 "))
def test_scores(theirs, references, prediction):
    doc = {"max_length": 4096, "outputs": references}
    assert score(prediction, references) == pytest.approx(theirs.common.process_results(doc, [prediction])["4096"])


def test_depths(theirs):
    from gatedattn.evaluation.ruler.tasks import DEPTHS

    assert np.array_equal(DEPTHS, theirs.niah.DEPTHS)
