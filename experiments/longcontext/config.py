"""A small model that looks for needles in speeches (experiments/longcontext/needles.py): trained at 128 tokens, read at more.

python -m experiments.longcontext.needles --out=runs/longcontext/text
python run.py --config=experiments/longcontext/config.py:gate=none --config.train.seed=0 --workdir=runs/longcontext/none-0

Hardware: 2 CPU threads of one core, four minutes a run.
"""

from configs import base
from gatedattn.config import (
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    OptimizerConfig,
    ProbeConfig,
    RunConfig,
    TrainConfig,
    TransformerConfig,
    parse_recipe_args,
)


def get_config(arg=None):
    args = parse_recipe_args(arg)
    config = RunConfig(
        name="longcontext",
        model=TransformerConfig(
            vocab_size=1024, d_model=128, num_layers=3, num_heads=4, num_kv_heads=4, head_dim=32, ffn_dim=256, gates="none"
        ),
        data=DataConfig(source="text:runs/longcontext/text/*.txt", tokenizer="bpe:1024", bos="row"),
        train=TrainConfig(steps=800, batch_size=16, seq_len=128),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=100, end_learning_rate=3e-4),
        probe=ProbeConfig(every=200, rows=32),
        eval=EvalConfig(every=400, batches=16),
        checkpoint=CheckpointConfig(every=800),
    )
    return base.finish(config, args)
