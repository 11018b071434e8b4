"""Memory of a training step against sequence length, from XLA's own analysis of the compiled program.

python -m benchmarks.memory [--lengths=512,1024,2048,4096] [--kernel=chunked] [--json]

One row per length: bytes of temporaries of the step (activations kept for the backward pass, scratch) and of its arguments
(parameters, optimiser state, batch). The batch is one row, so that T alone grows. `growth` is the ratio to the row before; the
chunked attention path must not exceed 2 when T doubles, the dense reference tends to 4.
"""

import argparse
import dataclasses
import json

import jax
import jax.numpy as jnp

from configs import tiny
from gatedattn.config import RunConfig, from_mapping
from gatedattn.training import step


def measure(config: RunConfig, length: int) -> dict:
    """Compile the training step of one row of `length` tokens and ask XLA what it holds. Nothing is run."""
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, max_seq_len=max(length, config.model.max_seq_len)),
        train=dataclasses.replace(config.train, batch_size=1, seq_len=length, microbatches=1),
    )
    state = jax.eval_shape(step.make_init(config))
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32)
    batch = {name: ids for name in ("tokens", "targets", "segment_ids", "positions")} | {
        "loss_mask": jax.ShapeDtypeStruct((1, length), jnp.bool_)
    }
    compiled = jax.jit(step.make_train_step(config), donate_argnums=0).lower(state, batch).compile()
    analysis = compiled.memory_analysis()
    return {"T": length, "temp_bytes": analysis.temp_size_in_bytes, "argument_bytes": analysis.argument_size_in_bytes}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="512,1024,2048,4096")
    parser.add_argument("--kernel", default="chunked")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    config = from_mapping(RunConfig, tiny.get_config().to_dict())
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, kernel=args.kernel))
    rows = [measure(config, int(length)) for length in args.lengths.split(",")]
    for before, row in zip([None, *rows], rows, strict=False):
        row["growth"] = row["temp_bytes"] / before["temp_bytes"] if before else None
    if args.json:
        print(json.dumps(rows))
        return
    print(f"{'T':>6} {'temporaries':>12} {'arguments':>10} {'growth':>7}   ({args.kernel} attention, batch of one row)")
    for row in rows:
        growth = f"{row['growth']:.2f}" if row["growth"] else ""
        print(f"{row['T']:>6} {row['temp_bytes'] / 1e6:>9.1f} MB {row['argument_bytes'] / 1e6:>7.1f} MB {growth:>7}")


if __name__ == "__main__":
    main()
