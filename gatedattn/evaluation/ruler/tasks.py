"""RULER's 13 tasks (arXiv 2404.06654): a context of any size, what is asked about it, and the answers.

The templates, the needle, the noise line and the numbers are the benchmark's own (https://github.com/NVIDIA/RULER, Apache-2.0, which
also lm_eval/tasks/ruler follows); a misspelling in them is part of it. Each task draws everything from the generator it is given.
"""

from __future__ import annotations

import functools
import math
import string
import uuid
from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import NamedTuple

from gatedattn.evaluation.ruler.material import Material

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {kind}s for {key} is: {value}."
ONE = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. I will quiz you about the {kind} "
    "afterwards.\n{context}\nWhat is the special magic {kind} for {keys} mentioned in the provided text?"
    " The special magic {kind} for {keys} mentioned in the provided text is"
)
SEVERAL = (
    "Some special magic {kind}s are hidden within the following text. Make sure to memorize it. I will quiz you about the {kind}s "
    "afterwards.\n{context}\nWhat are all the special magic {kind}s for {keys} mentioned in the provided text?"
    " The special magic {kind}s for {keys} mentioned in the provided text are"
)
TRACKING = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\nQuestion: Find all variables "
    "that are assigned the value {value} in the text above. Answer: According to the chain(s) of variable assignment in the text "
    "above, {count} variables are assgined the value {value}, they are:"
)
COMMON = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that appear most "
    "often.\n{context}\nQuestion: What are the 10 most common words in the above list? Answer: The top 10 words that appear most "
    "often in the list are:"
)
FREQUENT = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared coded words. "
    "{context}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently appeared "
    "words in the above coded text? Answer: According to the coded text above, the three most frequently appeared words are:"
)
ANSWERING = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\nThe following "
    "are given documents.\n\n{context}\n\nAnswer the question based on the given documents. Only give me the answer and do not output "
    "any other words.\n\nQuestion: {question} Answer:"
)
DEPTHS = [round(i * 100 / 39) for i in range(40)]  # percent of the sentences before a needle in an essay
HOPS, EXAMPLE_LINES = 4, 10  # variables after the first; noise lines in the worked example
SHORT = 4096  # shorter lists repeat their words less often


class Draft(NamedTuple):
    """`prompt` ends with the beginning of the answer."""

    prompt: str
    references: list[str]


