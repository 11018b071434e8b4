"""Bigram-Backcopy (arXiv 2410.13835): one layer, one head, and the attention sink of a language model in minutes.

Triggers copy the token before them; every other token follows a bigram table, so that for most queries attention has nothing to do.
The baseline parks it on BOS; the paper's G1 gate shuts instead, at the same loss.

python run.py --config=configs/backcopy.py --workdir=runs/backcopy                 the baseline: bos_share near 1
python run.py --config=configs/backcopy.py:gate=g1 --workdir=runs/backcopy-g1      the gate: bos_share near 0

Smaller than the original (there: sequence 256, width 256, batch 512, AdamW 3e-4 with betas .9 and .99, constant), with a FFN, and
at a ten times higher learning rate, so that it ends in minutes. Weight decay 1e-4 and the constant rate are the original's. The mean of
bos_share is over non-trigger queries: triggers must look at the token before.

Measured with these commands and seeds 0, 1, 2 (experiments/backcopy): attention on BOS 0.991 for the baseline and 0.067 with g1, held-out
loss 1.205 and 1.210. Hardware: 2 CPU threads of one core, 3.5 minutes a run.
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
        name="backcopy",
        model=TransformerConfig(
            vocab_size=65,  # 64 characters and BOS
            d_model=128,
            num_layers=1,
            num_heads=1,
            num_kv_heads=1,
            head_dim=128,
            ffn_dim=512,
            gates="none",
            qk_norm=False,
            position="learned",  # attention must find "one back", which a learned table gives at once
            max_seq_len=128,
            tie_embeddings=False,
        ),
        data=DataConfig(source="synthetic:backcopy"),
        train=TrainConfig(steps=1200, batch_size=32, seq_len=128),
        optimizer=OptimizerConfig(
            learning_rate=3e-3, schedule="constant", warmup_steps=0, b2=0.95, weight_decay=1e-4, clip_norm=1.0
        ),
        probe=ProbeConfig(every=100, rows=32),
        eval=EvalConfig(every=300, batches=16),
        checkpoint=CheckpointConfig(every=600),
    )
    return base.finish(config, args)
