"""Our training step and those of the peers, taking turns in one run.

python -m benchmarks.peers [--dtype=float32|bfloat16] [--systems=gatedattn,transformers,transformers-compiled] [--repeats=5]
                           [--steps=3] [--maxtext=PYTHON] [--out=benchmarks/results/peers-float32.json]

The work is that of `benchmarks.step`: the same shape, tokens per step, AdamW, clipping at 1, and precision (bfloat16: float32
parameters, autocast), with the elementwise gate on. The peer with this gate is transformers' Qwen3-Next with full attention in all
layers, eager or under torch.compile; it needs the `hf` extra. Each system is a process of its own which sleeps while another
runs; a repeat gives each its turn. The first repeat is left out. Ratios are ours over theirs of the same repeat.

`--maxtext` is the Python of an environment with MaxText, which wants other versions than ours (`pip install maxtext` on Python 3.12);
"maxtext" then joins the systems. It has no gate, some 3 % less work. Each turn is a run of its trainer on synthetic data, everything
else off, whose logged seconds of the last steps count.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import step as ours

SYSTEMS = ("gatedattn", "transformers", "transformers-compiled", "maxtext")


# --- a worker: says "ready" and what it is, then takes n steps for each line "n", and answers with their seconds ----------------


def gatedattn(dtype: str):
    import jax

    stepper = ours.Stepper(ours.reference(dtype))
    return stepper.run, {"version": f"jax {jax.__version__}", "compile_seconds": stepper.compile_seconds}


def transformers(dtype: str, compiled: bool = False):
    import torch
    import transformers as hf

    shape = ours.REFERENCE
    config = hf.Qwen3NextConfig(
        vocab_size=shape["vocab_size"],
        hidden_size=shape["d_model"],
        num_hidden_layers=shape["num_layers"],
        num_attention_heads=shape["num_heads"],
        num_key_value_heads=shape["num_kv_heads"],
        head_dim=shape["head_dim"],
        intermediate_size=shape["ffn_dim"],
        tie_word_embeddings=False,
        num_experts=0,
        layer_types=["full_attention"] * shape["num_layers"],
        partial_rotary_factor=1.0,
        use_cache=False,
    )
    model = hf.Qwen3NextForCausalLM(config).train()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    batch = {k: torch.tensor(v.copy(), dtype=torch.long) for k, v in ours.random_batch(ours.reference()).items()}
    forward = torch.compile(model) if compiled else model

    def run(n: int) -> float:
        began = time.perf_counter()
        for _ in range(n):
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
                logits = forward(input_ids=batch["tokens"], position_ids=batch["positions"]).logits
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch["targets"].flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        loss.item()
        return time.perf_counter() - began

    return run, {
        "version": f"transformers {hf.__version__}, torch {torch.__version__}",
        "params": sum(p.numel() for p in parameters),
    }


def work(system: str, dtype: str) -> None:
    began = time.perf_counter()
    run, about = gatedattn(dtype) if system == "gatedattn" else transformers(dtype, compiled=system == "transformers-compiled")
    first = run(1)
    about |= {"ready_seconds": time.perf_counter() - began, "first_step_seconds": first}
    print(json.dumps(about), flush=True)
    for line in sys.stdin:
        print(run(int(line)), flush=True)


# --- the comparison ------------------------------------------------------------------------------------------------------------


class Worker:
    def __init__(self, system: str, dtype: str):
        command = [sys.executable, "-m", "benchmarks.peers", f"--worker={system}", f"--dtype={dtype}"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.about = json.loads(self._answer())

    def run(self, n: int) -> float:
        self.process.stdin.write(f"{n}\n")
        self.process.stdin.flush()
        return float(self._answer())

    def _answer(self) -> str:
        if line := self.process.stdout.readline():
            return line
        raise SystemExit(f"{' '.join(self.process.args)} ended with code {self.process.wait()}")

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


class MaxText:
    """MaxText's trainer takes no step at a time: every turn is a run of its own."""

    def __init__(self, python: Path, dtype: str):
        shape, self.folder = ours.REFERENCE, tempfile.TemporaryDirectory()
        self.environment = os.environ | {"JAX_PLATFORMS": "cpu"}
        self.command = [python, "-m", "maxtext.trainers.pre_train.train"] + [
            f"{name}={value}"
            for name, value in dict(
                model_name="qwen3-0.6b",  # for QK-norm; what follows replaces its sizes
                override_model_config=True,
                base_emb_dim=shape["d_model"],
                base_num_decoder_layers=shape["num_layers"],
                base_num_query_heads=shape["num_heads"],
                base_num_kv_heads=shape["num_kv_heads"],
                head_dim=shape["head_dim"],
                base_mlp_dim=shape["ffn_dim"],
                vocab_size=shape["vocab_size"],
                logits_via_embedding=False,
                dtype=dtype,
                weight_dtype="float32",
                remat_policy="minimal",
                per_device_batch_size=ours.BATCH,
                max_target_length=ours.LENGTH,
                dataset_type="synthetic",
                hardware="cpu",
                skip_jax_distributed_system=True,
                attention="dot_product",
                gradient_clipping_threshold=1.0,
                enable_checkpointing=False,
                base_output_directory=self.folder.name,
                run_name="peer",
            ).items()
        ]
        asked = [python, "-c", "import maxtext, jax, importlib.metadata as m; print(m.version('maxtext'), m.version('jax'))"]
        versions = subprocess.run(asked, capture_output=True, text=True, check=True, env=self.environment).stdout.split()
        self.about = {"version": f"maxtext {versions[-2]}, jax {versions[-1]}"}

    def run(self, n: int) -> float:
        done = subprocess.run([*self.command, f"steps={n + 2}"], capture_output=True, text=True, env=self.environment)
        seconds = [float(s) for s in re.findall(r"completed step: \d+, seconds: ([\d.]+)", done.stdout + done.stderr)]
        if len(seconds) < n + 2:
            raise SystemExit(f"MaxText took {len(seconds)} of {n + 2} steps:\n{done.stderr[-2000:]}")
        return sum(seconds[2:])  # the first two compile, and wait for it

    def close(self) -> None:
        self.folder.cleanup()


