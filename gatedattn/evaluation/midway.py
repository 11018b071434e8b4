"""What a run measures while it trains, beside its held-out loss: `eval.tasks`.

Texts are tokenized and cut into windows, and RULER's samples drawn, when the run starts; the programs are compiled once. The training
step is not touched: its program stays, and it waits for the evaluation as it does for the held-out loss.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import jax

from gatedattn.config import ConfigError, RunConfig, suggest
from gatedattn.data.tokenizers import Tokenizer
from gatedattn.evaluation import perplexity as perplexity_lib
from gatedattn.inference import Generator
from gatedattn.transformer import Transformer

TOGETHER = 8  # prompts that are continued at a time
Evaluator = Callable[[Transformer], list[dict]]


def build(config: RunConfig, tokenizer: Tokenizer) -> list[Evaluator]:
    """The evaluations that `eval.tasks` names, each a function of the model that gives lines of eval.jsonl (without their step):

        perplexity:NAME=GLOB    loss, perplexity, bits_per_byte, tokens of a set of files, in windows of train.seq_len tokens
        harness:TASK,TASK       each task's metrics and their standard errors (`stderr`), by lm_eval's names; eval.limit items of each
        ruler:TASK,TASK@LENGTH  the score of each RULER task, of 100, over eval.limit samples; those that take no file

    Each line has `task`, as it was named, and `seconds`; or `error`, if it failed, which does not end the run. Several evaluations are
    separated by ";".

    Raises:
        ConfigError: another kind, no such file, no such task, a package that is not installed; generation on several processes.
    """
    kinds = {"perplexity": _perplexity, "harness": _harness, "ruler": _ruler}
    found = []
    for item in filter(None, map(str.strip, config.eval.tasks.split(";"))):
        kind, _, rest = item.partition(":")
        if kind not in kinds or not rest:
            raise ConfigError(
                f"eval.tasks: {item!r} must be perplexity:NAME=GLOB, harness:TASK or ruler:TASK@LENGTH{suggest(kind, kinds)}"
            )
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


def _ruler(config: RunConfig, tokenizer: Tokenizer, rest: str) -> Evaluator:
    from gatedattn.evaluation import ruler
    from gatedattn.evaluation.ruler.run import answers

    names, at, length = rest.rpartition("@")
    if not at or not length.isdecimal():
        raise ConfigError(f"eval.tasks: ruler:{rest} must name tasks and a length: ruler:niah_single_1,vt@4096")
    known = [name for name in ruler.TASKS if not name.startswith("qa_")]
    for name in (tasks := names.split(",")):
        if name not in known:
            raise ConfigError(
                f"eval.tasks: RULER has no {name!r} without a file{suggest(name, known)}; there is: {', '.join(known)}"
            )
    if jax.process_count() > 1:
        raise ConfigError("eval.tasks: RULER generates text, which a run of several processes cannot: use `python -m gatedattn ruler` "
                          "on its checkpoints")  # fmt: skip
    suite = ruler.Suite(ruler.Material.read(), tokenizer)
    samples = {name: list(suite.samples(name, int(length), config.eval.limit or 500)) for name in tasks}

    def evaluate(model: Transformer) -> list[dict]:
        generator, lines = Generator(model), []
        for name, drawn in samples.items():
            task, size, scores = ruler.TASKS[name], min(TOGETHER, len(drawn)), []
            for start in range(0, len(drawn), size):
                batch = drawn[start : start + size]
                texts = answers(generator, tokenizer, batch, task, size)
                scores += [ruler.score(text, sample.references, task.any_reference) for text, sample in zip(texts, batch)]
            lines.append({"task": f"ruler:{name}@{length}", "score": 100 * sum(scores) / len(scores), "samples": len(scores)})
        return lines

    return evaluate


def metrics(found: dict) -> dict[str, float]:
    """lm_eval's {"acc,none": .5, "acc_stderr,none": .01} as {"acc": .5, "acc_stderr": .01}."""
    numbers = {key: value for key, value in found.items() if "," in key and isinstance(value, int | float)}
    names = [key.split(",")[0] for key in numbers]
    return {name if names.count(name) == 1 else key: value for (key, value), name in zip(numbers.items(), names, strict=True)}
