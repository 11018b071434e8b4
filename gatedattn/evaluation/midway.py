"""What a run measures while it trains, beside its held-out loss: `eval.tasks`.

Texts are tokenized and cut into windows when the run starts; at an evaluation all of them are handed to the device before the first
result is read, and the programs are compiled once. The training step is not touched: its program stays, and it waits for the
evaluation as it does for the held-out loss.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import jax

from gatedattn.config import ConfigError, RunConfig, suggest
from gatedattn.data.tokenizers import Tokenizer
from gatedattn.evaluation import perplexity as perplexity_lib
from gatedattn.transformer import Transformer

Evaluator = Callable[[Transformer], list[dict]]


def build(config: RunConfig, tokenizer: Tokenizer) -> list[Evaluator]:
    """The evaluations that `eval.tasks` names, each a function of the model that gives lines of eval.jsonl (without their step):

        perplexity:NAME=GLOB    loss, perplexity, bits_per_byte, tokens of a set of files, in windows of train.seq_len tokens
        harness:TASK,TASK       each task's metrics and their standard errors (`stderr`), by lm_eval's names

    Each line has `task`, as it was named, and `seconds`; or `error`, if it failed, which does not end the run. Several evaluations are
    separated by ";".

    Raises:
        ConfigError: another kind, no such file, no such task, a package that is not installed; generation on several processes.
    """
    kinds = {"perplexity": _perplexity, "harness": _harness}
    found = []
    for item in filter(None, map(str.strip, config.eval.tasks.split(";"))):
        kind, _, rest = item.partition(":")
        if kind not in kinds or not rest:
            raise ConfigError(f"eval.tasks: {item!r} must be one of perplexity:NAME=GLOB, harness:TASK{suggest(kind, kinds)}")
        found.append(_guarded(item, kinds[kind](config, tokenizer, rest)))
    return found


def _guarded(item: str, evaluator: Evaluator) -> Evaluator:
    """Timed; and a run does not end because an evaluation did: what went wrong is its line."""

    def evaluate(model: Transformer) -> list[dict]:
        began = time.perf_counter()
        try:
            lines = evaluator(model)
        except Exception as error:
            lines = [{"task": item, "error": f"{type(error).__name__}: {error}".splitlines()[0]}]
        seconds = (time.perf_counter() - began) / max(len(lines), 1)
        return [line | {"seconds": round(seconds, 3)} for line in lines]

    return evaluate


def _perplexity(config: RunConfig, tokenizer: Tokenizer, rest: str) -> Evaluator:
    try:
        ((name, files),) = perplexity_lib.text_sets([rest]).items()
    except ConfigError as error:
        raise ConfigError(f"eval.tasks: {error}") from None
    batch = config.train.batch_size // config.train.microbatches
    windows = perplexity_lib.Windows(tokenizer, perplexity_lib.texts(files), config.train.seq_len, config.train.seq_len, batch)
    batches = list(windows)

    def evaluate(model: Transformer) -> list[dict]:
        found = perplexity_lib.summary(perplexity_lib.losses(model, batches), windows)
        return [{"task": f"perplexity:{name}"} | {key: found[key] for key in ("loss", "perplexity", "bits_per_byte", "tokens")}]

    return evaluate


def _harness(config: RunConfig, tokenizer: Tokenizer, rest: str) -> Evaluator:
    from gatedattn.evaluation import harness

    tasks = harness.Tasks(rest.split(","), config.eval.include_path or None)
    if jax.process_count() > 1 and (asked := tasks.generating()):
        raise ConfigError(f"eval.tasks: {', '.join(asked)} generate text, which a run of several processes cannot: use "
                          "`python -m gatedattn harness` on its checkpoints")  # fmt: skip
    subject: list[harness.HarnessModel] = []

    def evaluate(model: Transformer) -> list[dict]:
        if subject:
            subject[0].renew(model)
        else:
            subject.append(harness.HarnessModel(model, tokenizer))
        results = tasks.evaluate(subject[0], limit=config.eval.limit or None)["results"]
        return [{"task": f"harness:{name}"} | metrics(found) for name, found in results.items()]

    return evaluate


def metrics(found: dict) -> dict[str, float]:
    """lm_eval's {"acc,none": .5, "acc_stderr,none": .01} as {"acc": .5, "acc_stderr": .01}."""
    numbers = {key: value for key, value in found.items() if "," in key and isinstance(value, int | float)}
    names = [key.split(",")[0] for key in numbers]
    return {name if names.count(name) == 1 else key: value for (key, value), name in zip(numbers.items(), names, strict=True)}
