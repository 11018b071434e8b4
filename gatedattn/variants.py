"""Every row of the paper's Tables 1 to 4 and 6 by name (arXiv 2505.06708, camera-ready).

`apply(config, "sdpa-headwise")` turns any `TransformerConfig` into that row's model; `VARIANTS[name]` holds what the paper reports
for it. Rows that appear in several tables have one entry. The paper's own models are in `ARCHITECTURES`; off them a variant keeps its
meaning in proportion: k8 doubles the KV heads, q48 adds half as many query heads again, experts+4 adds four experts to the total and
to each token's choice, and the narrowed rows give up exactly the FFN width that their gate costs.

Table 6 (SwitchHead) prints parameters and no definition. What fits four of its five added-parameter counts: the experts share out the
plain projection's weights, and two routers, one for the value (and key) and one for the output, have a logit for each query head and
expert. Its row "v, 1 top 1" is called the same model as value-headwise, which has no output router.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gatedattn import gates
from gatedattn.config import ConfigError, MoEConfig, SwitchConfig, TransformerConfig, suggest

_QWEN = {"vocab_size": 151_936, "head_dim": 128, "gates": "none", "dtype": "bfloat16", "remat": "full"}
# Table 7. The vocabulary is the released code's default, with which the released 1.7B checkpoint's file size agrees.
ARCHITECTURES: Mapping[str, TransformerConfig] = {
    "moe15b": TransformerConfig(
        d_model=2048, num_layers=24, num_heads=32, num_kv_heads=4, tie_embeddings=False,
        moe=MoEConfig(num_experts=128, top_k=8, expert_dim=768), **_QWEN,
    ),
    "dense1b7-28": TransformerConfig(d_model=2048, num_layers=28, num_heads=16, num_kv_heads=8, ffn_dim=6144, **_QWEN),
    "dense1b7-48": TransformerConfig(d_model=1536, num_layers=48, num_heads=16, num_kv_heads=8, ffn_dim=4608, **_QWEN),
}  # fmt: skip
NARROW_TOLERANCE = 1e-3  # "equal total parameters": the narrowed model may differ from the baseline by this share


@dataclass(frozen=True)
class Schedule:
    """How a row of Table 2 was trained; batch_size in sequences of 4096 tokens."""

    tokens: str
    batch_size: int
    learning_rate: float


Changes = Callable[[TransformerConfig], dict]


@dataclass(frozen=True)
class Variant:
    """One row of the paper. `changes(config)` gives the fields of a `TransformerConfig` that make the row's model of it."""

    name: str
    paper_row: str  # "T1.5": Table 1, row 5
    description: str
    changes: Changes = field(repr=False)
    base: str = "moe15b"  # the row's own model in ARCHITECTURES
    also: tuple[str, ...] = ()  # the same run in other tables
    paper_added_params_m: float | None = None  # millions, as printed
    ppl: float | None = None  # held-out perplexity, mean over the paper's sets
    mean_gate: float | None = None  # Table 4: mean gate score over the layers
    m_act: float | None = None  # Table 4: largest hidden activation, mean over the layers
    f_attn: float | None = None  # Table 4: share of attention on the first token
    schedule: Schedule | None = None  # Table 2 only: there a row is a model and a training set-up
    note: str = ""  # where the paper's figure and its architecture disagree

    @property
    def spec(self) -> str:
        """The gates of the row, in short form."""
        return self.changes(ARCHITECTURES[self.base])["gates"]


# --- what a row changes ------------------------------------------------------------------------------------------------------


def _gate(spec: str, **fields) -> Changes:
    return lambda config: {"gates": spec, **fields}


def _more_kv_heads(config: TransformerConfig) -> dict:
    heads = 2 * config.num_kv_heads
    if config.num_heads % heads:
        raise ConfigError(
            f"variant 'k8' doubles num_kv_heads={config.num_kv_heads}, but num_heads={config.num_heads} is not a multiple of {heads}"
        )
    return {"gates": "none", "num_kv_heads": heads}


def _more_query_heads(config: TransformerConfig) -> dict:
    heads = config.num_heads * 3 // 2
    if config.num_heads % 2 or heads % config.num_kv_heads:
        raise ConfigError(
            f"variant 'q48' needs 1.5 x num_heads={config.num_heads} query heads, "
            f"and that is not a whole multiple of num_kv_heads={config.num_kv_heads}"
        )
    return {"gates": "none", "num_heads": heads}


