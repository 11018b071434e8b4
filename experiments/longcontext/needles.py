"""Speeches with needles in them: facts that a document states somewhere and repeats at its end.

    python -m experiments.longcontext.needles --out=DIR [--documents=12000]

Writes DIR/NNNNN.txt. Two of three are a passage of a State of the Union address of 40 words in which two facts stand, "The word of Ohio is
river.", and which ends with both facts again: at the second "is" the word is known to who finds the first. The third are 24 random words
of the speeches, twice: heads that look for what followed before form late without them. Held-out speeches are left out.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from random import Random

import numpy as np
from jaxtyping import Int32

from gatedattn.config import ConfigError
from gatedattn.data.sotu import VALIDATION_YEARS, speeches
from gatedattn.data.tokenizers import Tokenizer

KEYS = (
    "Alabama Alaska Arizona Arkansas California Colorado Delaware Florida Georgia Hawaii Idaho Illinois Indiana Iowa Kansas Kentucky "
    "Louisiana Maine Maryland Michigan Minnesota Mississippi Missouri Montana Nebraska Nevada Ohio Oklahoma Oregon Texas Utah Vermont"
).split()
VALUES = (
    "river stone garden window silver engine letter market winter summer island forest bridge candle harbor mirror orange pepper rocket "
    "saddle temple valley violet wagon apple basket copper desert eagle feather guitar hammer"
).split()
FACTS, WORDS, ECHOED = 2, 40, 24


def fact(key: str) -> str:
    return f"The word of {key} is"


def draw(rng: Random) -> list[tuple[str, str]]:
    """Keys that differ, each with its value."""
    return list(zip(rng.sample(KEYS, FACTS), rng.choices(VALUES, k=FACTS)))


def document(rng: Random, passage: list[str]) -> str:
    """A training document."""
    facts = draw(rng)
    words = list(passage)
    for key, value in facts:
        words.insert(rng.randint(0, len(words)), f"{fact(key)} {value}.")
    asked = rng.sample(facts, FACTS)
    return " ".join([*words, *(f"{fact(key)} {value}." for key, value in asked)])


def echo(rng: Random, words: list[str]) -> str:
    """A training document whose second half is its first."""
    drawn = rng.choices(words, k=ECHOED)
    return " ".join([*drawn, *drawn])


def question(
    rng: Random, tokenizer: Tokenizer, filler: Int32[np.ndarray, " X"], length: int
) -> tuple[Int32[np.ndarray, " T+1"], int]:
    """A test of `length` inputs and one token more: BOS, held-out filler with facts at random depths, one of them begun again.
    Returns the ids and how many at the end are the value to be found."""
    facts = draw(rng)
    key, value = facts[0]

    def encode(text: str) -> np.ndarray:
        return np.asarray(tokenizer.encode(text), np.int32)

    stated = [encode(f" {fact(key)} {value}.") for key, value in facts]
    asked, answer = encode(f" {fact(key)}"), encode(f" {value}")
    room = length - sum(map(len, stated)) - len(asked) - len(answer)
    start = rng.randrange(len(filler) - room)
    text = filler[start : start + room]
    pieces, cuts = [], sorted(rng.randint(0, room) for _ in facts)
    for statement, (low, high) in zip(rng.sample(stated, FACTS), zip([0, *cuts], cuts)):
        pieces += [text[low:high], statement]
    ids = np.concatenate([[tokenizer.bos_id], *pieces, text[cuts[-1] :], asked, answer])
    return ids, len(answer)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--documents", type=int, default=12_000)
    args = parser.parse_args(argv)
    words = [word for _, year, _, text in speeches() if year % VALIDATION_YEARS for word in text.split()]
    args.out.mkdir(parents=True, exist_ok=True)
    for number in range(args.documents):
        rng = Random(number)
        start = rng.randrange(len(words) - WORDS)
        text = document(rng, words[start : start + WORDS]) if number % 3 else echo(rng, words)
        (args.out / f"{number:05}.txt").write_text(text)
    print(f"{args.out}: {args.documents} documents")


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        sys.exit(f"error: {error}")
