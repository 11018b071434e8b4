"""Held-out loss and head statistics of a set of parameters."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import PyTree

from gatedattn import probes
from gatedattn.config import RunConfig
from gatedattn.data import Batches, Data
from gatedattn.training import step as steps
from gatedattn.training.placement import Placement


def perplexity(loss: float) -> float:
    """exp(loss), infinite rather than an OverflowError."""
    return math.exp(loss) if loss < 700 else math.inf


def evaluate(
    eval_step: Callable,
    params: PyTree,
    data: Data,
    place: Placement,
    batches: int = 0,
    stop: Callable[[], bool] = lambda: False,
) -> list[dict] | None:
    """A line of eval.jsonl (without its step) per held-out set, over its first `batches` batches (0: all of them):

    set, loss (mean cross-entropy in nats per token), perplexity, accuracy, tokens, and bits_per_byte = ce_sum / ln 2 / bytes of
    text. Over a part of the set, its bytes are taken as the same part of the set's bytes as its tokens are of the set's tokens.
    None if `stop` becomes true in between.
    """
    lines = []
    for name, held_out in data.valid.items():
        total = None
        for index in range(min(batches or held_out.num_batches, held_out.num_batches)):
            if stop():
                return None
            sums = eval_step(params, place.put(functools.partial(held_out, index), held_out.batch_size))
            total = sums if total is None else jax.tree.map(jnp.add, total, sums)
        total = {key: float(value) for key, value in jax.device_get(total).items()}
        tokens = max(total["count"], 1)
        loss = total["ce_sum"] / tokens
        line = {
            "set": name,
            "loss": loss,
            "perplexity": perplexity(loss),
            "accuracy": total["correct"] / tokens,
            "tokens": int(tokens),
        }
        if text_bytes := data.valid_bytes.get(name):
            line["bits_per_byte"] = total["ce_sum"] / math.log(2) / (text_bytes * tokens / held_out.num_tokens)
        lines.append(line)
    return lines


def make_probe_step(config: RunConfig) -> Callable[[PyTree, steps.Batch], dict]:
    """(params, batch) -> `probes.measure`. Where the data marks triggers, attention is averaged over the other queries: at a
    trigger a head is meant to look at the token to copy, and the question is what heads do when there is nothing to copy."""
    graphdef = steps.graph(config.model)

    def probe_step(params, batch):
        queries = batch["loss_mask"] & ~batch["trigger"] if "trigger" in batch else None
        model = nnx.merge(graphdef, params)
        return probes.measure(model, batch["tokens"], batch["positions"], batch["segment_ids"], query_mask=queries)

    return probe_step


def probe_rows(data: Data, rows: int) -> steps.Batch:
    """The first `rows` held-out rows of the first held-out set (all of them if there are fewer)."""
    held_out: Batches = next(iter(data.valid.values()))
    needed = itertools.islice(range(held_out.num_batches), math.ceil(rows / held_out.batch_size))
    parts = [held_out(index) for index in needed]
    return {name: np.concatenate([part[name] for part in parts])[:rows] for name in parts[0]}
