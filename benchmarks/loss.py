"""The chunked cross-entropy against the plain one: loss and gradients of hidden states and unembedding.

python -m benchmarks.loss [--vocab=151936] [--tokens=4096] [--width=384] [--chunk=2048] [--repeats=3] [--out=benchmarks/results/loss.json]

The plain one is optax's, which holds all logits. They take turns; the first round is left out. Memory: XLA's figure for the temporaries
and results of the compiled program.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

from gatedattn.training.loss import next_token_loss


def measure(vocab: int, tokens: int, width: int, chunk: int, repeats: int) -> dict:
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (1, tokens, width))
    unembedding = jax.random.normal(keys[1], (width, vocab)) / width**0.5
    targets = jax.random.randint(keys[2], (1, tokens), 0, vocab)

    def chunked(hidden, unembedding):
        return next_token_loss(hidden, unembedding, targets, jnp.ones_like(targets, bool), chunk=chunk)["loss_sum"]

    def plain(hidden, unembedding):
        return optax.softmax_cross_entropy_with_integer_labels(hidden @ unembedding, targets).sum()

    found: dict = {"vocab": vocab, "tokens": tokens, "width": width, "chunk": chunk, "jax": jax.__version__}
    programs, seconds = {}, {"chunked": [], "plain": []}
    for name, loss in (("chunked", chunked), ("plain", plain)):
        programs[name] = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(hidden, unembedding).compile()
        memory = programs[name].memory_analysis()
        found[name] = {"temp_bytes": memory.temp_size_in_bytes, "output_bytes": memory.output_size_in_bytes}
    for _ in range(repeats + 1):
        for name, program in programs.items():
            began = time.perf_counter()
            found[name]["loss"] = float(program(hidden, unembedding)[0])
            seconds[name].append(time.perf_counter() - began)
    for name in programs:
        found[name]["seconds"] = statistics.median(seconds[name][1:])
    found["chunked_over_plain"] = statistics.median(a / b for a, b in list(zip(*seconds.values(), strict=True))[1:])
    return found


def table(result: dict) -> str:
    lines = ["| loss | temporaries MB | results MB | s | value |\n", "| --- | --- | --- | --- | --- |\n"]
    for name in ("chunked", "plain"):
        row = result[name]
        sizes = " | ".join(f"{row[key] / 1e6:,.0f}" for key in ("temp_bytes", "output_bytes"))
        lines.append(f"| {name} | {sizes} | {row['seconds']:.2f} | {row['loss']:.6g} |\n")
    work = f"{result['tokens']:,} tokens of width {result['width']}, V = {result['vocab']:,}, chunks of {result['chunk']:,}"
    return f"{work}; time of the chunked over the plain {result['chunked_over_plain']:.2f}:\n\n" + "".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"vocab": 151936, "tokens": 4096, "width": 384, "chunk": 2048, "repeats": 3}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path, help="keep the result as JSON")
    args = parser.parse_args()
    result = measure(**{name: getattr(args, name) for name in sizes})
    print(table(result))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
