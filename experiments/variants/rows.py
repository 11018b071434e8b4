"""What the sweep compares: rows by name, as options of the recipe, with the paper's own where it has one."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Row:
    """gate: the recipe's; options: what else differs; paper: the row's name in `gatedattn.variants`."""

    gate: str = "none"
    options: tuple[str, ...] = ()
    paper: str = ""


def size(d_model: int) -> tuple[str, ...]:
    """The recipe's shape at another width: heads of 64, FFN of 8/3 of it, embeddings scaled by its square root."""
    heads, ffn = d_model // 64, round(d_model * 8 / 3 / 16) * 16
    shape = {
        "d_model": d_model,
        "num_heads": heads,
        "num_kv_heads": heads,
        "ffn_dim": ffn,
        "embedding_scale": round(d_model**0.5),
    }
    return tuple(f"--config.model.{name}={value}" for name, value in shape.items())


LADDER = {64: ("baseline d64", "G1 d64"), 128: ("baseline d128", "G1 d128"), 192: ("baseline", "G1")}
ROWS = {
    "baseline": Row(paper="baseline"),
    "G1": Row("g1", paper="sdpa-elementwise"),
    "G2": Row("g2", paper="value-elementwise"),
    "G3": Row("g3", paper="key-elementwise"),
    "G4": Row("g4", paper="query-elementwise"),
    "G5": Row("g5", paper="dense-elementwise"),
    "G1 headwise": Row("g1:headwise", paper="sdpa-headwise"),
    "G1 head-shared": Row("g1:mean", paper="sdpa-shared"),
    "G1 input-independent": Row("g1:none", paper="sdpa-input-independent"),
    "G1 NS-sigmoid": Row("g1:ns_sigmoid", paper="sdpa-ns-sigmoid"),
    "G1 additive": Row("g1:add:silu", paper="sdpa-add-silu"),
    "learned sink": Row(options=("--config.model.sink=learned",)),
    "sandwich norm": Row(options=("--config.model.sandwich_norm=True",)),
    "QK-norm": Row(options=("--config.model.qk_norm=True",)),
    "learned positions": Row(options=("--config.model.position=learned",)),
    "learned positions, G1": Row("g1", ("--config.model.position=learned",)),
    "Muon": Row(options=("--config.optimizer.name=muon",)),
    "Muon, G1": Row("g1", ("--config.optimizer.name=muon",)),
}
NSA_BLOCKS = "compress_block=16 compress_stride=8 select_block=32 select_count=6 window=64".split()  # rows of 512 tokens
for name, changes in (
    ("NSA", NSA_BLOCKS),
    ("NSA, equal gates", (*NSA_BLOCKS, "gate=equal")),
    ("NSA, dense", ("sparse=False",)),
    ("NSA, dense, equal gates", ("sparse=False", "gate=equal")),
):  # what the gates do without the sparsity, and the sparsity without the gates
    ROWS[name] = Row(options=tuple(f"--config.model.nsa.{change}" for change in ("enabled=True", *changes)))
SMALLER = {row: Row(gate, size(d)) for d in (64, 128) for row, gate in zip(LADDER[d], ("none", "g1"))}
ROWS |= SMALLER
# Learning rates; of the other rows the recipe's only.
TIMES = {"baseline": (0.5, 1, 2, 4), "sandwich norm": (1, 2, 4), "G1": (0.5, 1, 2, 4)}
