"""The configuration of a run: frozen dataclasses that check themselves.

`RunConfig` is the whole of it. On the command line it wears an `ml_collections.ConfigDict` (see `to_config_dict`);
`from_mapping` turns that skin into the dataclasses exactly once, refuses unknown keys with the nearest match, and from then
on nothing can change. Every default of the project stands here and nowhere else.

Dimension letters, used in einsums, jaxtyping strings and sharding rules throughout the project:

    B batch   T query length   S key length   D model   N query heads   K key/value heads   G = N/K query heads per KV head
    H head dim   F feed-forward   E experts   V vocabulary   L layers
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field

from gatedattn import gates as gates_lib


class ConfigError(ValueError):
    """A configuration that cannot run. The message says what was given, what is allowed, what to type instead."""


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _positive(obj, *names: str) -> None:
    for name in names:
        value = getattr(obj, name)
        _check(
            0 < value < math.inf, f"{type(obj).__name__}.{name}={value}: must be positive" + " and finite" * (value == math.inf)
        )


def _not_negative(obj, *names: str) -> None:
    for name in names:
        value = getattr(obj, name)
        _check(
            0 <= value < math.inf,
            f"{type(obj).__name__}.{name}={value}: must not be negative" + " nor infinite" * (value == math.inf),
        )


def _one_of(obj, name: str, allowed: tuple[str, ...]) -> None:
    value = getattr(obj, name)
    if value not in allowed:
        raise ConfigError(
            f"{type(obj).__name__}.{name}={value!r}: must be one of {', '.join(allowed)}{suggest(value, allowed)}"
        )


def suggest(word: str, known, most: int = 1) -> str:
    """`" (did you mean 'x'?)"` for the known word nearest to `word`, or the nearest ones; or an empty string."""
    near = difflib.get_close_matches(str(word), dict.fromkeys(map(str, known)), n=most, cutoff=0.5)
    return f" (did you mean {' or '.join(map(repr, near))}?)" if near else ""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (arXiv 2104.09864) and its length extensions (linear: 2306.15595, YaRN: 2309.00071)."""

    theta: float = 10_000.0
    fraction: float = 1.0  # share of each head's dimensions that rotate (Qwen3-Next: 0.25)
    scaling: str = "none"  # none | linear | yarn
    factor: float = 1.0  # target length / original_max_len
    original_max_len: int = 4096  # length the model was trained at; YaRN only
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 0.0  # YaRN's temperature on cos and sin; 0: 0.1 ln(factor) + 1

    def __post_init__(self):
        _one_of(self, "scaling", ("none", "linear", "yarn"))
        _positive(self, "theta", "factor", "original_max_len", "beta_fast", "beta_slow")
        _not_negative(self, "attention_factor")
        _check(0 < self.fraction <= 1, f"RopeConfig.fraction={self.fraction}: must be in (0, 1]")
        _check(
            self.scaling != "none" or self.factor == 1.0,
            f"RopeConfig.factor={self.factor} has no effect with scaling='none': set scaling to linear or yarn",
        )


GROUPED_KERNELS = ("auto", "loop", "ragged_dot", "megablox", "triton", "tokamax")


