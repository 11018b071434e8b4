"""Tokens per second of generation, beside transformers if it is installed.

python benchmarks/decode.py                      SmolLM2-135M's shape with random weights, batch 1 and 8, float32, as a table
python benchmarks/decode.py --json --batch=1,8 --prompt=64 --new=64 --repeats=5

Both systems generate greedily with a cache, with weights of the same shapes, in the same process, taking turns in each repeat;
the medians are reported. Compilation and the first run of each are left out. `--only=gatedattn` leaves the peer out.
"""

import argparse
import json
import os
import statistics
import sys
import time

import jax
import numpy as np
from flax import nnx

from gatedattn import Transformer, TransformerConfig
from gatedattn.config import RopeConfig
from gatedattn.inference import Generator

SHAPE = dict(
    vocab_size=49_152,
    d_model=576,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    ffn_dim=1536,
    gates="none",
    qk_norm=False,
    rope=RopeConfig(theta=100_000.0),
    norm_eps=1e-5,
)


def ours(gates: str, dtype: str):
    config = TransformerConfig(**SHAPE | {"gates": gates, "dtype": dtype})
    graphdef, shapes = nnx.split(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: jax.numpy.asarray(0.02 * rng.standard_normal(x.shape, np.float32)), shapes)
    generator = Generator(nnx.merge(graphdef, params))

    def run(prompts: np.ndarray, new: int) -> int:
        return sum(piece.shape[1] for piece in generator.stream(prompts.tolist(), max_tokens=new))

    return run


def peer(dtype: str):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=SHAPE["vocab_size"],
        hidden_size=SHAPE["d_model"],
        num_hidden_layers=SHAPE["num_layers"],
        num_attention_heads=SHAPE["num_heads"],
        num_key_value_heads=SHAPE["num_kv_heads"],
        intermediate_size=SHAPE["ffn_dim"],
        tie_word_embeddings=True,
        max_position_embeddings=8192,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).to(getattr(torch, dtype)).eval()

    def run(prompts: np.ndarray, new: int) -> int:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False
            )
        return out.shape[1] - ids.shape[1]

    return run


def measure(systems: dict, batch: int, prompt: int, new: int, repeats: int) -> tuple[dict, dict]:
    """Seconds, and seconds of processor time over all threads, of each repeat. The systems take turns, so that what else the
    machine does hits them alike. On a busy machine, only processor time on one thread (taskset -c 0) tells something."""
    rng = np.random.default_rng(0)
    seconds, cpu_seconds = ({name: [] for name in systems} for _ in range(2))
    for repeat in range(repeats + 1):
        prompts = rng.integers(1, SHAPE["vocab_size"], (batch, prompt))
        for name, run in systems.items():
            began, cpu_began = time.perf_counter(), time.process_time()
            made = run(prompts, new)
            assert made == new, f"{name} made {made} tokens instead of {new}"
            if repeat:
                seconds[name].append(time.perf_counter() - began)
                cpu_seconds[name].append(time.process_time() - cpu_began)
    return seconds, cpu_seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", default="1,8", help="batch sizes, comma-separated")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of the prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens to generate")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--gates", default="none", help="gates of our model; the peer has none")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--only", choices=["gatedattn", "transformers"], help="measure one system alone")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()

    systems = {}
    if args.only != "transformers":
        systems["gatedattn"] = ours(args.gates, args.dtype)
    if args.only != "gatedattn":
        try:
            systems["transformers"] = peer(args.dtype)
        except ImportError as error:
            print(f"without transformers: {error}", file=sys.stderr)

    results = []
    for batch in map(int, args.batch.split(",")):
        load = os.getloadavg()[0]
        seconds, cpu_seconds = measure(systems, batch, args.prompt, args.new, args.repeats)
        rates, cpu_rates = (
            {name: batch * args.new / statistics.median(times) for name, times in kind.items()}
            for kind in (seconds, cpu_seconds)
        )
        result = {"batch": batch, "tokens_per_second": rates, "tokens_per_cpu_second": cpu_rates, "load_before": load}
        result |= {"seconds": seconds, "cpu_seconds": cpu_seconds}
        if len(rates) == 2:
            result["ratio"] = rates["gatedattn"] / rates["transformers"]
            result["cpu_ratio"] = cpu_rates["gatedattn"] / cpu_rates["transformers"]
        results.append(result)
        if not args.json:
            told = ", ".join(f"{name} {rate:.1f} tokens/s ({cpu_rates[name]:.1f} per CPU s)" for name, rate in rates.items())
            compared = f", ratio {result['ratio']:.2f} (CPU time: {result['cpu_ratio']:.2f})" if len(rates) == 2 else ""
            print(f"batch {batch}, load {load:.1f}: {told}{compared}", flush=True)
    if args.json:
        about = {
            "prompt": args.prompt,
            "new": args.new,
            "dtype": args.dtype,
            "gates": args.gates,
            "cpus": os.cpu_count(),
            "device": jax.devices()[0].device_kind,
        }
        print(json.dumps(about | {"results": results}, indent=1))


if __name__ == "__main__":
    main()
