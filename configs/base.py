"""The defaults of gatedattn/config.py as a recipe, and what every recipe shares: `finish`.

python run.py --config=configs/base.py --workdir=runs/base [--config.model.d_model=256 ...]

Every recipe takes, after a colon and comma-separated:

    gate=SPEC       the gates in short form (g1, g1:headwise, g1+g2, ...); `none` is the baseline
    variant=NAME    a row of the paper (`python -m gatedattn variants`); a row without a gate can be joined with gate=
    smoke           the same recipe and code path, small enough for about a minute on a CPU
"""

import dataclasses
import math

from gatedattn import gates, variants
from gatedattn.config import (
    CheckpointConfig,
    ConfigError,
    EvalConfig,
    ProbeConfig,
    RunConfig,
    TransformerConfig,
    parse_recipe_args,
    to_config_dict,
)


def get_config(arg=None):
    return finish(RunConfig(), parse_recipe_args(arg))


def finish(config: RunConfig, args, narrow: bool = False):
    """The recipe's ConfigDict: `smoke`, then `variant=`, then `gate=` applied, and the run named after them.

    `narrow` pays for `gate=` with FFN width, as Table 2 of the paper does. Raises `ConfigError` for whatever cannot be combined.
    """
    if args.smoke:
        config = shrink(config)
    model = variants.apply(config.model, args.variant) if args.variant else config.model
    if args.gate:
        if args.variant and model.gates != "none":
            raise ConfigError(f"variant={args.variant} already sets the gates ({model.gates}): leave out gate={args.gate}")
        model = _with_gate(model, args.gate, narrow)
    words = [config.name, args.variant, args.gate, "smoke" if args.smoke else ""]
    return to_config_dict(dataclasses.replace(config, model=model, name="-".join(filter(None, words))))


def _with_gate(model: TransformerConfig, gate: str, narrow: bool) -> TransformerConfig:
    model = dataclasses.replace(model, gates=gate)  # refuses what is not a gate
    canonical = gates.format(model.gate_specs)
    return dataclasses.replace(model, **(variants.narrowed(canonical)(model) if narrow else {"gates": canonical}))


def shrink(config: RunConfig) -> RunConfig:
    """The same kind of model and run in miniature: G = N/K, experts or not, positions, dtype, remat, source and optimiser stay.

    Text is read as bytes, which need no tokenizer training. Eight rows a batch, so that a host of eight devices can split them.
    """
    model, train = config.model, config.train
    kv_heads = min(2, model.num_kv_heads)
    moe = model.moe
    if model.is_moe:
        moe = dataclasses.replace(
            moe, num_experts=min(8, moe.num_experts), top_k=min(2, moe.top_k), expert_dim=32, shared_dim=min(32, moe.shared_dim)
        )
    synthetic = config.data.source.startswith("synthetic:")  # brings its own alphabet
    return dataclasses.replace(
        config,
        model=dataclasses.replace(
            model,
            vocab_size=model.vocab_size if synthetic else min(512, model.vocab_size),
            d_model=64,
            num_layers=min(2, model.num_layers),
            num_heads=kv_heads * (model.num_heads // model.num_kv_heads),
            num_kv_heads=kv_heads,
            head_dim=32,
            ffn_dim=192,
            moe=moe,
        ),
        data=config.data if synthetic else dataclasses.replace(config.data, tokenizer="bytes"),
        train=dataclasses.replace(
            train,
            steps=20,
            batch_size=8,
            seq_len=min(128, train.seq_len),
            microbatches=math.gcd(train.microbatches, 8),
            log_every=5,
        ),
        optimizer=dataclasses.replace(config.optimizer, warmup_steps=min(5, config.optimizer.warmup_steps)),
        probe=ProbeConfig(every=10, rows=4),
        eval=EvalConfig(every=10, batches=2),
        checkpoint=CheckpointConfig(every=10),
    )
