"""Our training step alone, on the work that all peers are given.

python -m benchmarks.step [--dtype=float32|bfloat16] [--gates=g1] [--repeats=5] [--steps=3] [--json]

The work: d 384, 6 layers, 6 query and 2 KV heads of 64, FFN 1024, vocabulary 8192, untied, 8 x 512 tokens, QK-norm, RoPE, gate g1;
AdamW, clipped at 1, float32 parameters. The very step that `run.py` compiles, on random tokens; the host waits at the end of each
repeat, and reads the loss as training does. The first repeat is left out. `tok_s` is the median.
"""

import argparse
import json
import os
import statistics
import time

import jax
import numpy as np

from gatedattn import TransformerConfig, transformer
from gatedattn.config import OptimizerConfig, RunConfig, TrainConfig
from gatedattn.training import step as steps

REFERENCE = dict(
    vocab_size=8192, d_model=384, num_layers=6, num_heads=6, num_kv_heads=2, head_dim=64, ffn_dim=1024, tie_embeddings=False
)  # fmt: skip
BATCH, LENGTH = 8, 512


def reference(dtype: str = "float32", gates: str = "g1", **changes) -> RunConfig:
    model = TransformerConfig(**REFERENCE | {"gates": gates, "dtype": dtype} | changes)
    train = TrainConfig(steps=1000, batch_size=BATCH, seq_len=LENGTH)
    return RunConfig(model=model, train=train, optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=10, clip_norm=1.0))


def random_batch(config: RunConfig) -> dict[str, np.ndarray]:
    """One document a row."""
    shape = (config.train.batch_size, config.train.seq_len)
    tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, (shape[0], shape[1] + 1), np.int32)
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "loss_mask": np.ones(shape, bool),
        "segment_ids": np.ones(shape, np.int32),
        "positions": np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape),
    }


class Stepper:
    """`run(n)` takes n steps and returns their seconds; what compilation took is in `compile_seconds`."""

    def __init__(self, config: RunConfig):
        self.tokens = config.tokens_per_step
        self.state = jax.block_until_ready(steps.initialize(config))  # else compilation is timed beside it
        self.batch = jax.device_put(random_batch(config))
        began = time.perf_counter()
        self.program = jax.jit(steps.make_train_step(config), donate_argnums=0).lower(self.state, self.batch).compile()
        self.compile_seconds = time.perf_counter() - began

    def run(self, n: int) -> float:
        began = time.perf_counter()
        for _ in range(n):
            self.state, metrics = self.program(self.state, self.batch)
        self.loss = float(metrics["loss"])
        return time.perf_counter() - began


def measure(config: RunConfig, repeats: int, n: int) -> dict:
    stepper = Stepper(config)
    cpu, rates = time.process_time(), []
    for repeat in range(repeats + 1):
        seconds = stepper.run(n)
        if repeat:
            rates.append(n * stepper.tokens / seconds)
        else:
            cpu = time.process_time()
    cpu = time.process_time() - cpu
    return {
        "tok_s": statistics.median(rates),
        "tok_s_all": rates,
        "tok_cpu_s": repeats * n * stepper.tokens / cpu,  # tells something on a busy machine too
        "flops_per_token": transformer.flops_per_token(config.model, config.train.seq_len),
        "compile_seconds": stepper.compile_seconds,
        "loss": stepper.loss,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--gates", default="g1")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="steps in a repeat")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    about = {"dtype": args.dtype, "gates": args.gates, "cpus": os.cpu_count(), "load_before": os.getloadavg()[0]}
    result = measure(reference(args.dtype, args.gates), args.repeats, args.steps) | about
    if args.json:
        print(json.dumps(result))
        return
    spread = f"{min(result['tok_s_all']):,.0f} to {max(result['tok_s_all']):,.0f}"
    print(f"{args.dtype}, gates {args.gates}: {result['tok_s']:,.0f} tokens/s ({spread}), {result['tok_cpu_s']:,.0f} per CPU second, "
          f"compiled in {result['compile_seconds']:.1f} s")  # fmt: skip


if __name__ == "__main__":
    main()
