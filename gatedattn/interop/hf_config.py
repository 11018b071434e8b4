"""Hugging Face's config.json -> `TransformerConfig`; the way back is `gatedattn.interop.hf_export`.

Both spellings are read: transformers 4 keeps `rope_theta` and `rope_scaling` apart, transformers 5 has them in
`rope_parameters` (and silently falls back to theta 10,000 where it finds neither). Whatever a config.json asks for that the
model here cannot compute is refused with the reason, never dropped.

Families, by `model_type` and the packing of q_proj (see `gatedattn.interop.mapping`):

    llama, mistral, qwen2, qwen3, qwen3_moe   no gate
    qwen3 with headwise_attn_output_gate or elementwise_attn_output_gate (the paper authors' code)   "group"
    qwen3_next, where all layers are full attention   "head"
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from gatedattn.config import ConfigError, TransformerConfig, from_mapping
from gatedattn.gates import GateSpec

# What a missing key means to each class of transformers (the same in 4 and 5).
_COMMON = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_bias": False, "initializer_range": 0.02}
_EXPERTS = {"decoder_sparse_step": 1, "router_aux_loss_coef": 0.001}
FAMILIES: dict[str, dict] = {
    "llama": _COMMON | {"max_position_embeddings": 2048},
    "mistral": _COMMON | {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": _COMMON | {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": _COMMON | {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096},
    "qwen3_moe": _COMMON | _EXPERTS | {
        "max_position_embeddings": 32768, "num_key_value_heads": 4, "sliding_window": 4096, "intermediate_size": 6144,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": False,
    },
    "qwen3_next": _COMMON | _EXPERTS | {
        "max_position_embeddings": 32768, "num_key_value_heads": 2, "head_dim": 256, "intermediate_size": 5632,
        "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512, "norm_topk_prob": True,
        "shared_expert_intermediate_size": 512, "partial_rotary_factor": 0.25,
    },
}  # fmt: skip
_NULL_MEANS = ("sliding_window", "num_key_value_heads")  # null: no window, as many as heads; elsewhere null means the default
AUTHORS_FLAGS = {"headwise_attn_output_gate": "headwise", "elementwise_attn_output_gate": "elementwise"}


def refuse(what: str, reasons: list[str]) -> None:
    if reasons:
        raise ConfigError(f"{what}: {'; '.join(reasons)}")


def packing_of(hf: Mapping) -> str:
    """How q_proj of such a folder is packed: "none", "group" (the paper's authors) or "head" (Qwen3-Next)."""
    if hf.get("model_type") == "qwen3_next":
        return "head"
    return "group" if any(hf.get(flag) for flag in AUTHORS_FLAGS) else "none"


def config_from_hf(hf: Mapping, dtype: str = "float32") -> TransformerConfig:
    """The model that a config.json describes. Raises `ConfigError` with every reason why it cannot be built here."""
    try:
        return _config_from_hf(hf, dtype)
    except ConfigError:
        raise
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:  # e.g. a word where a number belongs
        raise ConfigError(f"config.json: a setting has a value of the wrong kind ({error})") from None


def _config_from_hf(hf: Mapping, dtype: str) -> TransformerConfig:
    family = hf.get("model_type")
    if family not in FAMILIES:
        raise ConfigError(f"config.json: model_type={family!r} cannot be read; known: {', '.join(FAMILIES)}")
    missing = [k for k in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads") if hf.get(k) is None]
    refuse("config.json", [f"{key} is missing" for key in missing])
    hf = FAMILIES[family] | {key: value for key, value in hf.items() if value is not None or key in _NULL_MEANS}
    if hf.get("num_key_value_heads", 0) is None:
        hf["num_key_value_heads"] = hf["num_attention_heads"]
    if "num_local_experts" in hf:  # what transformers 5 calls it for qwen3_moe
        hf["num_experts"] = hf["num_local_experts"]
    _check_integers(hf)
    layers, heads = hf["num_hidden_layers"], hf["num_attention_heads"]

    reasons = []
    if hf.get("hidden_act", "silu") not in ("silu", "swish"):
        reasons.append(f"hidden_act={hf['hidden_act']!r} (only silu)")
    if hf.get("mlp_bias"):
        reasons.append("mlp_bias=true (the MLP here has no biases)")
    if hf.get("quantization_config"):
        reasons.append("quantization_config (quantised weights: dequantise them first)")
    rope = _rope(hf, family, reasons)
    window = _window(hf, family, layers, reasons)
    moe = _moe(hf, family, layers, reasons)
    if "intermediate_size" not in hf:
        reasons.append("intermediate_size is missing")

    gated = [kind for flag, kind in AUTHORS_FLAGS.items() if hf.get(flag)]
    if gated and family != "qwen3" or len(gated) > 1:
        flags = " and ".join(f"{kind}_attn_output_gate" for kind in gated)
        reasons.append(f"{flags} with model_type={family!r} (one of them, with qwen3)")
    bias = bool(hf.get("qkv_bias", hf["attention_bias"])) if family != "mistral" else False
    gate = "g1" if family == "qwen3_next" else f"g1:{gated[0]}" if gated else "none"
    refuse("config.json asks for what this model cannot do", reasons)

    return from_mapping(
        TransformerConfig,
        {
            "vocab_size": hf["vocab_size"],
            "d_model": hf["hidden_size"],
            "num_layers": layers,
            "num_heads": heads,
            "num_kv_heads": hf.get("num_key_value_heads", heads),
            "head_dim": hf.get("head_dim", hf["hidden_size"] // heads),
            "ffn_dim": hf["intermediate_size"],
            "gates": str(GateSpec.parse(gate + ":bias" * bias)) if gate != "none" else gate,  # a packed bias is the gate's too
            "qk_norm": family.startswith("qwen3") and hf.get("use_qk_norm", True),
            "attention_bias": bias or family == "qwen2",
            "output_bias": bias and family != "qwen2",
            "window": window,
            "max_seq_len": hf["max_position_embeddings"],
            "rope": rope,
            "moe": moe,
            "norm_eps": hf["rms_norm_eps"],
            "norm_zero_centered": family == "qwen3_next",
            "tie_embeddings": hf["tie_word_embeddings"],
            "init_std": hf["initializer_range"],
            "dtype": dtype,
        },
        "config.json",
    )


LIMIT = {"num_hidden_layers": 10_000, "num_experts": 100_000}  # what is looped over before any file is


def _check_integers(hf: Mapping) -> None:
    names = (
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
        "intermediate_size", "max_position_embeddings", "num_experts", "num_experts_per_tok", "moe_intermediate_size",
        "shared_expert_intermediate_size", "decoder_sparse_step",
    )  # fmt: skip
    may_be_zero = ("num_experts", "shared_expert_intermediate_size")
    ranges = {name: (int(name not in may_be_zero), LIMIT.get(name, 2**31 - 1)) for name in names if name in hf}
    wrong = [n for n, (low, high) in ranges.items() if type(hf[n]) is not int or not low <= hf[n] <= high]
    refuse("config.json", [f"{n}={hf[n]!r} must be a whole number from {ranges[n][0]} to {ranges[n][1]}" for n in wrong])


def _rope(hf: Mapping, family: str, reasons: list[str]) -> dict:
    nested = hf.get("rope_scaling") or hf.get("rope_parameters") or {}  # the order of transformers 5
    if not isinstance(nested, Mapping) or any(isinstance(value, Mapping) for value in nested.values()):
        reasons.append(f"rope parameters that differ between layers ({nested})")
        return {}
    kind = nested.get("rope_type", nested.get("type", "default"))
    rope: dict = {"theta": nested.get("rope_theta", hf.get("rope_theta", 10_000.0))}
    fraction = nested.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0))
    if fraction != 1.0 and family != "qwen3_next":
        reasons.append(f"partial_rotary_factor={fraction} (only with qwen3_next)")
    rope["fraction"] = fraction
    if "mrope_section" in nested or kind not in ("default", "linear", "yarn"):
        reasons.append(f"rope type {kind!r}{' with mrope_section' * ('mrope_section' in nested)} (only default, linear, yarn)")
        return rope
    if kind == "default":
        return rope
    rope |= {"scaling": kind, "factor": nested.get("factor")}
    if kind == "yarn":
        longest = hf["max_position_embeddings"]
        original = hf.get("original_max_position_embeddings", nested.get("original_max_position_embeddings", longest))
        factor = nested.get("factor") or longest / original
        if nested.get("truncate") is False:
            reasons.append("rope truncate=false (the ends of YaRN's ramp are always rounded here)")
        rope |= {"factor": factor, "original_max_len": original}
        rope |= {key: nested[key] for key in ("beta_fast", "beta_slow") if nested.get(key)}
        attention, m, m_all = (nested.get(key) for key in ("attention_factor", "mscale", "mscale_all_dim"))
        if attention is None and m and m_all:
            attention = _temperature(factor, m) / _temperature(factor, m_all)
        if attention is not None:
            rope["attention_factor"] = attention
    if rope["factor"] is None:
        reasons.append(f"rope type {kind!r} without a factor")
    return rope


def _temperature(factor: float, mscale: float = 1.0) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _window(hf: Mapping, family: str, layers: int, reasons: list[str]) -> int:
    """The sliding window of all layers, 0 for none. As here, W lets a query see W tokens, its own included."""
    width = hf.get("sliding_window") or 0
    kinds = hf.get("layer_types")
    if family == "qwen3_next" and kinds is None:
        interval = hf.get("full_attention_interval", 4)
        kinds = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers)]
    if family in ("qwen2", "qwen3", "qwen3_moe"):
        width = width if hf.get("use_sliding_window") else 0
    if family in ("qwen2", "qwen3") and kinds is None and width:
        kinds = ["full_attention" if i < hf.get("max_window_layers", 28) else "sliding_attention" for i in range(layers)]
    if family in ("llama", "qwen3_next"):
        width = 0
    found = sorted(set(kinds)) if isinstance(kinds, list) and all(isinstance(k, str) for k in kinds) else [str(kinds)]
    if kinds is None or found == ["full_attention"] and (not width or family in ("qwen2", "qwen3")):
        return width if kinds is None else 0
    if found == ["sliding_attention"] and width:
        return width
    kinds = f"{' and '.join(found)} with window {width or 'none'}"
    reasons.append(f"layers of {kinds} (all must be full attention, or all the same window)")
    return 0


def _moe(hf: Mapping, family: str, layers: int, reasons: list[str]) -> dict:
    if family not in ("qwen3_moe", "qwen3_next"):
        return {}
    dense = set(hf.get("mlp_only_layers") or ())
    sparse = [i not in dense and hf["num_experts"] > 0 and (i + 1) % hf["decoder_sparse_step"] == 0 for i in range(layers)]
    if not any(sparse):
        return {}
    if not all(sparse):
        reasons.append(f"{sum(sparse)} of {layers} layers are mixtures of experts (all or none)")
    moe = {
        "num_experts": hf["num_experts"],
        "top_k": hf["num_experts_per_tok"],
        "expert_dim": hf["moe_intermediate_size"],
        "renormalize": hf["norm_topk_prob"],
        "load_balance": hf["router_aux_loss_coef"],
    }
    if family == "qwen3_next":
        if not hf["shared_expert_intermediate_size"]:
            reasons.append("shared_expert_intermediate_size=0 (an empty shared expert)")
        moe |= {"shared_dim": hf["shared_expert_intermediate_size"], "shared_gate": True}
    return moe
