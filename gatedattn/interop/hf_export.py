"""`TransformerConfig` -> the config.json of the Hugging Face class that computes the same model, for transformers 4 and 5."""

from __future__ import annotations

from gatedattn.config import ConfigError, TransformerConfig
from gatedattn.gates import GateSpec
from gatedattn.interop.hf_config import AUTHORS_FLAGS, refuse

UNKNOWN = (
    "pattern", "sink", "attention", "registers", "switch", "nsa", "sdpa_norm", "sdpa_activation", "position", "sandwich_norm", "norm_gate",
    "embedding_scale", "activation_clip",
)  # fmt: skip


def config_to_hf(config: TransformerConfig, layout: str = "stock") -> dict:
    """The config.json of a class that computes exactly this model.

    layout="stock": llama, mistral, qwen2, qwen3, qwen3_moe or, with an elementwise gate g1, qwen3_next; "authors": qwen3 with
    the flags of the paper's code (dense; elementwise, headwise or no gate). Raises `ConfigError` with every reason why no class
    fits.
    """
    if layout not in ("stock", "authors"):
        raise ConfigError(f"layout={layout!r}: must be stock or authors")
    default = TransformerConfig()
    reasons = [f"{name}={value}" for name in UNKNOWN if (value := getattr(config, name)) != getattr(default, name)]
    gate, granularity = config.gate_specs, ""
    if gate:
        granularity = gate[0].granularity
        plain = GateSpec(granularity=granularity, init=gate[0].init, bias=gate[0].bias, in_dim=gate[0].in_dim)
        if len(gate) > 1 or gate[0] != plain or gate[0].in_dim not in (0, config.d_model):
            reasons.append(f"gates={config.gates} (only g1, multiplying by a head-specific sigmoid of the hidden state)")
    biased = config.attention_bias
    if gate and not (biased == config.output_bias == (gate[0].init == "bias")):
        reasons.append("biases: q, k, v, gate and o must all have one, or none")
    moe, family = config.moe, "llama"
    if layout == "authors":
        family = "qwen3"
        if config.is_moe:
            reasons.append("a mixture of experts (the authors' class is dense)")
    elif gate:
        family = "qwen3_next"
        if granularity == "headwise":
            reasons.append("a headwise gate (no stock class has one; layout=authors does)")
        if not config.qk_norm:
            reasons.append("a gate without qk_norm (no stock class; layout=authors has it)")
        if config.is_moe and not (moe.shared_dim and moe.shared_gate):
            reasons.append("gated attention with experts but without a gated shared expert (qwen3_next always has one)")
    elif config.is_moe:
        family = "qwen3_moe"
        reasons += [] if config.qk_norm else ["experts without qk_norm"]
        reasons += ["a shared expert without gated attention"] if moe.shared_dim else []
    elif config.qk_norm:
        family = "qwen3"
    elif biased and not config.output_bias:
        family = "qwen2"
    elif config.window:
        family = "mistral"
        reasons += ["a window with biases but without qk_norm"] if biased else []
    if family != "qwen2" and config.output_bias != biased:
        reasons.append("attention_bias and output_bias differ")
    if config.window and (family == "qwen3_next" or layout == "authors"):
        reasons.append(f"window={config.window}")
    if config.rope.fraction != 1 and family != "qwen3_next":
        reasons.append(f"rope.fraction={config.rope.fraction}")
    refuse("no Hugging Face class computes this model", reasons)

    hf = {
        "architectures": [_class_name(family)],
        "model_type": family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.ffn_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "initializer_range": config.init_std,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": biased,
        "attention_dropout": 0.0,
        "sliding_window": config.window or None,
    } | _rope_to_hf(config, family)
    if family.startswith("qwen"):
        kind = "sliding_attention" if config.window else "full_attention"
        hf |= {"use_sliding_window": bool(config.window), "max_window_layers": 0 if config.window else config.num_layers}
        hf |= {"layer_types": [kind] * config.num_layers} if family != "qwen3_moe" else {}
    if family == "llama":
        hf["mlp_bias"] = False
    if layout == "authors":
        hf |= {flag: granularity == kind for flag, kind in AUTHORS_FLAGS.items()}
        hf |= {"use_qk_norm": config.qk_norm, "qkv_bias": biased}
    if family in ("qwen3_moe", "qwen3_next"):
        hf |= {"num_experts": moe.num_experts, "decoder_sparse_step": 1, "mlp_only_layers": []}
        hf |= {"output_router_logits": False, "router_aux_loss_coef": moe.load_balance}
    if config.is_moe:
        hf |= {"num_experts_per_tok": moe.top_k, "moe_intermediate_size": moe.expert_dim, "norm_topk_prob": moe.renormalize}
        hf |= {"shared_expert_intermediate_size": moe.shared_dim} if moe.shared_dim else {}
    return hf


def _class_name(family: str) -> str:
    return {"qwen3_moe": "Qwen3Moe", "qwen3_next": "Qwen3Next"}.get(family, family.capitalize()) + "ForCausalLM"


def _rope_to_hf(config: TransformerConfig, family: str) -> dict:
    rope = config.rope
    scaling: dict = {"rope_type": "default" if rope.scaling == "none" else rope.scaling}
    longest = config.max_seq_len
    if rope.scaling != "none":
        scaling["factor"] = rope.factor
    if rope.scaling == "yarn":
        # transformers 4.51 ignores factor and divides these two, so they must agree with it.
        longest = round(rope.original_max_len * rope.factor)
        scaling |= {"original_max_position_embeddings": rope.original_max_len}
        scaling |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
        scaling |= {"attention_factor": rope.attention_factor} if rope.attention_factor else {}
    partial = {"partial_rotary_factor": rope.fraction} if family == "qwen3_next" else {}
    return {
        "max_position_embeddings": longest,
        "rope_theta": rope.theta,
        "rope_scaling": None if rope.scaling == "none" else {**scaling, "type": rope.scaling},
        "rope_parameters": {**scaling, "rope_theta": rope.theta, **partial},
    } | partial
