"""The runs that are compiled for TPUs and for GPUs alike."""

import dataclasses

from gatedattn.config import RunConfig, TrainConfig, TransformerConfig, from_mapping

SMALL = RunConfig(
    name="small",
    model=TransformerConfig(
        vocab_size=2048, d_model=512, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=128, ffn_dim=1024, dtype="bfloat16",
        remat="full",
    ),
    train=TrainConfig(batch_size=32, seq_len=1024),
)  # fmt: skip


def recipe(module, args, **train) -> RunConfig:
    config = from_mapping(RunConfig, module.get_config(args).to_dict())
    return dataclasses.replace(config, train=dataclasses.replace(config.train, **train))