@dataclass(frozen=True)
class MoEConfig:
    """Mixture of experts in place of the MLP. The paper states softmax top-8 of 128, a global-batch load-balancing loss and a
    router z-loss, but no coefficients: ours are Qwen3-MoE's published 1e-3 and ST-MoE's 1e-3 (arXiv 2202.08906)."""

    num_experts: int = 0  # E; 0: a dense MLP
    top_k: int = 8
    expert_dim: int = 768  # F of one expert
    shared_dim: int = 0  # F of a shared expert that sees every token; 0: none
    shared_gate: bool = False  # multiply the shared expert by sigmoid(x @ w), as Qwen3-Next does
    renormalize: bool = True  # divide the chosen top-k probabilities by their sum
    load_balance: float = 1e-3
    z_loss: float = 1e-3
    kernel: str = "auto"  # grouped matrix product: auto, or a row of gatedattn.kernels.grouped.CAPABILITIES
    capacity: float = 0.0  # tokens an expert takes from each device, times the mean, the rest dropped; 0: all, dropless
    expert_buffer: float = 0.0  # dropless over mesh.expert: rows a device makes room for, times the mean; 0: for the worst case

    def __post_init__(self):
        _not_negative(self, "num_experts", "shared_dim", "load_balance", "z_loss", "capacity", "expert_buffer")
        _positive(self, "top_k", "expert_dim")
        _one_of(self, "kernel", GROUPED_KERNELS)
        if self.num_experts:
            _check(
                self.top_k <= self.num_experts,
                f"MoEConfig.top_k={self.top_k} exceeds num_experts={self.num_experts}: at most all experts can be chosen",
            )


POSITIONS = ("rope", "learned", "none")
SINKS = ("none", "learned", "off_by_one")
DTYPES = ("float32", "bfloat16", "float64")
REMATS = ("none", "attn", "mlp", "full", "offload")
PATTERN = ("window", "position", "gates", "sink")  # settings in which the layers of a pattern may differ
KERNELS = ("auto", "reference", "chunked", "splash", "cudnn", "triton", "tokamax")


