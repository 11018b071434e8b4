"""How loud the first layer is beside the tokens it reads: where it drowns them, later layers hardly know which token they are at.

    python -m experiments.variants.balance runs/variants/*-x1-0 runs/tiny/checkpoints/500

    ratio[t] = rms(what the first attention layer adds at t) / rms(embedding of the token at t)

over two rows of 512 tokens of a held-out State of the Union speech: the median, and the share of tokens with more than 1.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float, Int

from experiments import command
from experiments.table import markdown
from gatedattn import Transformer
from gatedattn.analysis.collect import rows_of
from gatedattn.data.sotu import speeches
from gatedattn.interop.models import load_model


def ratio(model: Transformer, tokens: Int[np.ndarray, "B T"]) -> Float[np.ndarray, "B T"]:
    def rms(x):
        return jnp.sqrt(jnp.mean(x.astype(jnp.float32) ** 2, -1))

    def probe(kind, **captured):
        return {name: rms(captured[name]) for name in ("start", "attention")} if kind == "block" else {}

    graph, params = nnx.split(model)
    look = jax.jit(lambda params, tokens: nnx.merge(graph, params).hidden(tokens, probe=probe)[1]["probe"])
    found = look(params, tokens)
    return np.asarray(found["attention"][0] / found["start"][0])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    text, lines = next(speeches(held_out=True))[3], []
    for run in parser.parse_args(argv).runs:
        model, tokenizer = load_model(run)
        found = ratio(model, rows_of(text, tokenizer, 2, min(512, model.config.max_seq_len)))
        lines.append([run.name, f"{np.median(found):.3g}", f"{(found > 1).mean():.0%}"])
    print(markdown(["run", "ratio", "of tokens above 1"], lines), end="")


if __name__ == "__main__":
    command.run(main)