def compare(systems: list[str], dtype: str, repeats: int, n: int, maxtext: Path | None = None) -> dict:
    tokens = ours.BATCH * ours.LENGTH * n
    workers, rates = {}, {system: [] for system in systems}
    load = os.getloadavg()[0]
    for system in systems:
        print(f"{system}: starting", file=sys.stderr, flush=True)
        workers[system] = MaxText(maxtext, dtype) if system == "maxtext" else Worker(system, dtype)
    for repeat in range(repeats + 1):
        for system, worker in workers.items():
            seconds = worker.run(n)
            if repeat:
                rates[system].append(tokens / seconds)
                print(f"repeat {repeat}, {system}: {tokens / seconds:,.0f} tokens/s", file=sys.stderr, flush=True)
    for worker in workers.values():
        worker.close()
    result = {"dtype": dtype, "cpus": os.cpu_count(), "load_before": load, "systems": {}}
    for system in systems:
        ratios = [a / b for a, b in zip(rates["gatedattn"], rates[system], strict=True)] if "gatedattn" in rates else [1.0]
        result["systems"][system] = workers[system].about | {
            "tok_s": statistics.median(rates[system]),
            "tok_s_all": rates[system],
            "ours_over_this": statistics.median(ratios),
            "ours_over_this_range": [min(ratios), max(ratios)],
        }
    return result


def table(result: dict) -> str:
    lines = [f"| {result['dtype']} | tokens/s | ours over this | range | first step after s | |\n", "| --- " * 6 + "|\n"]
    for system, row in result["systems"].items():
        low, high = row["ours_over_this_range"]
        ready = f"{row['ready_seconds']:.0f}" if "ready_seconds" in row else "-"
        lines.append(
            f"| {system} | {row['tok_s']:,.0f} | {row['ours_over_this']:.2f} | {low:.2f} to {high:.2f} | {ready} | {row['version']} |\n"
        )
    return "".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--systems", help=f"of {', '.join(SYSTEMS)}; by default all that can be")
    parser.add_argument("--maxtext", type=Path, help="the Python of an environment with MaxText")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path, help="keep the result as JSON")
    parser.add_argument("--worker", choices=SYSTEMS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return work(args.worker, args.dtype)
    systems = args.systems.split(",") if args.systems else [s for s in SYSTEMS if s != "maxtext" or args.maxtext]
    if unknown := set(systems) - set(SYSTEMS):
        parser.error(f"--systems={','.join(sorted(unknown))}: must be among {', '.join(SYSTEMS)}")
    if "maxtext" in systems and not args.maxtext:
        parser.error("the system maxtext needs --maxtext=PYTHON")
    result = compare(systems, args.dtype, args.repeats, args.steps, args.maxtext)
    print(table(result))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
