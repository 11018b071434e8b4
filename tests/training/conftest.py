import dataclasses

import numpy as np
import pytest

from gatedattn.config import MoEConfig, OptimizerConfig, RunConfig, TrainConfig, TransformerConfig


@pytest.fixture
def config():
    """A model small enough to compile in seconds."""
    return RunConfig(
        name="test",
        model=TransformerConfig(
            vocab_size=64, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, ffn_dim=48, gates="g1"
        ),
        train=TrainConfig(steps=20, batch_size=8, seq_len=16, loss_chunk=32, log_every=5),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=2),
    )


@pytest.fixture
def moe_config(config):
    moe = MoEConfig(num_experts=4, top_k=2, expert_dim=16)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, moe=moe))


@pytest.fixture
def batch():
    """Rows of two documents with a pattern to learn, and loss masks that differ widely between rows."""
    b, t = 8, 16
    tokens = (np.arange(t + 1) + 5 * np.arange(b)[:, None]) % 64
    return {
        "tokens": tokens[:, :-1].astype(np.int32),
        "targets": tokens[:, 1:].astype(np.int32),
        "loss_mask": np.arange(t) < np.array([16, 1, 3, 16, 0, 7, 2, 11])[:, None],
        "segment_ids": np.tile(np.where(np.arange(t) < 10, 1, 2).astype(np.int32), (b, 1)),
        "positions": np.tile(np.where(np.arange(t) < 10, np.arange(t), np.arange(t) - 10).astype(np.int32), (b, 1)),
    }


@pytest.fixture
def text_config(config, tmp_path):
    """Training on text files. With a constant rate the compiled step does not depend on train.steps: tests share it."""
    from gatedattn.config import CheckpointConfig, DataConfig, EvalConfig, ProbeConfig

    for i in range(4):
        (tmp_path / f"{i}.txt").write_text(f"The {i} gates open, and {i} sinks close. " * 20)
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, vocab_size=264),  # 257, and divisible
        optimizer=dataclasses.replace(config.optimizer, schedule="constant"),
        data=DataConfig(source=f"text:{tmp_path}/*.txt", tokenizer="bytes", cache_dir=str(tmp_path / "cache")),
        probe=ProbeConfig(every=10, rows=3),
        eval=EvalConfig(every=10, batches=2),
        checkpoint=CheckpointConfig(every=8),
    )
