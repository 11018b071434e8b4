"""The paper's 1.7B dense models: Table 2, architectures of Table 7.

Without arguments the 28-layer baseline of row 1 (1.72 B parameters, 400 B tokens); `layers=48` is the deep one (1.71 B).

    layers=28|48     28 (d 2048, FFN 6144: the shape of Qwen3-1.7B) or 48 (d 1536, FFN 4608)
    tokens=400B|1T|3.5T   the paper's budget, which sets batch, peak learning rate and steps: 28 layers with 400B or 3.5T, 48 with
                     400B or 1T
    gate=SPEC        adds the gate; with `narrow` the FFN pays for it, as in the paper's gated rows
    variant=T2.8     a whole row (or its name, `python -m gatedattn variants`): layers, tokens, learning rate, gate, narrowed FFN

python run.py --config=configs/dense1b7.py:variant=T2.2 --workdir=DIR --config.data.source=... --config.data.tokenizer=FILE.json
python run.py --config=configs/dense1b7.py:gate=g1,narrow,layers=48 --mode=aot --topology=v5p-128

Data: the paper's is in-house. tfds:sotu stands in, so that the recipe runs anywhere; give your own with --config.data.source= and
its tokenizer with --config.data.tokenizer= (up to 151,936 ids).

Stated in the paper: architecture, QK-norm, tied embeddings, sequence length 4096, RoPE base 10,000, batch, peak learning rate,
tokens, AdamW, bfloat16. Not stated, chosen here: warm-up over 1000 steps and a cosine to 3e-5 (both as the paper states for its MoE),
AdamW's constants (gatedattn/config.py), recomputation of every block.

Hardware: a TPU pod slice or GPU cluster; parameters and optimiser state are sharded over all devices.
"""

from configs import base
from gatedattn import variants
from gatedattn.config import (
    CheckpointConfig,
    ConfigError,
    DataConfig,
    EvalConfig,
    MeshConfig,
    OptimizerConfig,
    ProbeConfig,
    RunConfig,
    TrainConfig,
    parse_recipe_args,
)

SEQ_LEN = 4096
TOKENS = {"400B": 400e9, "1T": 1e12, "3.5T": 3.5e12}


def get_config(arg=None):
    args = parse_recipe_args(arg, layers=0, tokens="", narrow=False)
    row, schedule = paper_row(args)
    config = RunConfig(
        name="dense1b7",
        model=variants.ARCHITECTURES[row],
        data=DataConfig(source="tfds:sotu"),
        train=TrainConfig(
            steps=round(TOKENS[schedule.tokens] / (schedule.batch_size * SEQ_LEN)),
            batch_size=schedule.batch_size,
            seq_len=SEQ_LEN,
            loss_chunk=1024,  # float32 logits of 151,936 words: 0.6 GB rather than 1.2
        ),
        optimizer=OptimizerConfig(learning_rate=schedule.learning_rate, warmup_steps=1000, end_learning_rate=3e-5),
        probe=ProbeConfig(every=500),
        eval=EvalConfig(every=1000, batches=4),
        checkpoint=CheckpointConfig(every=1000, keep=3),
        mesh=MeshConfig(fsdp=-1),
    )
    return base.finish(config, args, narrow=args.narrow)


def paper_row(args) -> tuple[str, variants.Schedule]:
    """The architecture and the training set-up: those of `variant=` if it is a row of Table 2, else of the ungated row with these
    layers and tokens (the first one, where the paper tried two learning rates)."""
    variant = variants.get(args.variant) if args.variant else None
    if variant and variant.schedule:
        own = {"layers": int(variant.base.rpartition("-")[2]), "tokens": variant.schedule.tokens}
        for name, value in own.items():
            if getattr(args, name) not in (value, type(value)()):
                raise ConfigError(f"variant={args.variant} has {name}={value}: leave out {name}={getattr(args, name)}")
        return variant.base, variant.schedule
    row = f"dense1b7-{args.layers or 28}"
    known = [v for v in variants.VARIANTS.values() if v.schedule]
    if row not in {v.base for v in known}:
        raise ConfigError(f"layers={args.layers}: must be 28 or 48")
    schedules = {v.schedule.tokens: v.schedule for v in reversed(known) if v.base == row}
    tokens = args.tokens or "400B"
    if tokens not in schedules:
        raise ConfigError(f"tokens={tokens}: with {row[9:]} layers the paper has {' and '.join(sorted(schedules))}")
    return row, schedules[tokens]
