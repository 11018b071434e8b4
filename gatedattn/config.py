"""The configuration of a run: frozen dataclasses that check themselves.

`RunConfig` is the whole of it. On the command line it wears an `ml_collections.ConfigDict` (see `to_config_dict`);
`from_mapping` turns that skin into the dataclasses exactly once, refuses unknown keys with the nearest match, and from then
on nothing can change. Every default of the project stands here, or in `gatedattn.model_config` for the model, and nowhere else.

Dimension letters, used in einsums, jaxtyping strings and sharding rules throughout the project:

    B batch   T query length   S key length   D model   N query heads   K key/value heads   G = N/K query heads per KV head
    H head dim   F feed-forward   E experts   V vocabulary   L layers
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field

from gatedattn.checks import ConfigError, check, not_negative, one_of, positive
from gatedattn.checks import suggest as suggest
from gatedattn.model_config import GROUPED_KERNELS as GROUPED_KERNELS
from gatedattn.model_config import KERNELS as KERNELS
from gatedattn.model_config import MoEConfig as MoEConfig
from gatedattn.model_config import NSAConfig as NSAConfig
from gatedattn.model_config import RopeConfig as RopeConfig
from gatedattn.model_config import SwitchConfig as SwitchConfig
from gatedattn.model_config import TransformerConfig


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
        one_of(self, "bos", ("document", "row"))
        check(bool(self.source), "data.source is empty: give e.g. tfds:sotu, text:books/*.txt or synthetic:backcopy")
        check(0 < self.valid_fraction < 1, f"data.valid_fraction={self.valid_fraction}: must be in (0, 1)")


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
        positive(self, "steps", "batch_size", "seq_len", "microbatches", "log_every", "loss_chunk")
        not_negative(self, "z_loss", "seed")
        one_of(self, "platform", ("any", "cpu", "gpu", "tpu"))
        check(
            self.batch_size % self.microbatches == 0,
            f"train.batch_size={self.batch_size} is not a multiple of train.microbatches={self.microbatches}",
        )
        for name, value in (
            ("steps", self.steps),
            ("seed", self.seed),
            ("batch_size x seq_len", self.batch_size * self.seq_len),
        ):
            check(value < 2**31, f"train.{name}={value}: must be below 2^31")


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
        one_of(self, "name", ("adamw", "muon"))
        one_of(self, "schedule", ("cosine", "wsd", "constant"))
        positive(self, "learning_rate", "eps", "muon_learning_rate")
        not_negative(self, "warmup_steps", "end_learning_rate", "weight_decay", "clip_norm")
        for name in ("b1", "b2", "muon_momentum"):
            check(0 <= getattr(self, name) < 1, f"optimizer.{name}={getattr(self, name)}: must be in [0, 1)")
        check(0 < self.decay_fraction <= 1, f"optimizer.decay_fraction={self.decay_fraction}: must be in (0, 1]")
        check(
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
        one_of(self, "skip", ("nonfinite", "spikes"))
        one_of(self, "action", ("stop", "rewind"))
        positive(self, "deviations", "patience")
        not_negative(self, "loss_rise", "grad_rise", "rewinds")
        check(self.window >= 4, f"guard.window={self.window}: must be at least 4 steps, a median needs some")


@dataclass(frozen=True)
class ProbeConfig:
    every: int = 100  # steps between lines of heads.jsonl; 0: never
    rows: int = 8  # held-out sequences the probe looks at (the same ones each time)

    def __post_init__(self):
        not_negative(self, "every")
        positive(self, "rows")


@dataclass(frozen=True)
class EvalConfig:
    every: int = 500  # steps between evaluations; 0: only after the last step
    batches: int = 8  # batches of held-out rows per evaluation; 0: all of them
    # What else is measured, separated by ";": "perplexity:books=books/*.txt; harness:hellaswag,arc_easy; ruler:niah_single_1,vt@4096"
    tasks: str = ""
    tasks_every: int = 0  # steps between these, a multiple of `every`; 0: at every evaluation
    limit: int = 100  # items of a harness task, samples of a RULER task; 0: all (RULER: 500)
    include_path: str = ""  # a folder with harness tasks of one's own

    def __post_init__(self):
        not_negative(self, "every", "batches", "tasks_every", "limit")
        check(
            not self.tasks_every or self.every > 0 and self.tasks_every % self.every == 0,
            f"eval.tasks_every={self.tasks_every}: must be a multiple of eval.every={self.every}, or 0 for every evaluation",
        )


@dataclass(frozen=True)
class CheckpointConfig:
    every: int = 500  # steps between checkpoints; 0: only at the end or when interrupted
    keep: int = 2  # the newest so many
    keep_every: int = 0  # and for good those of the steps that this divides; 0: none
    may_change: str = ""  # settings that may differ when a run goes on, besides those that always may: optimizer.clip_norm,...

    def __post_init__(self):
        not_negative(self, "every", "keep_every")
        positive(self, "keep")


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
            check(size == -1 or size >= 1, f"mesh.{name}={size}: must be a positive number or -1")
        check(
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
        check(
            bool(re.fullmatch(r"[\w.,:=+@ -]+", self.name)) and not self.name.startswith("."),
            f"name={self.name!r}: the run's folder is named after it; letters, digits and any of _.,:=+@- will do",
        )
        check(
            self.guard.action == "stop" or self.checkpoint.every > 0,
            "guard.action=rewind with checkpoint.every=0: there would be no checkpoint to go back to; set checkpoint.every",
        )
        check(
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
    check(isinstance(mapping, Mapping), f"{path or cls.__name__}={mapping!r}: must be a group of settings, not a value")
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