@dataclass(frozen=True)
class TransformerConfig:
    """A decoder-only transformer: pre-norm, grouped-query attention with gates, SwiGLU MLP or MoE, scanned layers."""

    vocab_size: int = 4096  # V
    d_model: int = 192  # D
    num_layers: int = 6  # L
    num_heads: int = 6  # N
    num_kv_heads: int = 2  # K
    head_dim: int = 64  # H
    ffn_dim: int = 512  # F of the dense MLP (unused when moe.num_experts > 0)
    gates: str = "g1"  # GateSpec short form, "g1+g2" for several, "none" for the baseline
    qk_norm: bool = True
    attention_bias: bool = False  # biases on the q, k, v projections
    output_bias: bool = False  # bias on the attention output projection
    window: int = 0  # attend to the last `window` tokens only, the query's own included; 0: all
    sink: str = "none"  # none | learned (a logit per head, gpt-oss) | off_by_one (that logit fixed at 0)
    sdpa_norm: bool = False  # RMSNorm on each head's SDPA output (the paper's "GroupNorm" row of Table 3)
    sdpa_activation: str = "none"  # none | silu on the SDPA output, without parameters (Table 3)
    position: str = "rope"  # rope | learned | none
    max_seq_len: int = 4096  # rows of the learned position table; the harness reads no further, whatever the position
    rope: RopeConfig = field(default_factory=RopeConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)
    norm_eps: float = 1e-6
    norm_zero_centered: bool = False  # RMSNorm multiplies by 1 + w, w from zero (Qwen3-Next), instead of w from one
    sandwich_norm: bool = False  # also normalise each sub-layer's output before it joins the residual stream
    embedding_scale: float = 1.0  # token embeddings are multiplied by this
    activation_clip: float = 0.0  # clip attention and MLP outputs to +-this; 0: off
    tie_embeddings: bool = True
    init_std: float = 0.02
    dtype: str = "float32"  # of activations and matmuls; parameters are float32 throughout
    remat: str = "none"  # none | attn | mlp | full | offload: what the backward pass recomputes, see Transformer.hidden
    kernel: str = "auto"  # attention implementation: auto, or a row of gatedattn.kernels.CAPABILITIES
    # Layers that repeat, "" for all alike: "window=512|window=512|window=512|window=0,position=none" is three local layers and a
    # global one without RoPE, "gates=g1|gates=none" every other layer gated. | between layers, commas between a layer's settings
    # (those of PATTERN; no gate's short form holds either sign), and what a layer does not set is as above.
    pattern: str = ""

    def __post_init__(self):
        _positive(
            self, "vocab_size", "d_model", "num_layers", "num_heads", "num_kv_heads", "head_dim", "ffn_dim", "max_seq_len",
            "norm_eps", "embedding_scale", "init_std",
        )  # fmt: skip
        _not_negative(self, "window", "activation_clip")
        _one_of(self, "sink", SINKS)
        _one_of(self, "sdpa_activation", ("none", "silu"))
        _one_of(self, "position", POSITIONS)
        _one_of(self, "dtype", DTYPES)
        _one_of(self, "remat", REMATS)
        _one_of(self, "kernel", KERNELS)
        if self.num_heads % self.num_kv_heads:
            fits = [k for k in range(1, self.num_heads + 1) if self.num_heads % k == 0]
            raise ConfigError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}: "
                f"num_kv_heads may be {', '.join(map(str, fits))}"
            )
        rotated = self.head_dim * self.rope.fraction
        if self.position == "rope" and (rotated != int(rotated) or int(rotated) % 2):
            raise ConfigError(
                f"head_dim={self.head_dim} with rope.fraction={self.rope.fraction} rotates {rotated:g} dimensions: must be a whole even number"
            )
        try:
            specs = self.gate_specs
        except ValueError as error:
            raise ConfigError(f"gates={self.gates!r}: {error}") from None
        for spec in specs:
            if spec.in_dim > self.d_model:
                raise ConfigError(f"gate {spec}: in_dim={spec.in_dim} exceeds d_model={self.d_model}")
        if self.pattern:
            self._check_pattern()

    def _check_pattern(self):
        count = len(self.period)
        _check(
            count > 1,
            f"pattern={self.pattern!r} is of one layer, as all would be: give it to the model itself, or add layers after a |",
        )
        fewer = self.num_layers // count * count
        nearest = f"{fewer} or {fewer + count}" if fewer else f"{count}"
        _check(
            self.num_layers % count == 0,
            f"num_layers={self.num_layers} is not a multiple of the {count} layers of pattern={self.pattern!r}: "
            f"the nearest is {nearest}",
        )

    @property
    def period(self) -> tuple[TransformerConfig, ...]:
        """The settings of each layer of the pattern: those of layer i are at i modulo their number. (self,) without a pattern."""
        return tuple(map(self._layer, self.pattern.split("|"))) if self.pattern else (self,)

    def _layer(self, text: str) -> TransformerConfig:
        changes: dict[str, str | int] = {}
        for item in filter(None, map(str.strip, text.split(","))):
            key, _, value = map(str.strip, item.partition("="))
            where = f"pattern={self.pattern!r}: {item!r}"
            _check(key in PATTERN, f"{where}: layers may differ in {', '.join(PATTERN)}{suggest(key, PATTERN)}")
            _check(value != "" and key not in changes, f"{where}: each setting of a layer is given once, with a value")
            if key == "window":
                _check(value.isdecimal(), f"{where}: must be a number of tokens, or 0 for all")
            if key == "position":
                _check("learned" not in (value, self.position), f"{where}: learned positions enter below the layers, all alike")
            changes[key] = int(value) if key == "window" else value
        try:
            return dataclasses.replace(self, pattern="", **changes)
        except ConfigError as error:
            raise ConfigError(f"pattern={self.pattern!r}: {error}") from None

    @property
    def layer_gates(self) -> str:
        """`gates`, or those of a pattern's layers, each once: "g1|none"."""
        return "|".join(dict.fromkeys(layer.gates for layer in self.period))

    @property
    def gate_specs(self) -> tuple[gates_lib.GateSpec, ...]:
        return gates_lib.parse(self.gates)

    @property
    def is_moe(self) -> bool:
        return self.moe.num_experts > 0


