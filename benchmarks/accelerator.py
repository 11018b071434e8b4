"""What gated attention costs on one accelerator, in about six minutes.

python benchmarks/accelerator.py                     one GPU or TPU; prints JSON, progress on stderr
python benchmarks/accelerator.py --toy               the same path at a size for a CPU
python benchmarks/accelerator.py --sections=attention,moe --seconds=200 --out=FILE.json

Needs jax, flax, optax and numpy, and nothing else. Sections, in this order; when the time is up, what is left is named in `skipped`:

    step        the paper's 1.7B model (28 layers, random weights), AdamW and float32 parameters, bfloat16 compute, every block
                recomputed: without a gate, with g1, with g1:headwise. `gate_overhead` is a step's time over the baseline's, less 1.
    probe       the probe step that records bos_share and gate sparsity, and its share of a run at the recipe's probe.every
    attention   each kernel of `gatedattn.kernels` that this platform has, on packed documents: forward, and forward and backward
    moe         one block of the paper's 15B model (128 experts of width 768, top 8), forward and backward

Times are medians over repeats of several steps, the host waiting only at the end of each repeat; the first two steps are left out.
mfu: model FLOPs (6 per parameter and token and attention, causal attention counted half, recomputation not counted) per second over
the device's peak dense bfloat16 rate; null for a device whose peak we do not know.
"""

import argparse
import dataclasses
import importlib.util
import json
import statistics
import sys
import time
import types
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the package need not be installed

if importlib.util.find_spec("jaxtyping") is None:  # shapes in annotations: nothing here is computed from them

    class _Anything:
        def __class_getitem__(cls, _):
            return cls

    stub = types.ModuleType("jaxtyping")
    stub.__getattr__ = lambda name: _Anything
    sys.modules["jaxtyping"] = stub
    print("jaxtyping is not installed: annotations are ignored", file=sys.stderr)

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from gatedattn import kernels, probes, transformer, variants
from gatedattn.config import OptimizerConfig, RunConfig, TrainConfig
from gatedattn.layers import MoE
from gatedattn.training import step as steps
from gatedattn.training.hardware import peak_flops

PROBE_EVERY = 500  # of configs/dense1b7.py and configs/moe15b.py
TOY = dict(d_model=64, head_dim=16, num_layers=2, vocab_size=512, ffn_dim=128, remat="full")


@dataclasses.dataclass(frozen=True)
class Size:
    """How much work a section does: sequences of T tokens in a step, steps in a repeat, repeats."""

    batch: int
    seq_len: int
    steps: int
    repeats: int


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def seconds_each(call, size: Size) -> float:
    """Median seconds of one `call()`, whose results are waited for once per repeat."""
    for _ in range(2):
        jax.block_until_ready(call())
    times = []
    for _ in range(size.repeats):
        began = time.perf_counter()
        for _ in range(size.steps):
            last = call()
        jax.block_until_ready(last)
        times.append((time.perf_counter() - began) / size.steps)
    return statistics.median(times)


def compiled(function, *arguments, **options):
    """The program, the seconds that its compilation took, and the bytes of its temporaries."""
    began = time.perf_counter()
    program = jax.jit(function, **options).lower(*arguments).compile()
    analysis = program.memory_analysis()
    return program, {
        "compile_seconds": round(time.perf_counter() - began, 1),
        "temp_bytes": getattr(analysis, "temp_size_in_bytes", None),
    }


