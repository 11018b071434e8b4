"""RULER's tasks at a length, in a model's own tokens, and how an answer is scored."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from random import Random
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from gatedattn.config import ConfigError
from gatedattn.data.tokenizers import Tokenizer
from gatedattn.evaluation.ruler.material import Material
from gatedattn.evaluation.ruler.tasks import TASKS, Draft


class Sample(NamedTuple):
    """`tokens` begin with BOS."""

    index: int
    prompt: str
    references: list[str]
    tokens: Int32[np.ndarray, " T"]


class Suite:
    """Samples of any task and length for one tokenizer.

    A sample is drawn from a generator of its own, of (seed, task, length, index): the same whatever else is asked for. BOS, the
    prompt and the tokens that the task may generate are at most `length`, and fill it up to a word, a line or a paragraph (RULER
    itself grows contexts by steps of up to 500 words).
    """

    def __init__(self, material: Material, tokenizer: Tokenizer, seed: int = 42):
        self.material, self.tokenizer, self.seed = material, tokenizer, seed
        self._sizes: dict[tuple[str, int], int] = {}

    def samples(self, name: str, length: int, count: int, start: int = 0) -> Iterator[Sample]:
        """`count` of them from index `start` on; of a file with questions those whose paragraphs fit into the length, as far as
        there are any. Raises `ConfigError` if there is none at all."""
        file = self.material.questions.get(name)
        found = 0
        for index in range(start, len(file.questions) if file else start + count):
            if found >= count:
                return
            try:
                yield self.sample(name, length, index)
                found += 1
            except ConfigError:  # the paragraphs that hold the answer do not fit
                if file is None:
                    raise
        if file and not found and not start:
            raise ConfigError(f"--lengths={length}: no question of {name} fits with its paragraphs; take it out of --tasks")

    def sample(self, name: str, length: int, index: int) -> Sample:
        """Raises `ConfigError` if it cannot be that short."""
        task, size, grown = TASKS[name], self.size(name, length), False
        while True:
            draft = self._draft(name, length, size, index)
            tokens = self._encode(draft.prompt)
            over = len(tokens) + task.tokens - length
            step = size * abs(over) // len(tokens)
            if over <= 0 and (grown or not step):
                return Sample(index, draft.prompt, draft.references, tokens)
            if over <= 0:  # its words are shorter than the first sample's
                size, grown = size + step, True
            elif size > task.least:
                size, grown = max(task.least, size - max(1, step)), True
            else:
                needed = len(tokens) + task.tokens
                raise ConfigError(f"--lengths={length}: {name} takes at least {needed} tokens with this tokenizer")

    def size(self, name: str, length: int) -> int:
        """Units of context (words, lines, paragraphs) that fill the length: by bisection, on the first sample."""
        if (name, length) not in self._sizes:
            task = TASKS[name]

            def fits(size: int) -> bool:
                return len(self._encode(self._draft(name, length, size, 0).prompt)) + task.tokens <= length

            low, high = task.least, 2 * task.least
            while high < length and fits(high):  # no unit takes less than a token
                low, high = high, 2 * high
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if fits(middle) else (low, middle)
            self._sizes[name, length] = low
        return self._sizes[name, length]

    def _draft(self, name: str, length: int, size: int, index: int) -> Draft:
        rng = Random(f"{self.seed} {name} {length} {index}")
        return TASKS[name].draft(rng, self.material, size, length, index)

    def _encode(self, text: str) -> Int32[np.ndarray, " T"]:
        return np.concatenate([[self.tokenizer.bos_id], self.tokenizer.encode(text)]).astype(np.int32)


def score(prediction: str, references: Sequence[str], any_reference: bool = False) -> float:
    """The share of references found in a prediction, or whether any is: 0 to 1. Case does not matter, nor what else is said.

    RULER's two scores, string_match_all and string_match_part."""
    text = re.sub(r"[\x00-\x1f]", "\n", prediction.strip()).strip().lower()
    found = [reference.lower() in text for reference in references]
    return float(any(found)) if any_reference else sum(found) / len(found)
