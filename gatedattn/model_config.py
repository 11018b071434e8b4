"""The configuration of a model: frozen dataclasses that check themselves (`gatedattn.config` has the letters and the rest)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from gatedattn import gates as gates_lib
from gatedattn.checks import ConfigError, check, not_negative, one_of, positive, read_only_with, suggest


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
        one_of(self, "scaling", ("none", "linear", "yarn"))
        positive(self, "theta", "factor", "original_max_len", "beta_fast", "beta_slow")
        not_negative(self, "attention_factor")
        check(0 < self.fraction <= 1, f"RopeConfig.fraction={self.fraction}: must be in (0, 1]")
        check(
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
        not_negative(self, "num_experts", "shared_dim", "load_balance", "z_loss", "capacity", "expert_buffer")
        positive(self, "top_k", "expert_dim")
        one_of(self, "kernel", GROUPED_KERNELS)
        if self.num_experts:
            check(
                self.top_k <= self.num_experts,
                f"MoEConfig.top_k={self.top_k} exceeds num_experts={self.num_experts}: at most all experts can be chosen",
            )


@dataclass(frozen=True)
class SwitchConfig:
    """SwitchHead (arXiv 2312.07987): experts in place of attention's projections, see `gatedattn.layers.switch`."""

    projections: str = ""  # which: v, o, vo, kv or kvo; empty: none of them. Keys go by the values' scores
    num_experts: int = 1  # E, for each head
    top_k: int = 1
    split: bool = False  # the E experts share out the rows of one projection (D / E, or H / E for o): only routers are added
    query_routers: bool = (
        False  # a router for each query head on keys and values: N of them, as wide in the cache, rather than K
    )

    def __post_init__(self):
        one_of(self, "projections", ("", "v", "o", "vo", "kv", "kvo"))
        positive(self, "num_experts", "top_k")
        check(
            self.top_k <= self.num_experts,
            f"switch.top_k={self.top_k} exceeds switch.num_experts={self.num_experts}: at most all experts can be chosen",
        )
        check(
            bool(self.projections) or self.num_experts == 1,
            f"switch.num_experts={self.num_experts} without switch.projections: say which, e.g. vo",
        )
        check(bool(self.projections) or not self.split, "switch.split without switch.projections: say which, e.g. vo")
        check(
            "v" in self.projections or not self.query_routers,
            f"switch.query_routers with switch.projections={self.projections!r}: only keys and values have a choice of routers",
        )

    def widths(self, projection: str) -> int:
        """How many times as wide as a plain projection one with experts is."""
        return self.num_experts if projection in self.projections and not self.split else 1


@dataclass(frozen=True)
class NSAConfig:
    """Native sparse attention (arXiv 2502.11089), see `gatedattn.layers.nsa`. Sizes are in tokens, the paper's by default."""

    enabled: bool = False
    gate: str = "learned"  # learned: a sigmoid for each query head and branch | equal: 1/3 each
    sparse: bool = True  # False: every branch reads all tokens, so that what is left of NSA are its gates
    separate: bool = True  # each branch has keys and values of its own
    compression: str = "mlp"  # mlp | mean: of the tokens of a block
    compress_block: int = 32  # l
    compress_stride: int = 16  # d, divides both kinds of blocks
    select_block: int = 64  # l'
    select_count: int = 16  # n, the first block and the last two among them
    window: int = 512

    def __post_init__(self):
        read_only_with(self.enabled, "nsa.enabled=True", "nsa", self)
        read_only_with(self.sparse, "nsa.sparse=True", "nsa", self, "enabled", "gate", "sparse", "separate")
        one_of(self, "gate", ("learned", "equal"))
        one_of(self, "compression", ("mlp", "mean"))
        positive(self, "compress_block", "compress_stride", "select_block", "window")
        block, stride = self.compress_block, self.compress_stride
        check(
            block <= self.select_block and block % stride == self.select_block % stride == 0,
            f"nsa.compress_stride={stride} must divide nsa.compress_block={block} and nsa.select_block={self.select_block}, "
            "of which the first may not be the larger",
        )
        check(self.select_count >= 3, f"nsa.select_count={self.select_count}: at least 3, the first block and the last two")

    @property
    def branches(self) -> int:
        """How many keys and values a KV head has."""
        return 3 if self.enabled and self.separate else 1