def _more_experts(config: TransformerConfig) -> dict:
    if not config.is_moe:
        raise ConfigError("variant 'experts+4' adds experts, but this model is dense (moe.num_experts=0)")
    moe = dataclasses.replace(config.moe, num_experts=config.moe.num_experts + 4, top_k=config.moe.top_k + 4)
    return {"gates": "none", "moe": moe}


def _switch(projections: str, experts: int, top_k: int) -> Changes:
    settings = SwitchConfig(projections, num_experts=experts, top_k=top_k, split=True, query_routers=True)
    return _gate("none", switch=settings)


def narrowed(spec: str) -> Changes:
    """The gate, paid for by the FFN: ffn_dim shrinks until the total is the ungated model's again.

    With P gate parameters a layer the exact width is F - P / (3 D). It is rounded to a multiple of the largest power of two that
    leaves the totals within `NARROW_TOLERANCE` of each other (the paper's own widths are not published): 5456 and 3920 for
    elementwise gates on the 28- and 48-layer models; a headwise gate is so small that the FFN keeps its width.
    """

    def changes(config: TransformerConfig) -> dict:
        if config.is_moe:
            raise ConfigError(
                "the narrowed rows shrink the dense FFN, but this model is a mixture of experts: use the plain gate row"
            )
        d, heads, kv_heads, width = config.d_model, config.num_heads, config.num_kv_heads, config.ffn_dim
        added = 0
        for gate in gates.parse(spec):
            gated_heads = kv_heads if gate.position in ("g2", "g3") else heads
            added += sum(
                map(
                    math.prod,
                    gates.parameter_shapes(gate, d, gated_heads, config.head_dim, kv_heads * config.head_dim).values(),
                )
            )
        exact = width - added / (3 * d)
        if exact < 1:
            raise ConfigError(f"gate {spec} costs {added} parameters a layer, more than the FFN of width {width} can give up")
        layer = d * (2 * heads + 2 * kv_heads) * config.head_dim + 3 * d * width
        embedding = config.vocab_size * d * (1 if config.tie_embeddings else 2)
        slack = NARROW_TOLERANCE * (layer + embedding / config.num_layers) / (3 * d)  # in units of width
        for multiple in (2**k for k in range(width.bit_length(), -1, -1)):
            narrow = round(exact / multiple) * multiple
            if narrow and abs(narrow - exact) <= slack or multiple == 1:
                return {"gates": spec, "ffn_dim": narrow}

    return changes


# --- the rows ----------------------------------------------------------------------------------------------------------------

