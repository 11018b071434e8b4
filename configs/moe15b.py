"""The paper's 15B mixture of experts: Tables 1, 3 and 4, architecture of Table 7. Without arguments the baseline (15.58 B parameters).

python run.py --config=configs/moe15b.py:gate=g1 --workdir=DIR --config.data.source=... --config.data.tokenizer=FILE.json
python run.py --config=configs/moe15b.py:variant=value-headwise --mode=aot --topology=v5p-128

Every row: `variant=NAME` or its number, `variant=T1.5` (`python -m gatedattn variants`).

Data: the paper's is in-house. tfds:sotu stands in, so that the recipe runs anywhere; give your own with --config.data.source= and
its tokenizer with --config.data.tokenizer= (up to 151,936 ids).

Stated in the paper: architecture (24 layers, 128 experts of width 768, softmax top-8, no shared expert mentioned), QK-norm, untied
embeddings, 100k steps of 1024 sequences of 4096 tokens (419 B, "400B"), warm-up over 1000 steps to 2e-3, cosine to 3e-5, AdamW,
RoPE base 10,000, bfloat16, load-balancing over the global batch and a router z-loss. Not stated, chosen here: both losses' weights,
the renormalised top-8 (Qwen3-MoE) and AdamW's constants (gatedattn/config.py), recomputation of every block.
The paper's "2.54B activated" does not follow from its architecture table: a token passes through 1.99 B.

Hardware: a TPU pod slice or GPU cluster; parameters and optimiser state are sharded over all devices (fsdp), experts over
--config.mesh.expert=.
"""

from configs import base
from gatedattn import variants
from gatedattn.config import (
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    MeshConfig,
    OptimizerConfig,
    ProbeConfig,
    RunConfig,
    TrainConfig,
    parse_recipe_args,
)


def get_config(arg=None):
    args = parse_recipe_args(arg)
    config = RunConfig(
        name="moe15b",
        model=variants.ARCHITECTURES["moe15b"],
        data=DataConfig(source="tfds:sotu"),
        train=TrainConfig(steps=100_000, batch_size=1024, seq_len=4096, loss_chunk=1024),  # logits of 0.6 GB rather than 1.2
        optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=1000, end_learning_rate=3e-5),
        probe=ProbeConfig(every=500),
        eval=EvalConfig(every=1000, batches=4),
        checkpoint=CheckpointConfig(every=1000, keep=3),
        mesh=MeshConfig(fsdp=-1),
    )
    return base.finish(config, args)
