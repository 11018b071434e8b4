"""RULER's tasks: what each is defined by, at any size, length, seed and tokenizer."""

import json
import re
from collections import Counter
from random import Random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("wonderwords")

from gatedattn import Transformer, TransformerConfig
from gatedattn.__main__ import main
from gatedattn.config import ConfigError
from gatedattn.data import tokenizers
from gatedattn.evaluation import ruler
from gatedattn.evaluation.ruler import run, write
from gatedattn.evaluation.ruler.material import Essay, Material, Questions, Words
from gatedattn.evaluation.ruler.samples import Sample, Suite, score
from gatedattn.evaluation.ruler.tasks import DEPTHS, NOISE, TASKS, Task
from gatedattn.inference import Generator, continuation, generate
from gatedattn.interop import models
from gatedattn.interop.build import flat_parameters

NEEDLES = {  # keys, values of each, asked
    "niah_single_1": (1, 1, 1),
    "niah_single_2": (1, 1, 1),
    "niah_single_3": (1, 1, 1),
    "niah_multikey_1": (4, 1, 1),
    "niah_multikey_2": (1, 1, 1),
    "niah_multikey_3": (1, 1, 1),
    "niah_multivalue": (1, 4, 1),
    "niah_multiquery": (4, 1, 4),
}
NEEDLE = re.compile(r"One of the special magic (number|uuid)s for (.+?) is: (\S+)\.")
UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
SPEECH = [
    "The Union, Mr. Speaker, is strong.",
    "Is it? It is!",
    "We have built roads, schools and ships in No. 9 of J. Adams and others.",
]
SQUAD = {
    "data": [
        {
            "paragraphs": [
                {
                    "context": f"In article {a}, paragraph {p} says that the answer is gold{a}_{p}.",
                    "qas": [
                        {"question": f"What says {a}{p}?", "answers": [{"text": f"gold{a}_{p}"}, {"text": f"gold{a}_{p}"}]},
                        {"question": "What is not said?", "answers": [], "is_impossible": True},
                    ],
                }
                for p in range(3)
            ]
        }
        for a in range(30)
    ]
}
HOTPOT = [
    {
        "question": f"Which of {i}?",
        "answer": f"that{i}",
        "context": [[f"Title {i}", ["It is ", f"that{i}."]], [f"Other {i}", ["Not."]]],
    }
    for i in range(4)
]


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ruler")
    (folder / "squad.json").write_text(json.dumps(SQUAD))
    (folder / "hotpot.json").write_text(json.dumps(HOTPOT))
    (folder / "speech.txt").write_text("\n".join(SPEECH * 7))
    return Material.read(str(folder / "*.txt"), {"qa_1": folder / "squad.json", "qa_2": folder / "hotpot.json"})


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizers.train_bpe([*SPEECH, NOISE, "1234567890 " * 9, " ".join(Words().nouns), json.dumps(SQUAD)], 1000)


def draft(material, name, size, seed, length=4096, index=0):
    return TASKS[name].draft(Random(seed), material, size, length, index)


def test_thirteen_tasks():
    assert len(TASKS) == 13
    tokens = {"vt": 30, "cwe": 120, "fwe": 50, "qa_1": 32, "qa_2": 32}
    assert {name: task.tokens for name, task in TASKS.items()} == dict.fromkeys(NEEDLES, 128) | tokens
    assert [name for name, task in TASKS.items() if task.any_reference] == ["qa_1", "qa_2"]


@settings(deadline=None)
@given(st.sampled_from(list(NEEDLES)), st.integers(4, 300), st.integers())
def test_needles_are_in_the_context(material, name, size, seed):
    prompt, references = draft(material, name, size, seed)
    head, _, rest = prompt.partition("afterwards.\n")
    context, _, question = rest.rpartition("\n")
    keys, values, asked = NEEDLES[name]
    found = NEEDLE.findall(context)
    others = size if name in ("niah_multikey_2", "niah_multikey_3") else 0
    assert len(found) == keys * values + others
    assert len({key for _, key, _ in found}) == keys + others
    wanted = re.findall(r" for (.+?) mentioned in the provided text", question)
    assert len(wanted) == 2 and wanted[0] == wanted[1]
    wanted = re.split(r", and |, ", wanted[0])
    assert len(set(wanted)) == asked and len(references) == asked * values
    for i, key in enumerate(wanted):
        hidden = [value for _, other, value in found if other == key]
        assert Counter(hidden) == Counter(references[i * values : (i + 1) * values])
    value = UUID if name in ("niah_single_3", "niah_multikey_3") else r"[1-9]\d{6}"
    assert all(re.fullmatch(value, reference) for reference in references)
    one = len(references) == 1
    assert ("What is the special" in question, "What are all the special" in question) == (one, not one)
    assert head.startswith("A special magic" if one else "Some special magic")
    assert prompt.endswith(" is" if one else " are")
    hay = NEEDLE.sub("", context)
    if name == "niah_single_1":
        assert context.split("\n").count(NOISE) == size and not hay.replace(NOISE, "").strip()
    elif not others:
        assert hay.split() == " ".join(material.essay.first(size)).split() and len(hay.split()) == size