_VALUE_GSM8K = "GSM8k of this run is 53.97 in Tables 1 and 3, 51.33 in Table 4"
_MOE_ROWS = (
    Variant(
        "baseline", "T1.1", "no gate", _gate("none"), also=("T3.1", "T4.1", "T6.1"), paper_added_params_m=0,
        ppl=6.026, m_act=1053, f_attn=0.467, note="'2.54B activated' does not follow from Table 7, which gives 1.99 B",
    ),
    Variant("k8", "T1.2", "twice the KV heads, no gate", _more_kv_heads, paper_added_params_m=50, ppl=5.979),
    Variant("q48", "T1.3", "1.5 times the query heads, no gate", _more_query_heads, paper_added_params_m=201, ppl=5.953),
    Variant(
        "experts+4", "T1.4", "four more experts, in total and active, no gate", _more_experts, paper_added_params_m=400, ppl=5.964,
        note="4 experts of width 768 in 24 layers are 453 M, not 400 M",
    ),
    Variant(
        "sdpa-elementwise", "T1.5", "G1: the paper's gate", _gate("g1"), also=("T3.2", "T4.2"), paper_added_params_m=201,
        ppl=5.761, mean_gate=0.116, m_act=94, f_attn=0.048,
    ),
    Variant(
        "value-elementwise", "T1.6", "G2: gate on the value", _gate("g2"), also=("T3.3", "T4.5"), paper_added_params_m=25,
        ppl=5.820, mean_gate=0.221, m_act=125, f_attn=0.297, note=_VALUE_GSM8K,
    ),
    Variant("key-elementwise", "T1.7", "G3: gate on the key", _gate("g3"), paper_added_params_m=25, ppl=6.016),
    Variant("query-elementwise", "T1.8", "G4: gate on the query", _gate("g4"), paper_added_params_m=201, ppl=5.981),
    Variant("dense-elementwise", "T1.9", "G5: gate after the output projection", _gate("g5"), paper_added_params_m=100, ppl=6.017),
    Variant(
        "sdpa-headwise", "T1.10", "G1, one score a head", _gate("g1:headwise"), also=("T4.3",), paper_added_params_m=1.6,
        ppl=5.792, mean_gate=0.172, m_act=98, f_attn=0.073,
    ),
    Variant(
        "value-headwise", "T1.11", "G2, one score a KV head", _gate("g2:headwise"), also=("T6.6",), paper_added_params_m=0.2,
        ppl=5.808, note="Table 6 gives 3 M for the same run: what two routers with a logit for each query head have",
    ),
    Variant(
        "sdpa-shared", "T1.12", "G1, scores averaged over the heads", _gate("g1:mean"), also=("T4.4",), paper_added_params_m=201,
        ppl=5.801, mean_gate=0.271, m_act=286, f_attn=0.301,
        note="section 2.2 says one shared projection (g1:shared); the parameter column says an average of all heads",
    ),
    Variant(
        "value-shared", "T1.13", "G2, scores averaged over the KV heads", _gate("g2:mean"), paper_added_params_m=25, ppl=5.867,
        note="see sdpa-shared",
    ),
    Variant(
        "sdpa-add-silu", "T1.14", "G1, SiLU score added", _gate("g1:add:silu"), also=("T3.4",), paper_added_params_m=201, ppl=5.821,
    ),
    Variant("sdpa-silu-gate", "T1.15", "G1, SiLU for the sigmoid", _gate("g1:silu"), paper_added_params_m=201, ppl=5.822),
    Variant("sdpa-norm", "T3.5", "RMSNorm on each head's SDPA output, no gate", _gate("none", sdpa_norm=True), ppl=5.847),
    Variant("sdpa-silu", "T3.6", "SiLU on the SDPA output, no parameters", _gate("none", sdpa_activation="silu"), ppl=5.975),
    Variant("sdpa-add-identity", "T3.7", "G1, linear score added", _gate("g1:add:identity"), ppl=5.882),
    Variant(
        "sdpa-input-independent", "T4.6", "G1, a learned table for the score", _gate("g1:none"),
        ppl=5.917, mean_gate=0.335, m_act=471, f_attn=0.364,
    ),
    Variant(
        "sdpa-ns-sigmoid", "T4.7", "G1, score in [0.5, 1]", _gate("g1:ns_sigmoid"),
        ppl=5.900, mean_gate=0.653, m_act=892, f_attn=0.451,
    ),
    Variant(
        "switch-kv-8-top-8", "T6.2", "SwitchHead, 8 key, value and output experts, all chosen", _switch("kvo", 8, 8),
        paper_added_params_m=38, ppl=5.847,
        note="38 M unexplained: two routers are 25 M; three would be 38 M, but then kv-4-top-4 19 M and not its 13 M",
    ),
    Variant(
        "switch-kv-4-top-4", "T6.3", "SwitchHead, 4 key, value and output experts, all chosen", _switch("kvo", 4, 4),
        paper_added_params_m=13, ppl=5.935,
    ),
    Variant(
        "switch-v-4-top-4", "T6.4", "SwitchHead, 4 value and output experts, all chosen", _switch("vo", 4, 4),
        paper_added_params_m=13, ppl=5.820,
    ),
    Variant(
        "switch-v-8-top-2", "T6.5", "SwitchHead, 2 of 8 value and output experts", _switch("vo", 8, 2),
        paper_added_params_m=25, ppl=5.870,
    ),
)  # fmt: skip

_DENSE_MODELS: Mapping[str, tuple[str, Changes]] = {
    "baseline": ("no gate", _gate("none")),
    "elementwise": ("G1, FFN narrowed to equal parameters", narrowed("g1")),
    "headwise": ("G1 headwise, equal parameters", narrowed("g1:headwise")),
    "sandwich": ("no gate, sandwich norm", _gate("none", sandwich_norm=True)),
}
_BATCH = {("28", "400B"): 1024, ("28", "3.5T"): 2048, ("48", "400B"): 1024, ("48", "1T"): 4096}