def documents(size: Size, vocab: int) -> dict:
    """Random tokens in rows of four packed documents."""
    rng = np.random.default_rng(0)
    shape = (size.batch, size.seq_len)
    quarter = -(-size.seq_len // 4)
    at = np.arange(size.seq_len)
    batch = {
        "tokens": rng.integers(1, vocab, shape),
        "targets": rng.integers(1, vocab, shape),
        "segment_ids": np.broadcast_to(1 + at // quarter, shape),
        "positions": np.broadcast_to(at % quarter, shape),
    }
    return {k: jnp.asarray(v, jnp.int32) for k, v in batch.items()} | {"loss_mask": jnp.ones(shape, bool)}


def run_config(toy: bool, gates: str, size: Size) -> RunConfig:
    model = dataclasses.replace(variants.ARCHITECTURES["dense1b7-28"], gates=gates, **TOY if toy else {})
    train = TrainConfig(steps=1000, batch_size=size.batch, seq_len=size.seq_len, loss_chunk=min(2048, size.seq_len))
    return RunConfig(model=model, train=train, optimizer=OptimizerConfig(warmup_steps=10))


def mfu(flops: float, seconds: float) -> float | None:
    peak = peak_flops(jax.devices()[0].device_kind)
    return round(flops / seconds / peak, 4) if peak else None


def measure_steps(toy: bool, size: Size, with_probe: bool) -> tuple[list[dict], dict]:
    """Section step, and on its gated model section probe."""
    rows, probe = [], {}
    for gates in ("none", "g1", "g1:headwise"):
        config = run_config(toy, gates, size)
        say(f"step, gates {gates}: compiling")
        state = steps.initialize(config)
        batch = documents(size, config.model.vocab_size)
        program, about = compiled(steps.make_train_step(config), state, batch, donate_argnums=0)

        def advance():
            nonlocal state
            state, metrics = program(state, batch)
            return metrics

        seconds, tokens = seconds_each(advance, size), size.batch * size.seq_len
        flops = transformer.flops_per_token(config.model, size.seq_len) * tokens
        rows.append(
            {"gates": gates, "params": transformer.count(config.model)["params_total"], "seconds": seconds}
            | {"tokens_per_second": tokens / seconds, "mfu": mfu(flops, seconds), "loss": float(advance()["loss"])}
            | about
        )
        rows[-1]["gate_overhead"] = seconds / rows[0]["seconds"] - 1
        say(f"  {tokens / seconds:,.0f} tokens/s, mfu {rows[-1]['mfu']}, overhead {rows[-1]['gate_overhead']:+.2%}")
        if gates == "g1" and with_probe:
            say("probe: compiling")
            graphdef = steps.graph(config.model)

            def look(params, batch):
                model = nnx.merge(graphdef, params)
                return probes.measure(model, batch["tokens"], batch["positions"], batch["segment_ids"])

            program, about = compiled(look, state.params, batch)
            found = seconds_each(lambda: program(state.params, batch), size)
            probe = {"seconds": found, "rows": size.batch, "share_of_run": found / (found + PROBE_EVERY * seconds)} | about
            say(f"  {found:.3f} s, {probe['share_of_run']:.3%} of a run that probes every {PROBE_EVERY} steps")
        del state, program
    return rows, probe


def measure_attention(toy: bool, size: Size) -> list[dict]:
    config = run_config(toy, "none", size).model
    N, K, H = config.num_heads, config.num_kv_heads, config.head_dim
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (
        jax.random.normal(key, (size.batch, size.seq_len, heads, H), jnp.bfloat16)
        for key, heads in zip(keys, (N, K, K), strict=True)
    )
    segments = documents(size, 2)["segment_ids"]
    # A causal query sees half the row on average; within a document of a quarter row, an eighth.
    work = {"causal": 2 * size.batch * N * H * size.seq_len**2, "packed": 2 * size.batch * N * H * size.seq_len**2 / 4}
    rows = []
    for name in kernels.CAPABILITIES:
        for case, ids in (("causal", None), ("packed", segments)):
            say(f"attention, {name}, {case}")
            row = {"kernel": name, "case": case}
            try:
                call = kernels.resolve(name) and (lambda q, k, v: kernels.attention(q, k, v, segment_ids=ids, kernel=name)[0])
                forward, about = compiled(call, q, k, v)
                both, more = compiled(jax.grad(lambda *a: call(*a).astype(jnp.float32).sum(), (0, 1, 2)), q, k, v)
                row |= {"forward_seconds": seconds_each(lambda: forward(q, k, v), size), "forward": about}
                row |= {"forward_backward_seconds": seconds_each(lambda: both(q, k, v), size), "forward_backward": more}
                row |= {"forward_mfu": mfu(work[case], row["forward_seconds"])}
            except Exception as error:  # one that this platform lacks must not cost the others their figures
                row |= {"refused": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
            rows.append(row)
    return rows


def measure_moe(toy: bool, size: Size) -> dict:
    config = variants.ARCHITECTURES["moe15b"]
    moe = dataclasses.replace(config.moe, num_experts=8, top_k=2, expert_dim=32) if toy else config.moe
    D = 64 if toy else config.d_model
    say("moe: compiling")
    layer = jax.jit(lambda: nnx.split(MoE(D, moe, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))[1])()
    graphdef = nnx.split(nnx.eval_shape(lambda: MoE(D, moe, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))))[0]
    x = jax.random.normal(jax.random.key(1), (size.batch, size.seq_len, D), jnp.bfloat16)

    def loss(params, x):
        y, aux = nnx.merge(graphdef, params)(x)
        return y.astype(jnp.float32).sum() + aux["load_balance"]

    program, about = compiled(jax.grad(loss, (0, 1)), layer, x)
    seconds, tokens = seconds_each(lambda: program(layer, x), size), size.batch * size.seq_len
    flops = 18 * tokens * moe.top_k * D * moe.expert_dim  # three matrices, 2 FLOPs, forward and twice that backward
    row = {"tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds, "mfu": mfu(flops, seconds)}
    say(f"  {row['tokens_per_second']:,.0f} tokens/s, mfu {row['mfu']}")
    return row | about


def main(argv=None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="sizes for a CPU")
    parser.add_argument("--sections", default="step,probe,attention,moe")
    parser.add_argument("--seconds", type=float, default=330, help="begin no section after this time")
    parser.add_argument("--batch", type=int, help="sequences in a step (4; toy 2)")
    parser.add_argument("--out", help="also write the JSON to this file")
    args = parser.parse_args(argv)
    size = Size(args.batch or 2, 64, 1, 2) if args.toy else Size(args.batch or 4, 4096, 5, 3)
    wanted, began = args.sections.split(","), time.perf_counter()
    if unknown := set(wanted) - {"step", "probe", "attention", "moe"}:
        parser.error(f"--sections={','.join(unknown)}: must be among step, probe, attention, moe")

    device = jax.devices()[0]
    result = {"device": device.device_kind, "platform": device.platform, "jax": jax.__version__, "toy": args.toy}
    result |= {"batch": size.batch, "seq_len": size.seq_len, "kernel": kernels.resolve("auto"), "skipped": []}

    def keep() -> None:  # after each section: what is measured is not lost if the next one fails
        result["wall_seconds"] = round(time.perf_counter() - began, 1)
        if args.out:
            Path(args.out).write_text(json.dumps(result, indent=1) + "\n")

    sections = {
        "step": lambda: dict(zip(("step", "probe"), measure_steps(args.toy, size, "probe" in wanted), strict=True)),
        "attention": lambda: {"attention": measure_attention(args.toy, size)},
        "moe": lambda: {"moe": measure_moe(args.toy, size)},
    }
    for name, section in sections.items():
        if name in wanted and time.perf_counter() - began < args.seconds:
            result |= section()
        elif name in wanted:
            result["skipped"].append(name)
        keep()
    print(json.dumps(result, indent=1))
    return result


if __name__ == "__main__":
    main()