POSITIONS = ("rope", "learned", "none")
SINKS = ("none", "learned", "off_by_one")
ATTENTIONS = ("softmax", "sigmoid", "softpick")
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
    attention: str = "softmax"  # softmax | sigmoid | softpick: how scores become weights, see gatedattn.kernels.weights
    sigmoid_length: int = 0  # n of sigmoid attention's bias -ln n: the length of the sequences it is trained on
    registers: int = 0  # m learned embeddings in front of every document, seen by all its tokens, whatever the window (Hymba)
    sdpa_norm: bool = False  # RMSNorm on each head's SDPA output (the paper's "GroupNorm" row of Table 3)
    sdpa_activation: str = "none"  # none | silu on the SDPA output, without parameters (Table 3)
    position: str = "rope"  # rope | learned | none
    max_seq_len: int = 4096  # rows of the learned position table; the harness reads no further, whatever the position
    rope: RopeConfig = field(default_factory=RopeConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)
    switch: SwitchConfig = field(default_factory=SwitchConfig)
    nsa: NSAConfig = field(default_factory=NSAConfig)
    norm_eps: float = 1e-6
    norm_zero_centered: bool = False  # RMSNorm multiplies by 1 + w, w from zero (Qwen3-Next), instead of w from one
    norm_gate: int = 0  # rank of a gate on every norm of the residual stream's width (GatedNorm, arXiv 2601.22966: 16); 0: none
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
        positive(
            self, "vocab_size", "d_model", "num_layers", "num_heads", "num_kv_heads", "head_dim", "ffn_dim", "max_seq_len",
            "norm_eps", "embedding_scale", "init_std",
        )  # fmt: skip
        not_negative(self, "window", "activation_clip", "sigmoid_length", "registers", "norm_gate")
        one_of(self, "sink", SINKS)
        one_of(self, "attention", ATTENTIONS)
        one_of(self, "sdpa_activation", ("none", "silu"))
        one_of(self, "position", POSITIONS)
        one_of(self, "dtype", DTYPES)
        one_of(self, "remat", REMATS)
        one_of(self, "kernel", KERNELS)
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
            heads = self.cache_heads if spec.position in ("g2", "g3") else self.num_heads
            if spec.source == "slice" and self.d_model % heads:
                raise ConfigError(f"gate {spec}: d_model={self.d_model} cannot be cut into a slice for each of {heads} heads")
        self._check_attention()
        if self.pattern:
            self._check_pattern()

    def _check_attention(self):
        check(
            (self.attention == "sigmoid") == (self.sigmoid_length > 0),
            f"attention={self.attention} with sigmoid_length={self.sigmoid_length}: sigmoid attention, and nothing else, needs the n "
            "of its bias -ln n; give it the length that the model is trained at (train.seq_len)",
        )
        check(
            self.attention == "softmax" or self.sink == "none",
            f"sink={self.sink} with attention={self.attention}: a sink logit belongs in a softmax; set sink=none",
        )
        check(
            self.attention == "softmax" or not self.registers,
            f"registers={self.registers} with attention={self.attention}: register tokens join a softmax only; set registers=0",
        )
        switch = self.switch
        if self.nsa.enabled:
            plain = {"attention": "softmax", "sink": "none", "registers": 0, "window": 0, "switch": SwitchConfig()}
            for name, value in plain.items():
                given = switch.projections if name == "switch" else getattr(self, name)
                check(
                    getattr(self, name) == value,
                    f"{name}={given} with nsa.enabled: its three branches are plain softmax attention, with nsa.window for the window",
                )
        check(
            not (self.attention_bias and "v" in switch.projections),
            f"attention_bias with switch.projections={switch.projections}: experts have no biases; set attention_bias=False",
        )
        for letter, name in (("v", "d_model"), ("o", "head_dim")):
            size = getattr(self, name)
            check(
                not (switch.split and letter in switch.projections and size % switch.num_experts),
                f"switch.split cuts {name}={size} into switch.num_experts={switch.num_experts} parts, which does not divide it",
            )

    def _check_pattern(self):
        count = len(self.period)
        check(
            count > 1,
            f"pattern={self.pattern!r} is of one layer, as all would be: give it to the model itself, or add layers after a |",
        )
        fewer = self.num_layers // count * count
        nearest = f"{fewer} or {fewer + count}" if fewer else f"{count}"
        check(
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
            check(key in PATTERN, f"{where}: layers may differ in {', '.join(PATTERN)}{suggest(key, PATTERN)}")
            check(value != "" and key not in changes, f"{where}: each setting of a layer is given once, with a value")
            if key == "window":
                check(value.isdecimal(), f"{where}: must be a number of tokens, or 0 for all")
            if key == "position":
                check("learned" not in (value, self.position), f"{where}: learned positions enter below the layers, all alike")
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
    def cache_heads(self) -> int:
        """Heads of the keys and values that attention looks at: K, 3 K with three branches, N where each query head has its own."""
        return self.num_heads if self.switch.query_routers else self.num_kv_heads * self.nsa.branches

    @property
    def is_moe(self) -> bool:
        return self.moe.num_experts > 0