def test_needles_stand_anywhere_and_never_inside_a_sentence(material):
    places = []
    for seed in range(400):
        context = draft(material, "niah_single_2", 700, seed).prompt.split("afterwards.\n")[1]
        before = context[: NEEDLE.search(context).start()].strip()
        whole = material.essay.first(700)
        count = next(i for i in range(len(whole) + 1) if " ".join(whole[:i]) == before)
        places.append(count)
    possible = {len(whole) * depth // 100 for depth in DEPTHS}
    assert set(places) <= possible and {0, len(whole)} <= set(places)
    quarters = np.histogram(np.array(places) / len(whole), 4, (0, 1))[0]
    assert (np.abs(quarters - 100) < 40).all()  # 4.6 standard deviations


@settings(deadline=None)
@given(st.integers(0, 400))
def test_an_essay_has_the_words_asked_for(material, words):
    text = " ".join(material.essay.first(words)).split()
    whole = " ".join(SPEECH * 7).split()
    assert text == [whole[i % len(whole)] for i in range(words)]


def test_sentences_end_where_they_do():
    assert Essay("\n".join(SPEECH)).sentences == [SPEECH[0], "Is it?", "It is!", SPEECH[2]]
    assert Essay.of(None).ends[-1] > 200_000  # words of the held-out speeches


@settings(deadline=None)
@given(st.integers(5, 60), st.integers())
def test_variables_are_assigned_in_order(material, size, seed):
    prompt, references = draft(material, "vt", size, seed)
    example, task = prompt.split("\n\n\n\n")
    for text, letters, lines in ((example, 3, min(size, 10)), (task, 5, size)):
        context, _, question = text.partition("\nQuestion: ")
        chain = re.findall(r"VAR ([A-Z]+) = (?:VAR )?(\w+) ", context)
        names = [name for name, _ in chain]
        assert len(set(names)) == 5 and all(re.fullmatch(f"[A-Z]{{{letters}}}", name) for name in names)
        assert [old for _, old in chain[1:]] == names[:-1] and re.fullmatch(r"\d{5}", chain[0][1])
        assert context.count(NOISE) == lines
        assert question.count(chain[0][1]) == 2 and "text above, 5 variables" in question
        assert question.endswith("they are:" if letters == 5 else "they are:  " + " ".join(names))
    assert references == names


@settings(deadline=None)
@given(st.integers(11, 300), st.sampled_from([1024, 4095, 4096, 131072]), st.integers())
def test_common_words_are_more_common(material, size, length, seed):
    prompt, references = draft(material, "cwe", size, seed, length)
    _, example, task = prompt.split("Below is a numbered list")
    short = length < 4096
    for text, words, often, seldom in (
        (example, 20 if short else 40, 3 if short else 10, 1 if short else 3),
        (task, size, 6 if short else 30, 1 if short else 3),
    ):
        context, _, answer = text.partition("\nQuestion: ")
        items = re.findall(r"(\d+)\. (.+?)(?= \d+\. |$)", context.split("often.\n")[1])
        assert [int(i) for i, _ in items] == list(range(1, len(items) + 1))
        counts = Counter(word for _, word in items)
        assert sorted(counts.values()) == [seldom] * (words - 10) + [often] * 10
        common = {word for word, count in counts.items() if count == often}
        if text is example:
            answered = re.findall(r"\d+\. (.+?)(?= \d+\. |\n|$)", answer.rpartition("are:")[2])
            assert len(answered) == 10 and {*answered} == common
    assert len(references) == 10 and {*references} == common


def test_a_list_longer_than_the_dictionary(material):
    prompt, references = draft(material, "cwe", len(material.words.all) + 50, 0)
    assert len(references) == 10 and "-" in prompt
    assert len(set(re.findall(r"\d+\. (.+?)(?= \d+\. |\n)", prompt.split("Below is a")[2]))) == len(material.words.all) + 50


@settings(deadline=None)
@given(st.integers(80, 5000), st.integers(250, 20000), st.integers())
def test_frequent_words_are_more_frequent(material, size, length, seed):
    prompt, references = draft(material, "fwe", size, seed, length)
    counts = Counter(prompt.partition("coded words. ")[2].partition("\nQuestion")[0].split())
    dots = counts.pop("...")
    ranked = counts.most_common()
    assert [word for word, _ in ranked[:3]] == references and all(re.fullmatch("[a-z]{6}", word) for word in counts)
    assert ranked[2][1] > (ranked[3:] or [("", 0)])[0][1]
    expected = [int(size / k**2 / (np.pi**2 / 6)) for k in range(1, max(length // 50, 5) + 1)]
    assert [dots, *(count for _, count in ranked)] == [count for count in expected if count]


@settings(deadline=None)
@given(st.integers(1, 100), st.integers(0, 89), st.integers())
def test_questions_stand_with_their_paragraphs(material, size, index, seed):
    prompt, references = draft(material, "qa_1", size, seed, index=index)
    article, paragraph = divmod(index, 3)
    assert references == [f"gold{article}_{paragraph}"]
    assert f"Question: What says {article}{paragraph}? Answer:" in prompt and prompt.count(references[0]) == 1
    documents = re.findall(r"Document (\d+):\n(.+)", prompt)
    assert [int(i) for i, _ in documents] == list(range(1, min(size, 90) + 1)) and len({text for _, text in documents}) == len(
        documents
    )
    same = sum(f"In article {article}," in text for _, text in documents)
    assert same == min(size, 3)  # the gold one, then those of its article
    prompt, references = draft(material, "qa_2", size, seed, index=index % 4)
    assert references == [f"that{index % 4}"] and f"Title {index % 4}\nIt is that{index % 4}.\n" in prompt
    assert prompt.count("Document ") == min(max(size, 2), 8)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(list(TASKS)), st.integers(1300, 2500), st.integers(0, 3), st.integers(0, 5))
def test_the_length_is_used_and_kept(material, tokenizer, name, length, index, seed):
    suite = Suite(material, tokenizer, seed)
    sample = suite.sample(name, length, index)
    task = TASKS[name]
    assert sample.tokens[0] == tokenizer.bos_id
    assert tokenizer.decode(sample.tokens) == sample.prompt
    used = len(sample.tokens) + task.tokens
    assert used <= length
    if name != "qa_2":  # it has too few paragraphs
        assert used > length - (200 if name == "niah_multikey_3" else 100)  # two of its sentences; of others
    assert score(" and ".join(sample.references).upper(), sample.references, task.any_reference) == 1
    assert score("?!", sample.references, task.any_reference) == 0


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(list(TASKS)), st.sampled_from(list(TASKS)), st.integers(0, 3))
def test_a_sample_depends_on_nothing_else(material, tokenizer, name, other, index):
    first = Suite(material, tokenizer, 7)
    list(first.samples(other, 1300, 2))
    list(first.samples(name, 1400, 1))
    found = list(first.samples(name, 1300, index + 1))[index]
    again = Suite(material, tokenizer, 7).sample(name, 1300, index)
    assert found.prompt == again.prompt and found.references == again.references
    assert Suite(material, tokenizer, 8).sample(name, 1300, index).prompt != again.prompt
    assert len({sample.prompt for sample in first.samples(name, 1300, 4)}) == 4


@settings(deadline=None)
@given(st.lists(st.text("abAB1 ", min_size=1).filter(str.strip), min_size=1, max_size=4), st.text(), st.text())
def test_more_text_never_lowers_a_score(references, text, more):
    references = [reference.strip() for reference in references]
    for any_reference in (False, True):
        assert score(text + more, references, any_reference) >= score(text, references, any_reference)
    assert score(text, references, True) == (score(text, references) > 0)


def test_scores_are_rulers():
    assert score("It is 1234567\x00and ABCDE.", ["1234567", "abcde", "7654321", "xyz"]) == 0.5
    assert score("It is 1234567.", ["no", "1234567"], any_reference=True) == 1
    assert score("", ["1234567"]) == score("123456", ["1234567"]) == 0


def test_faults_are_told_in_a_line(material, tokenizer, tmp_path, monkeypatch):
    suite = Suite(material, tokenizer)
    with pytest.raises(ConfigError, match=r"--lengths=300: cwe takes at least \d+ tokens"):
        list(suite.samples("cwe", 300, 1))
    with pytest.raises(ConfigError, match="no question of qa_1 fits"):
        list(suite.samples("qa_1", 100, 1))
    with pytest.raises(ConfigError, match="no such file"):
        Essay.of(str(tmp_path / "*.none"))
    for content in ("{", "{}", "[1]", '{"data": []}'):
        (tmp_path / "qa.json").write_text(content)
        with pytest.raises(ConfigError, match=r"qa\.json"):
            Questions.read(tmp_path / "qa.json")
    monkeypatch.setitem(__import__("sys").modules, "wonderwords", None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[eval\]'"):
        Words()


def test_a_question_whose_paragraphs_do_not_fit_is_passed_over(material, tokenizer, tmp_path):
    data = json.loads(json.dumps(SQUAD))
    data["data"][0]["paragraphs"][1]["context"] += " And so on." * 500
    (tmp_path / "squad.json").write_text(json.dumps(data))
    long = Material(material.words, material.essay, {"qa_1": Questions.read(tmp_path / "squad.json")})
    samples = list(Suite(long, tokenizer).samples("qa_1", 1000, 100))
    assert [sample.index for sample in samples] == [0, *range(2, 90)]
    assert [sample.index for sample in Suite(long, tokenizer).samples("qa_1", 1000, 2, start=1)] == [2, 3]
    assert not list(Suite(long, tokenizer).samples("qa_1", 1000, 2, start=90))


CONFIG = dict(
    d_model=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, ffn_dim=16, kernel="reference", max_seq_len=700
)


@pytest.fixture(scope="module")
def model(tokenizer):
    config = TransformerConfig(vocab_size=tokenizer.vocab_size, **CONFIG)
    graphdef, shapes = nnx.split(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(0)
    return nnx.merge(graphdef, jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.5, x.shape), x.dtype), shapes))


def test_stopping_early_loses_nothing(model, tokenizer):
    prompts = [tokenizer.encode("The Union is strong. " * n) for n in (3, 4)]
    stop = [tokenizer.bos_id]
    whole = [
        continuation(tokenizer, prompt.tolist(), new)
        for prompt, new in zip(prompts, generate(model, prompts, max_tokens=60, stop=stop))
    ]
    assert all(tokenizer.decode(prompt) + text == tokenizer.decode([*prompt, *new]) for prompt, text, new in zip(
        prompts, whole, generate(model, prompts, max_tokens=60, stop=stop)))  # fmt: skip
    task, generator = Task(None, 60), Generator(model)

    def answered(references):
        return run.answers(generator, tokenizer, [Sample(0, "", [r], p) for r, p in zip(references, prompts)], task)

    assert answered(["not there", "nor this"]) == whole
    early = [text[4:10].strip() for text in whole]
    texts = answered(early)
    for text, full, reference in zip(texts, whole, early):
        assert full.startswith(text) and len(text) < len(full) and score(text, [reference]) == 1
    assert answered([early[0], "not there"]) == whole  # the batch waits for the slowest
    one = run.answers(generator, tokenizer, [Sample(0, "", ["not there"], prompts[0])], task, rows=2)
    assert one == whole[:1]  # rows that fill the batch up answer nothing


@pytest.mark.slow
def test_the_command(model, tokenizer, tmp_path, capsys, monkeypatch):
    (tmp_path / "speech.txt").write_text("\n".join(SPEECH * 7))
    (tmp_path / "squad.json").write_text(json.dumps(SQUAD))
    models.save_model(models.Source(model.config, flat_parameters(model), tokenizer, 700), tmp_path / "model")
    out = tmp_path / "out"
    haystack = f"--haystack={tmp_path}/*.txt"
    common = ["ruler", str(tmp_path / "model"), haystack, f"--out={out}", "--names=tiny", "--batch_size=2", "--lengths=640"]
    tasks = "--tasks=niah_single_2,qa_1"
    assert main([*common, tasks, f"--qa_1={tmp_path}/squad.json", "--samples=2"]) == 0
    table = capsys.readouterr().out
    assert table == (out / "table.md").read_text() and "| tiny | niah_single_2 | 0.00 |" in table
    assert "mean of 2 tasks of 13" in table and (out / "ruler.png").stat().st_size > 1000

    def lines(task):
        return [json.loads(line) for line in (out / f"samples/tiny/{task}-640.jsonl").read_text().splitlines()]

    found = json.loads((out / "ruler.json").read_text())["models"]["tiny"]
    for task in ("niah_single_2", "qa_1"):
        assert [line["index"] for line in lines(task)] == [0, 1]
        assert found["scores"][task]["640"]["score"] == 100 * np.mean([line["score"] for line in lines(task)])
        for line in lines(task):
            assert line["score"] == score(line["prediction"], line["references"], task == "qa_1") and line["tokens"] <= 640

    # A line cut by a kill is made anew, alike; what is there is not.
    first = lines("niah_single_2")
    path = out / "samples/tiny/niah_single_2-640.jsonl"
    path.write_text(path.read_text()[:-30])
    assert main([*common, tasks, f"--qa_1={tmp_path}/squad.json", "--samples=2"]) == 0
    assert lines("niah_single_2") == first
    assert main([*common, "--tasks=niah_single_2", "--samples=3"]) == 0
    assert lines("niah_single_2")[:2] == first and len(lines("niah_single_2")) == 3
    monkeypatch.setattr(run, "Generator", None)
    assert main([*common, tasks, f"--qa_1={tmp_path}/squad.json", "--samples=1"]) == 0
    monkeypatch.undo()
    found = json.loads((out / "ruler.json").read_text())["models"]["tiny"]["scores"]
    assert (found["niah_single_2"]["640"]["samples"], found["qa_1"]["640"]["samples"]) == (3, 2)

    capsys.readouterr()
    for arguments, fault in (
        ([*common, tasks, "--seed=1"], "--qa_1=FILE"),
        ([*common, "--tasks=vt", "--seed=1"], "another seed (42, not 1)"),
        ([*common, "--tasks=niah_single"], "did you mean"),
        ([*common, "--tasks=vt", "--samples=0"], "--samples=0"),
        ([*common, "--tasks=cwe"], "cwe takes at least"),
        ([*common[:2], *common[3:], "--tasks=vt"], "another haystack"),
        ([*common, "--tasks=fwe", "--rope=theta=99"], "tiny had other weights or settings"),
    ):
        assert main(arguments) == 2
        assert fault in capsys.readouterr().err


def test_a_model_is_known_again(model, tokenizer):
    print_ = run.fingerprint(model, tokenizer)
    assert print_ == run.fingerprint(model, tokenizer)
    graphdef, params = nnx.split(model)
    other = nnx.merge(graphdef, jax.tree.map(lambda x: x + 1e-3, params))
    assert run.fingerprint(other, tokenizer) != print_ != run.fingerprint(model, tokenizers.Bytes())
    new = {"a": 1, "b": {"c": 2, "d": 3}, "e": 0}, {"a": 0, "b": {"c": 1, "d": 3}, "e": 0}
    old = {"a": 1, "b": {"c": 2}}, {"a": 0, "b": {"c": 1}}
    assert run.chosen(*new) == run.chosen(*old) == {"a": 1, "b": {"c": 2}}


def test_the_table_is_the_papers():
    scores = {"vt": {"4096": {"score": 90.0, "samples": 5}, "8192": {"score": 80.0, "samples": 5}}}
    two = scores | {"fwe": {"4096": {"score": 95.5, "samples": 3}}}
    entries = {
        "baseline": {"scores": scores, "mean": {"4096": 90.0, "8192": 80.0}, "effective_length": 4096},
        "gate": {"scores": two, "mean": {"4096": 92.75, "8192": 80.0}, "effective_length": None},
    }
    table = write.table(entries)
    assert "|  | 4k | 8k | effective |" in table and "3 to 5 samples" in table
    assert "| baseline | 90.00 (1 of 2 tasks) | 80.00 (1 of 2 tasks) | 4k |" in table
    assert "| gate | 92.75 | 80.00 (1 of 2 tasks) | - |" in table and "| gate | fwe | 95.50 | - |" in table


def test_effective_length_and_means(tmp_path):
    book = ruler.Book(tmp_path, {"seed": 42})
    book.model("m", "w")
    for task, length, values in (("vt", 1024, [1, 1, 0.5, 1]), ("fwe", 1024, [1, 1]), ("vt", 2048, [0.85])):
        book.finish("m", task, length, values)
    entry = json.loads((tmp_path / "ruler.json").read_text())["models"]["m"]
    assert entry["scores"]["vt"]["1024"] == {"score": 87.5, "samples": 4, "stderr": 12.5}
    assert entry["mean"] == {"1024": 93.75, "2048": 85.0} and entry["effective_length"] == 1024
    book.finish("m", "vt", 4096, [1])  # without the other task it says nothing of the mean
    entry = json.loads((tmp_path / "ruler.json").read_text())["models"]["m"]
    assert entry["mean"]["4096"] == 100 and entry["effective_length"] == 1024
    assert list(write.figure({"m": entry}).axes[0].lines[0].get_xdata()) == [1024]
    with pytest.raises(ConfigError, match="another name"):
        ruler.Book(tmp_path, {"seed": 42}).model("m", "others")