def needles(
    rng: Random, material: Material, size: int, length: int, index: int, *, haystack: str, key: str = "word",
    value: str = "number", keys: int = 1, values: int = 1, asked: int = 1,
) -> Draft:  # fmt: skip
    """Find the `values` of `asked` of the `keys`, each in a sentence of its own, among `size` words of the essay, noise lines or
    sentences of the same kind."""

    def draw(kind: str) -> str:
        if kind == "word":
            return f"{rng.choice(material.words.adjectives)}-{rng.choice(material.words.nouns)}"
        return str(rng.randint(10**6, 10**7 - 1)) if kind == "number" else str(uuid.UUID(int=rng.getrandbits(128), version=4))

    names = distinct(lambda: draw(key), keys)
    hidden = {name: distinct(lambda: draw(value), values) for name in names}
    sentences = [NEEDLE.format(kind=value, key=name, value=v) for name in names for v in hidden[name]]
    rng.shuffle(sentences)
    if haystack == "essay":
        hay = material.essay.first(size)
        places = [len(hay) * depth // 100 for depth in rng.sample(DEPTHS, len(sentences))]
    else:
        places = rng.sample(range(size), len(sentences))
        if haystack == "noise":
            hay = [NOISE] * size
        else:
            others = distinct(lambda: draw(key), size, apart_from=names)
            hay = [NEEDLE.format(kind=value, key=other, value=draw(value)) for other in others]
    for place, sentence in zip(sorted(places, reverse=True), sentences, strict=True):
        hay.insert(place, sentence)
    wanted = rng.sample(names, asked)
    template = ONE if asked * values == 1 else SEVERAL
    listed = ", and ".join(filter(None, (", ".join(wanted[:-1]), wanted[-1])))
    context = (" " if haystack == "essay" else "\n").join(hay)
    return Draft(template.format(kind=value, context=context, keys=listed), [v for name in wanted for v in hidden[name]])


def tracking(rng: Random, material: Material, size: int, length: int, index: int) -> Draft:
    """Name all variables of a chain of assignments, among `size` noise lines, after a worked example."""
    example = chain(rng, min(size, EXAMPLE_LINES), letters=3)
    task = chain(rng, size, letters=5)
    return Draft(f"{example.prompt}  {' '.join(example.references)}\n\n\n\n{task.prompt}", task.references)


def chain(rng: Random, lines: int, letters: int) -> Draft:
    names = distinct(lambda: "".join(rng.choices(string.ascii_uppercase, k=letters)), HOPS + 1)
    value = rng.randint(10000, 99999)
    assignments = [f"VAR {names[0]} = {value}", *(f"VAR {new} = VAR {old} " for old, new in pairwise(names))]
    hay = [f"{NOISE}\n"] * lines
    for place, assignment in reversed(list(zip(sorted(rng.sample(range(lines), len(names))), assignments))):
        hay.insert(place, assignment)
    return Draft(TRACKING.format(context=" ".join(hay), value=value, count=len(names)), names)


def common_words(rng: Random, material: Material, size: int, length: int, index: int) -> Draft:
    """Name the 10 that are repeated most of `size` words, after a worked example."""
    example_size, example_repeats, repeats = (20, (3, 1), (6, 1)) if length < SHORT else (40, (10, 3), (30, 3))
    example = word_list(rng, material, example_size, *example_repeats)
    task = word_list(rng, material, size, *repeats)
    return Draft(f"{example.prompt}{numbered(example.references)}\n{task.prompt}", task.references)


def word_list(rng: Random, material: Material, size: int, often: int, seldom: int) -> Draft:
    words, chosen = material.words, rng.sample(material.words.all, min(size, len(material.words.all)))
    # A million tokens need more words than there are.
    chosen += distinct(
        lambda: f"{rng.choice(words.adjectives)}-{rng.choice(words.nouns)}", size - len(chosen), apart_from=chosen
    )
    listed = chosen[:10] * often + chosen[10:] * seldom
    rng.shuffle(listed)
    return Draft(COMMON.format(context=numbered(listed)), chosen[:10])


def frequent_words(rng: Random, material: Material, size: int, length: int, index: int) -> Draft:
    """Name the 3 most frequent of made-up words: of `size`, the k-th makes up k^-2 / zeta(2), and the first is dots."""
    vocabulary = distinct(lambda: "".join(rng.choices(string.ascii_lowercase, k=6)), max(length // 50, 5))
    vocabulary[0] = "..."
    listed = [word for k, word in enumerate(vocabulary, 1) for _ in range(int(size * k**-2.0 / (math.pi**2 / 6)))]
    rng.shuffle(listed)
    return Draft(FREQUENT.format(context=" ".join(listed)), vocabulary[1:4])


def answering(rng: Random, material: Material, size: int, length: int, index: int, *, file: str) -> Draft:
    """Answer the `index`-th question of a file, among `size` paragraphs: those with the answer, others of the article, any."""
    asked = material.questions[file]
    question = asked.questions[index]
    chosen = [*question.gold, *rng.sample(question.related, max(0, min(size - len(question.gold), len(question.related))))]
    if len(chosen) < size:
        others = sorted(set(range(len(asked.paragraphs))) - {*chosen})
        chosen += rng.sample(others, min(size - len(chosen), len(others)))
    rng.shuffle(chosen)
    context = "\n\n".join(f"Document {i}:\n{asked.paragraphs[number]}" for i, number in enumerate(chosen, 1))
    return Draft(ANSWERING.format(context=context, question=question.text), list(question.answers))


def distinct(draw: Callable[[], str], count: int, apart_from=()) -> list[str]:
    """`count` different draws, none of them among others."""
    found: dict[str, None] = {}
    apart_from = set(apart_from)
    while len(found) < count:
        if (drawn := draw()) not in apart_from:
            found[drawn] = None
    return list(found)


def numbered(words: list[str]) -> str:
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))


class Task(NamedTuple):
    """draft: (rng, material, size, length, index) -> Draft; tokens: to generate; least: the smallest size; any_reference: one
    of the references suffices, rather than each counting its share."""

    draft: Callable[..., Draft]
    tokens: int
    least: int = 1
    any_reference: bool = False


def _niah(haystack: str, **kind) -> Task:
    return Task(functools.partial(needles, haystack=haystack, **kind), 128, least=kind.get("keys", 1) * kind.get("values", 1))


TASKS = {
    "niah_single_1": _niah("noise"),
    "niah_single_2": _niah("essay"),
    "niah_single_3": _niah("essay", value="uuid"),
    "niah_multikey_1": _niah("essay", keys=4),
    "niah_multikey_2": _niah("needles"),
    "niah_multikey_3": _niah("needles", key="uuid", value="uuid"),
    "niah_multivalue": _niah("essay", values=4),
    "niah_multiquery": _niah("essay", keys=4, asked=4),
    "vt": Task(tracking, 30, least=HOPS + 1),
    "cwe": Task(common_words, 120, least=11),
    "fwe": Task(frequent_words, 50, least=80),  # from 74 on the fourth word is rarer than the third
    "qa_1": Task(functools.partial(answering, file="qa_1"), 32, any_reference=True),
    "qa_2": Task(functools.partial(answering, file="qa_2"), 32, any_reference=True),
}