@dataclass(frozen=True)
class DataConfig:
    """Where tokens come from.

    `source` is one or more sources, comma-separated, each with an optional weight: `tfds:sotu`, `text:books/*.txt`,
    `prepared:DIR` (made by `python -m gatedattn prepare`), `synthetic:backcopy`, `tfds:sotu@0.7,text:books/*.txt@0.3`.
    """

    source: str = "tfds:sotu"
    tokenizer: str = "bpe:4096"  # bytes | bpe:SIZE (trained on the corpus, kept with the run) | FILE.json | FILE.model
    bos: str = "document"  # document: BOS begins every document | row: also every row that continues one
    valid_fraction: float = 0.05  # share of a text: source's documents that is held out (tfds: its own validation split)
    cache_dir: str = "~/.cache/gatedattn"  # prepared corpora

    def __post_init__(self):
        _one_of(self, "bos", ("document", "row"))
        _check(bool(self.source), "data.source is empty: give e.g. tfds:sotu, text:books/*.txt or synthetic:backcopy")
        _check(0 < self.valid_fraction < 1, f"data.valid_fraction={self.valid_fraction}: must be in (0, 1)")


@dataclass(frozen=True)
class TrainConfig:
    steps: int = 1000
    batch_size: int = 8  # sequences per optimiser step, over all devices and microbatches
    seq_len: int = 256  # T
    microbatches: int = 1  # a step's batch is processed in this many equal parts; losses and token counts are summed
    seed: int = 0
    log_every: int = 10
    z_loss: float = 0.0  # weight of mean(logsumexp(logits)^2)
    loss_chunk: int = 2048  # tokens whose float32 logits exist at one time on a device
    platform: str = "any"  # any | cpu | gpu | tpu: refuse to start elsewhere
    init_from: str = ""  # a MODEL whose parameters a new run begins with; what it lacks (a gate, say) is initialised afresh

    def __post_init__(self):
        _positive(self, "steps", "batch_size", "seq_len", "microbatches", "log_every", "loss_chunk")
        _not_negative(self, "z_loss", "seed")
        _one_of(self, "platform", ("any", "cpu", "gpu", "tpu"))
        _check(
            self.batch_size % self.microbatches == 0,
            f"train.batch_size={self.batch_size} is not a multiple of train.microbatches={self.microbatches}",
        )
        for name, value in (
            ("steps", self.steps),
            ("seed", self.seed),
            ("batch_size x seq_len", self.batch_size * self.seq_len),
        ):
            _check(value < 2**31, f"train.{name}={value}: must be below 2^31")


@dataclass(frozen=True)
class OptimizerConfig:
    """The paper says AdamW with 'default' values and names none: betas (0.9, 0.95), eps 1e-8, decay 0.1 and clipping at 1 are
    what the Qwen and Llama reports of the same years use."""

    name: str = "adamw"  # adamw | muon (matrices by Muon, everything else by AdamW)
    learning_rate: float = 3e-3
    schedule: str = "cosine"  # cosine | wsd (constant, then linear decay) | constant
    warmup_steps: int = 100  # at most half of train.steps, however short the run
    end_learning_rate: float = 3e-4  # reached at the last step by cosine and wsd
    decay_fraction: float = 0.2  # wsd: share of the steps spent decaying
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    no_decay: str = r"norm|bias|sink|table|position"  # parameters whose path matches this are not decayed
    clip_norm: float = 1.0  # 0: no clipping
    muon_learning_rate: float = 0.02  # peak for the matrices under Muon; follows the same schedule
    muon_momentum: float = 0.95

    def __post_init__(self):
        _one_of(self, "name", ("adamw", "muon"))
        _one_of(self, "schedule", ("cosine", "wsd", "constant"))
        _positive(self, "learning_rate", "eps", "muon_learning_rate")
        _not_negative(self, "warmup_steps", "end_learning_rate", "weight_decay", "clip_norm")
        for name in ("b1", "b2", "muon_momentum"):
            _check(0 <= getattr(self, name) < 1, f"optimizer.{name}={getattr(self, name)}: must be in [0, 1)")
        _check(0 < self.decay_fraction <= 1, f"optimizer.decay_fraction={self.decay_fraction}: must be in (0, 1]")
        _check(
            self.schedule == "constant" or self.end_learning_rate <= self.learning_rate,
            f"optimizer.end_learning_rate={self.end_learning_rate} exceeds learning_rate={self.learning_rate}: "
            f"{self.schedule} ends below its peak; lower it, or set schedule=constant",
        )
        try:
            re.compile(self.no_decay)
        except re.error as error:
            raise ConfigError(f"optimizer.no_decay={self.no_decay!r}: not a regular expression ({error})") from None


