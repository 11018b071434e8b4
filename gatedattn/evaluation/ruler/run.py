"""A model's answers to RULER's tasks."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from itertools import islice

import jax
import numpy as np
from flax import nnx
from tqdm import tqdm

from gatedattn.config import ConfigError, TransformerConfig, to_mapping
from gatedattn.data.cache import digest
from gatedattn.data.tokenizers import Tokenizer
from gatedattn.evaluation.ruler.book import Book
from gatedattn.evaluation.ruler.material import Material
from gatedattn.evaluation.ruler.samples import Sample, Suite, score
from gatedattn.evaluation.ruler.tasks import TASKS, Task
from gatedattn.inference import Generator, continuation
from gatedattn.transformer import Transformer

TOGETHER = 65536  # tokens of the prompts of a batch
LONGEST = max(task.tokens for task in TASKS.values())
SHOWN = 300  # characters of a prompt's end that are kept


def evaluate(
    model: Transformer,
    tokenizer: Tokenizer,
    material: Material,
    book: Book,
    *,
    name: str,
    tasks: Sequence[str],
    lengths: Sequence[int],
    samples: int = 500,
    seed: int = 42,
    batch_size: int = 8,
) -> None:
    """Enter in `book` how well a model answers: greedily, after BOS and the plain prompt (no chat template).

    Args:
        name: what the book calls the model.
        samples: of each task and length, those that are in the book already included; if it has more, all of them count.
        batch_size: prompts at a time; fewer where they would hold more than `TOGETHER` tokens.

    Raises:
        ConfigError: a length too short for a task or beyond learned positions, or a name that was another model's; all of them
            before anything is computed.
    """
    config = model.config
    if tokenizer.vocab_size > config.vocab_size:
        raise ConfigError(f"{name}: its tokenizer has {tokenizer.vocab_size} ids, the model {config.vocab_size}")
    if config.position == "learned" and max(lengths) > config.max_seq_len:
        raise ConfigError(f"--lengths={max(lengths)}: {name} has learned {config.max_seq_len} positions")
    suite = Suite(material, tokenizer, seed)
    done = {(length, task): book.samples(name, task, length) for length in lengths for task in tasks}
    for (length, task), records in done.items():
        if len(records) < samples:
            next(suite.samples(task, length, 1))
    book.model(name, fingerprint(model, tokenizer))
    generator = None
    with tqdm(total=samples * len(done), disable=None, file=sys.stderr) as bar:
        for (length, task), records in done.items():
            bar.set_description(f"{name} {task} {length}")
            bar.update(min(len(records), samples))
            size = max(1, min(batch_size, samples, TOGETHER // length))
            size = -(-samples // -(-samples // size))  # the last batch as full as the others
            start = records[-1]["index"] + 1 if records else 0
            waiting = suite.samples(task, length, samples - len(records), start)
            while batch := list(islice(waiting, size)):
                generator = generator or Generator(model)
                found = answers(generator, tokenizer, batch, TASKS[task], size)
                new = [record(sample, text, TASKS[task]) for sample, text in zip(batch, found)]
                book.add(name, task, length, new)
                records += new
                bar.update(len(batch))
            book.finish(name, task, length, [record["score"] for record in records])


def answers(generator: Generator, tokenizer: Tokenizer, batch: Sequence[Sample], task: Task, rows: int = 0) -> list[str]:
    """Up to `task.tokens` new tokens after each prompt, as text, up to EOS or BOS.

    At least `rows` rows are computed, so that a smaller last batch needs no program of its own. Ends when every answer of the batch has
    its full score: a longer one would still hold all references, so that no score is lost.
    """
    # All tasks ask for as many tokens, and so share compiled programs, but for a model that has no positions to spare.
    budget = task.tokens if generator.config.position == "learned" else LONGEST
    new, over = [[] for _ in batch], [False] * len(batch)
    texts = [""] * len(batch)
    stop = [tokenizer.bos_id, *tokenizer.eos_ids]
    prompts = [sample.tokens for sample in (*batch, *batch[-1:] * (rows - len(batch)))]
    for piece in generator.stream(prompts, max_tokens=budget, stop=stop):
        for i, row in enumerate(piece.tolist()[: len(batch)]):
            new[i] = (new[i] + [token for token in row if token >= 0])[: task.tokens]
            texts[i] = continuation(tokenizer, batch[i].tokens.tolist(), new[i])
            full = score(texts[i], batch[i].references, task.any_reference) == 1
            over[i] = full or -1 in row or len(new[i]) == task.tokens
        if all(over):
            break
    return texts


def record(sample: Sample, text: str, task: Task) -> dict:
    return {
        "index": sample.index,
        "tokens": len(sample.tokens),
        "score": score(text, sample.references, task.any_reference),
        "references": sample.references,
        "prediction": text,
        "prompt_end": sample.prompt[-SHOWN:],
    }


def fingerprint(model: Transformer, tokenizer: Tokenizer) -> str:
    """Differs between models: of the settings that are not the defaults, the tokenizer, and 64 values of each parameter."""
    leaves = [leaf.reshape(-1) for leaf in jax.tree.leaves(nnx.as_pure(nnx.state(model)))]
    values = [np.asarray(leaf[:: max(1, leaf.size // 64)]).tobytes() for leaf in leaves]
    settings = chosen(to_mapping(model.config), to_mapping(TransformerConfig()))
    return digest(json.dumps(settings, sort_keys=True), tokenizer.fingerprint, *values)


def chosen(settings: dict, defaults: dict) -> dict:
    """What is not as by default, so that a setting that comes to be later does not make another model of this one."""
    changed = {name: value for name, value in settings.items() if value != defaults[name]}
    return {name: chosen(value, defaults[name]) if isinstance(value, dict) else value for name, value in changed.items()}