def _dense(row: int, layers: str, tokens: str, model: str, lr: str, ppl: float | None, note: str = "") -> Variant:
    description, changes = _DENSE_MODELS[model]
    schedule = Schedule(tokens, _BATCH[layers, tokens], float(lr))
    name = f"dense{layers}-{tokens}-lr{lr}-{model}"
    return Variant(
        name, f"T2.{row}", description, changes, f"dense1b7-{layers}",
        paper_added_params_m=0 if model != "sandwich" else None, ppl=ppl, schedule=schedule, note=note,
    )  # fmt: skip


_DENSE_ROWS = (
    _dense(1, "28", "400B", "baseline", "4e-3", 7.499),
    _dense(2, "28", "400B", "elementwise", "4e-3", 7.404),
    _dense(3, "28", "3.5T", "baseline", "4.5e-3", 6.180),
    _dense(4, "28", "3.5T", "elementwise", "4.5e-3", 6.130),
    _dense(5, "48", "400B", "baseline", "4e-3", 7.421),
    _dense(6, "48", "400B", "baseline", "8e-3", 9.195, "'convergence issues': did not diverge"),
    _dense(7, "48", "400B", "sandwich", "8e-3", 7.407),
    _dense(8, "48", "400B", "elementwise", "4e-3", 7.288),
    _dense(9, "48", "400B", "headwise", "4e-3", 7.370),
    _dense(10, "48", "400B", "elementwise", "8e-3", 7.325, "worse perplexity than at 4e-3 (T2.8), better benchmarks"),
    _dense(11, "48", "1T", "baseline", "5.3e-3", 7.363),
    _dense(12, "48", "1T", "baseline", "8e-3", None, "diverged: no figures"),
    _dense(13, "48", "1T", "elementwise", "5.3e-3", 7.101),
    _dense(14, "48", "1T", "elementwise", "8e-3", 7.078),
)

VARIANTS: Mapping[str, Variant] = {v.name: v for v in (*_MOE_ROWS, *_DENSE_ROWS)}
# The models of Table 2 without its training set-ups, for use on any dense model.
DENSE_ALIASES: Mapping[str, str] = {"sandwich-norm": "T2.7", "sdpa-elementwise-narrow": "T2.8", "sdpa-headwise-narrow": "T2.9"}


# --- use ---------------------------------------------------------------------------------------------------------------------


def get(name: str) -> Variant:
    """The variant of that name, or of that row of the paper ("T1.5"). Raises `ConfigError`, with the nearest name, if there is none."""
    if name in DENSE_ALIASES:
        return dataclasses.replace(get(DENSE_ALIASES[name]), name=name, schedule=None)
    for variant in VARIANTS.values():
        if name in (variant.name, variant.paper_row, *variant.also):
            return variant
    raise ConfigError(
        f"unknown variant {name!r}{suggest(name, [*VARIANTS, *DENSE_ALIASES])}; `python -m gatedattn variants` lists them"
    )


def apply(config: TransformerConfig, name: str) -> TransformerConfig:
    """`config` turned into the named row's model.

    Raises `ConfigError` for an unknown name, or for a row that means nothing on this model (experts+4 on a dense one).
    """
    return dataclasses.replace(config, **get(name).changes(config))


Count = Callable[[TransformerConfig], Mapping[str, int]]  # `gatedattn.transformer.count`, of a room above


def added_params(variant: Variant, count: Count) -> int:
    """Parameters of the row's model beyond its base's, counted from the models built abstractly."""
    base = ARCHITECTURES[variant.base]
    changed = dataclasses.replace(base, **variant.changes(base))
    return count(changed)["params_total"] - count(base)["params_total"]


def table(count: Count) -> list[dict]:
    """One JSON-ready record per variant: the row, what it changes, its added parameters counted and as printed, the paper's figures."""
    records, count = [], functools.cache(count)  # the bases recur, and so do the dense models
    for variant in VARIANTS.values():
        record = {f.name: getattr(variant, f.name) for f in dataclasses.fields(variant) if f.name != "changes"}
        changes = variant.changes(ARCHITECTURES[variant.base])
        settings = {k: dataclasses.asdict(v) if dataclasses.is_dataclass(v) else v for k, v in changes.items() if k != "gates"}
        record["schedule"] = variant.schedule and dataclasses.asdict(variant.schedule)
        records.append(record | {"spec": changes["gates"], "changes": settings, "added_params": added_params(variant, count)})
    return records