@dataclass(frozen=True)
class GuardConfig:
    """Bad steps, recognised on the device: the loss or the gradient norm is not finite, or it is a spike, i.e. it exceeds the
    running median of the last `window` steps by more than `deviations` robust standard deviations (1.4826 times the median
    absolute deviation) and by more than `loss_rise` (nats) or `grad_rise` (multiples of the median)."""

    skip: str = "nonfinite"  # nonfinite | spikes (these too): whose update is not applied; spikes are counted in any case
    window: int = 50
    deviations: float = 8.0
    loss_rise: float = 0.1
    grad_rise: float = 1.0
    patience: int = 10  # so many skipped steps in a row, and then:
    action: str = "stop"  # stop | rewind: go on from the last checkpoint before them, and pass over their rows of data
    rewinds: int = 3  # stop instead after so many

    def __post_init__(self):
        _one_of(self, "skip", ("nonfinite", "spikes"))
        _one_of(self, "action", ("stop", "rewind"))
        _positive(self, "deviations", "patience")
        _not_negative(self, "loss_rise", "grad_rise", "rewinds")
        _check(self.window >= 4, f"guard.window={self.window}: must be at least 4 steps, a median needs some")


@dataclass(frozen=True)
class ProbeConfig:
    every: int = 100  # steps between lines of heads.jsonl; 0: never
    rows: int = 8  # held-out sequences the probe looks at (the same ones each time)

    def __post_init__(self):
        _not_negative(self, "every")
        _positive(self, "rows")


@dataclass(frozen=True)
class EvalConfig:
    every: int = 250  # steps between evaluations; 0: only after the last step
    batches: int = 16  # batches of held-out rows per evaluation; 0: all of them

    def __post_init__(self):
        _not_negative(self, "every", "batches")


@dataclass(frozen=True)
class CheckpointConfig:
    every: int = 500  # steps between checkpoints; 0: only at the end or when interrupted
    keep: int = 2  # the newest so many
    keep_every: int = 0  # and for good those of the steps that this divides; 0: none
    may_change: str = ""  # settings that may differ when a run goes on, besides those that always may: optimizer.clip_norm,...

    def __post_init__(self):
        _not_negative(self, "every", "keep_every")
        _positive(self, "keep")


@dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis; one of them may be -1, which takes what is left."""

    data: int = 1
    fsdp: int = -1
    tensor: int = 1
    expert: int = 1
    context: int = 1

    def __post_init__(self):
        sizes = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        for name, size in sizes.items():
            _check(size == -1 or size >= 1, f"mesh.{name}={size}: must be a positive number or -1")
        _check(
            list(sizes.values()).count(-1) <= 1,
            f"mesh: {', '.join(n for n, s in sizes.items() if s == -1)} are all -1: only one axis may take what is left",
        )


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides what a run computes."""

    name: str = "base"
    model: TransformerConfig = field(default_factory=TransformerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    probe: ProbeConfig = field(default_factory=ProbeConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)

    def __post_init__(self):
        _check(
            bool(re.fullmatch(r"[\w.,:=+@ -]+", self.name)) and not self.name.startswith("."),
            f"name={self.name!r}: the run's folder is named after it; letters, digits and any of _.,:=+@- will do",
        )
        _check(
            self.guard.action == "stop" or self.checkpoint.every > 0,
            "guard.action=rewind with checkpoint.every=0: there would be no checkpoint to go back to; set checkpoint.every",
        )
        _check(
            self.data.bos == "document" or self.train.seq_len > 1,
            f"train.seq_len={self.train.seq_len} leaves no room for a token after data.bos=row: at least 2",
        )
        if self.model.position == "learned" and self.train.seq_len > self.model.max_seq_len:
            raise ConfigError(
                f"train.seq_len={self.train.seq_len} exceeds the {self.model.max_seq_len} learned positions: "
                f"set model.max_seq_len={self.train.seq_len}"
            )

    @property
    def tokens_per_step(self) -> int:
        return self.train.batch_size * self.train.seq_len


# --- dataclasses <-> the command line's ConfigDict ---------------------------------------------------------------------------


def to_mapping(config) -> dict:
    """The config as nested plain dicts (JSON-ready)."""
    return dataclasses.asdict(config)


def to_config_dict(config: RunConfig):
    """The config as a locked `ml_collections.ConfigDict`, for `--config.a.b=value` on the command line."""
    from ml_collections import config_dict

    return config_dict.ConfigDict(to_mapping(config)).lock()


def from_mapping(cls, mapping: Mapping, path: str = ""):
    """Build dataclass `cls` from nested mappings; keys left out keep their defaults.

    Raises `ConfigError` for unknown keys (with the nearest match), wrong types and whatever the dataclass itself refuses.
    """
    _check(isinstance(mapping, Mapping), f"{path or cls.__name__}={mapping!r}: must be a group of settings, not a value")
    hints = typing.get_type_hints(cls)
    known = {f.name for f in dataclasses.fields(cls)}
    values = {}
    for key, value in mapping.items():
        where = f"{path}.{key}" if path else str(key)
        if key not in known:
            raise ConfigError(f"unknown config key '{where}'{suggest(key, known)}; known here: {', '.join(sorted(known))}")
        kind = hints[key]
        if dataclasses.is_dataclass(kind):
            values[key] = from_mapping(kind, value, where)
        else:
            values[key] = _coerce(value, kind, where)
    return cls(**values)


def _coerce(value, kind, where: str):
    if kind is float and isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1e300:
        return float(value)
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{where}={value!r}: must be a finite number")
    if isinstance(value, bool) and kind is not bool or not isinstance(value, kind):
        raise ConfigError(f"{where}={value!r}: must be {kind.__name__}, not {type(value).__name__}")
    return value


def parse_recipe_args(arg: str | None, **defaults) -> types.SimpleNamespace:
    """Parse the part after the colon in `--config=configs/x.py:gate=g1,layers=48,smoke`.

    Comma-separated `key=value`; a bare key means true; a value takes the type of its default. `gate`, `variant` and `smoke` are
    known to every recipe; `defaults` names the others.

    Raises `ConfigError` for an unknown key (with the nearest match) or a value of the wrong type.
    """
    known = {"gate": "", "variant": "", "smoke": False} | defaults
    values = dict(known)
    for item in filter(None, (arg or "").split(",")):
        key, has_value, text = item.partition("=")
        if key not in known:
            raise ConfigError(
                f"unknown recipe argument {key!r}{suggest(key, known)}; this recipe takes: {', '.join(sorted(known))}"
            )
        kind = type(known[key])
        if kind is bool:
            if text.lower() not in ("", "true", "false"):
                raise ConfigError(f"recipe argument {item!r}: must be true or false")
            values[key] = text.lower() != "false"
            continue
        if not has_value:
            raise ConfigError(f"recipe argument {key!r} needs a value: {key}={known[key] or '...'}")
        try:
            values[key] = kind(text)
        except ValueError:
            raise ConfigError(f"recipe argument {item!r}: must be {kind.__name__}") from None
    return types.SimpleNamespace(**values)
