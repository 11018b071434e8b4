"""What RULER's contexts are made of: words, an essay without end, questions with their paragraphs. All of it is on the disk."""

from __future__ import annotations

import glob
import json
import os
import re
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from gatedattn.config import ConfigError
from gatedattn.data import sotu
from gatedattn.data.cache import digest
from gatedattn.data.sources import read_text

# After ".", "!" or "?", but not after a title, a one-letter abbreviation, or where a small letter goes on.
BOUNDARY = re.compile(r"(?<=[.!?])(?<!\b[A-Z]\.)(?<!\b(?:Mr|Ms|Dr|St|No)\.)(?<!\bMrs\.) (?=[^a-z ])")


class Words:
    """The English words of the package `wonderwords`, as RULER takes them. Raises `ConfigError` without it."""

    def __init__(self):
        try:
            from wonderwords import Defaults, RandomWord
        except ImportError:
            raise ConfigError("RULER's words are in the PyPI package wonderwords: pip install -e '.[eval]'") from None

        def listed(kind) -> list[str]:
            return sorted(RandomWord(enhanced_prefixes=False, words=kind).filter())  # it filters sets, in any order

        self.adjectives, self.nouns = listed(Defaults.ADJECTIVES), listed(Defaults.NOUNS)
        self.all = sorted({*self.adjectives, *self.nouns, *listed(Defaults.VERBS)})


class Essay:
    """A text cut after any number of words, by sentences; it begins anew where it ends."""

    def __init__(self, text: str):
        self.digest = digest(text)
        self.sentences = [sentence for sentence in BOUNDARY.split(" ".join(text.split())) if sentence]
        if not self.sentences:
            raise ConfigError("--haystack: the files hold no words")
        self.ends = list(accumulate(sentence.count(" ") + 1 for sentence in self.sentences))

    @classmethod
    def of(cls, pattern: str | None) -> Essay:
        """The text files of a glob in their order, or the held-out State of the Union speeches, the latest first."""
        if not pattern:
            return cls(" ".join(reversed([text for *_, text in sotu.speeches(held_out=True)])))
        paths = [Path(path) for path in sorted(glob.glob(os.path.expanduser(pattern), recursive=True)) if os.path.isfile(path)]
        if not paths:
            raise ConfigError(f"--haystack={pattern}: no such file (looked from {os.getcwd()})")
        return cls(" ".join(map(read_text, paths)))

    def first(self, words: int) -> list[str]:
        """The sentences of the first `words` words, the last one perhaps cut short."""
        rounds, rest = divmod(words, self.ends[-1])
        whole = bisect_right(self.ends, rest)
        cut = self.sentences[whole].split(" ")[: rest - (self.ends[whole - 1] if whole else 0)]
        return self.sentences * rounds + self.sentences[:whole] + [" ".join(cut)] * bool(cut)


@dataclass(frozen=True)
class Question:
    """`gold` paragraphs hold the answer; `related` ones are of the same article. Both are indices."""

    text: str
    answers: tuple[str, ...]
    gold: tuple[int, ...]
    related: tuple[int, ...] = ()


@dataclass(frozen=True)
class Questions:
    """Questions in the order of the file, and all its paragraphs."""

    questions: list[Question]
    paragraphs: list[str]
    digest: str

    @classmethod
    def read(cls, path: str | Path) -> Questions:
        """A file in the form of SQuAD 1.1 or 2.0 (questions that cannot be answered are left out) or of HotpotQA (distractor
        setting, all ten paragraphs are gold). Raises `ConfigError` for anything else."""
        content = read_text(Path(path))
        try:
            data = json.loads(content)
            found = cls._hotpot(data) if isinstance(data, list) else cls._squad(data["data"])
        except (ValueError, KeyError, TypeError) as error:
            what = f"{type(error).__name__}: {error}"
            raise ConfigError(f"{path} is neither in SQuAD's nor in HotpotQA's JSON form ({what})") from None
        if not found[0]:
            raise ConfigError(f"{path} holds no question that has an answer")
        return cls(*found, digest(content))

    @staticmethod
    def _squad(articles: list[dict]) -> tuple[list[Question], list[str]]:
        numbers = _numbered(p["context"] for article in articles for p in article["paragraphs"])
        questions = []
        for article in articles:
            whole = tuple(dict.fromkeys(numbers[p["context"]] for p in article["paragraphs"]))
            for paragraph in article["paragraphs"]:
                gold = numbers[paragraph["context"]]
                related = tuple(i for i in whole if i != gold)
                for qa in paragraph["qas"]:
                    answers = tuple(dict.fromkeys(answer["text"] for answer in qa["answers"]))
                    if answers and not qa.get("is_impossible"):
                        questions.append(Question(qa["question"], answers, (gold,), related))
        return questions, list(numbers)

    @staticmethod
    def _hotpot(items: list[dict]) -> tuple[list[Question], list[str]]:
        contexts = [[f"{title}\n{''.join(sentences)}" for title, sentences in item["context"]] for item in items]
        numbers = _numbered(paragraph for context in contexts for paragraph in context)
        questions = [
            Question(item["question"], (item["answer"],), tuple(dict.fromkeys(numbers[p] for p in context)))
            for item, context in zip(items, contexts, strict=True)
        ]
        return questions, list(numbers)


def _numbered(paragraphs) -> dict[str, int]:
    return {paragraph: i for i, paragraph in enumerate(sorted(set(paragraphs)))}


@dataclass(frozen=True)
class Material:
    words: Words
    essay: Essay
    questions: Mapping[str, Questions]  # by the name of the task that asks them

    @classmethod
    def read(cls, haystack: str | None = None, files: Mapping[str, str | Path] | None = None) -> Material:
        """See `Essay.of` and `Questions.read`; what they raise is raised here."""
        return cls(Words(), Essay.of(haystack), {task: Questions.read(path) for task, path in (files or {}).items()})
