"""The paper's continuation to 32k tokens (section 4.4): a trained 1.7B dense model, RoPE base 10,000 -> 1,000,000, 80 B tokens more.

    layers= tokens= gate= narrow variant=     which model goes on: as in configs/dense1b7.py, which trained it. It is looked for where
                     that recipe leaves it by default; elsewhere with --config.train.init_from=MODEL

python run.py --config=configs/extend32k.py:variant=T2.8 --workdir=DIR --config.train.init_from=RUN --config.data.source=... \\
    --config.data.tokenizer=FILE.json
python run.py --config=configs/extend32k.py:gate=g1 --mode=aot --topology=v5p-128
python -m gatedattn ruler DIR --rope=yarn,factor=4 --lengths=4096,8192,16384,32768,65536,131072       Table 5's last rows

Stated in the paper: base, tokens, length; afterwards YaRN to 128k without training. Not stated, chosen here: as many tokens a step as
before (an eighth of the sequences), and the learning rate that the training before ended with, constant (as DeepSeek-V3's extension,
arXiv 2412.19437, has it); AdamW starts anew, over 100 steps.

Hardware: a TPU pod slice or GPU cluster. Each sequence is spread over `mesh.context` = 4 devices, the parameters over the others.
"""

import dataclasses

from configs import base, dense1b7
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

SEQ_LEN = 32768
TOKENS = 80e9


def get_config(arg=None):
    args = parse_recipe_args(arg, layers=0, tokens="", narrow=False)
    row, schedule = dense1b7.paper_row(args)
    model = variants.ARCHITECTURES[row]
    batch_size = schedule.batch_size * dense1b7.SEQ_LEN // SEQ_LEN
    before = "-".join(filter(None, ("dense1b7", args.variant, args.gate)))
    config = RunConfig(
        name="extend32k",
        model=dataclasses.replace(model, max_seq_len=SEQ_LEN, rope=dataclasses.replace(model.rope, theta=1e6)),
        data=DataConfig(source="tfds:sotu"),
        train=TrainConfig(
            steps=round(TOKENS / (batch_size * SEQ_LEN)),
            batch_size=batch_size,
            seq_len=SEQ_LEN,
            loss_chunk=1024,
            init_from="" if args.smoke else f"runs/{before}",
        ),
        optimizer=OptimizerConfig(schedule="constant", learning_rate=3e-5, end_learning_rate=3e-5, warmup_steps=100),
        probe=ProbeConfig(every=500, rows=2),
        eval=EvalConfig(every=1000, batches=4),
        checkpoint=CheckpointConfig(every=500, keep=3),
        mesh=MeshConfig(fsdp=-1, context=1 if args.smoke else 4),
    )
    return base.finish(config, args, narrow=args.narrow)
