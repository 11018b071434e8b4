"""Speeches with a needle in them: a word that a document states, and that is asked for later.

    python -m experiments.longcontext.needles --out=DIR [--documents=12000]

Writes DIR/NNNNN.txt, each a passage of a State of the Union address of 40 words in which "The word is river." stands at five random places
and at the end: from the second "is" on the word is known to who finds an earlier one. Held-out speeches are left out.

As easy as a needle can be: one fact, no key to match, words that the speeches hardly use, asked several times and from near by too.
Harder ones were not learned by models of this size (experiments/LOG.md).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from random import Random

import numpy as np
from jaxtyping import Int32

from experiments import command
from gatedattn.data.sotu import speeches
from gatedattn.data.tokenizers import Tokenizer

VALUES = (
    "river stone garden window silver engine letter market winter summer island forest bridge candle harbor mirror orange pepper rocket "
    "saddle temple valley violet wagon apple basket copper desert eagle feather guitar hammer"
).split()
WORDS, TIMES, STATED = 40, 5, "The word is"


def document(rng: Random, passage: list[str]) -> str:
    """A training document."""
    words, needle = list(passage), f"{STATED} {rng.choice(VALUES)}."
    for _ in range(TIMES):
        words.insert(rng.randint(0, len(words)), needle)
    return " ".join([*words, needle])


def question(
    rng: Random, tokenizer: Tokenizer, filler: Int32[np.ndarray, " X"], length: int
) -> tuple[Int32[np.ndarray, " T+1"], int]:
    """A test of `length` inputs and one token more: BOS, held-out filler with a needle at a random depth, and the needle begun again.
    Returns the ids and how many at the end are the word to be found."""
    value = rng.choice(VALUES)

    def encode(text: str) -> np.ndarray:
        return np.asarray(tokenizer.encode(text), np.int32)

    stated, asked, answer = encode(f" {STATED} {value}."), encode(f" {STATED}"), encode(f" {value}")
    room = length - len(stated) - len(asked) - len(answer)
    start, depth = rng.randrange(len(filler) - room), rng.randint(0, room)
    text = filler[start : start + room]
    return np.concatenate([[tokenizer.bos_id], text[:depth], stated, text[depth:], asked, answer]), len(answer)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--documents", type=int, default=12_000)
    args = parser.parse_args(argv)
    words = [word for *_, text in speeches(held_out=False) for word in text.split()]
    args.out.mkdir(parents=True, exist_ok=True)
    for number in range(args.documents):
        rng = Random(number)
        start = rng.randrange(len(words) - WORDS)
        (args.out / f"{number:05}.txt").write_text(document(rng, words[start : start + WORDS]))
    print(f"{args.out}: {args.documents} documents")


if __name__ == "__main__":
    command.run(main)
