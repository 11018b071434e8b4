"""The one table between our parameters and Hugging Face's tensors, read in both directions.

A row ties a tensor of theirs to a parameter of ours, or to the two that q_proj packs together:

    Row("model.layers.{l}.self_attn.k_proj.weight", ("layers/attention/key/kernel", "(K H) D -> D K H"))

`{l}` and `{e}` run over layers and experts, our leading dimensions L and E. The pattern names dimensions (letters as in
`gatedattn.config`; S the shared expert's F, C the width of a gate score: H, or 1 if headwise), brackets merge them. Every
rearrangement is a view where numpy can make one, so that reading a slice of a memory-mapped tensor touches that slice.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Array

from gatedattn.config import ConfigError, TransformerConfig
from gatedattn.interop.tensors import Tensor
from gatedattn.transformer import abstract_parameters


class Part(NamedTuple):
    path: str  # our parameter
    pattern: str  # "theirs -> ours", without the leading L and E


class Row:
    """`key` of theirs and its part or parts. Several parts share the second axis of their patterns: theirs is [first * sum of
    seconds, ...], i.e. within each index of the first axis, the rows of one part follow those of the other."""

    def __init__(self, key: str, *parts: tuple[str, str]):
        self.key, self.parts = key, tuple(Part(*part) for part in parts)


LAYER = "model.layers.{l}."
ATTENTION, MLP = LAYER + "self_attn.", LAYER + "mlp."
QUERY, GATE = "layers/attention/query/", "layers/attention/gates/0/"

TABLE = (
    Row("model.embed_tokens.weight", ("embedding/table", "V D -> V D")),
    Row("model.norm.weight", ("final_norm/weight", "D -> D")),
    Row("lm_head.weight", ("head/kernel", "V D -> D V")),
    Row(LAYER + "input_layernorm.weight", ("layers/attention_norm/weight", "D -> D")),
    Row(LAYER + "post_attention_layernorm.weight", ("layers/mlp_norm/weight", "D -> D")),
    Row(ATTENTION + "k_proj.weight", ("layers/attention/key/kernel", "(K H) D -> D K H")),
    Row(ATTENTION + "v_proj.weight", ("layers/attention/value/kernel", "(K H) D -> D K H")),
    Row(ATTENTION + "o_proj.weight", ("layers/attention/output/kernel", "D (N H) -> N H D")),
    Row(ATTENTION + "k_proj.bias", ("layers/attention/key/bias", "(K H) -> K H")),
    Row(ATTENTION + "v_proj.bias", ("layers/attention/value/bias", "(K H) -> K H")),
    Row(ATTENTION + "o_proj.bias", ("layers/attention/output/bias", "D -> D")),
    Row(ATTENTION + "q_norm.weight", ("layers/attention/query_norm/weight", "H -> H")),
    Row(ATTENTION + "k_norm.weight", ("layers/attention/key_norm/weight", "H -> H")),
    Row(MLP + "gate_proj.weight", ("layers/mlp/gate/kernel", "F D -> D F")),
    Row(MLP + "up_proj.weight", ("layers/mlp/up/kernel", "F D -> D F")),
    Row(MLP + "down_proj.weight", ("layers/mlp/down/kernel", "D F -> F D")),
    Row(MLP + "gate.weight", ("layers/moe/router/kernel", "E D -> D E")),
    Row(MLP + "experts.{e}.gate_proj.weight", ("layers/moe/gate/kernel", "X D -> D X")),
    Row(MLP + "experts.{e}.up_proj.weight", ("layers/moe/up/kernel", "X D -> D X")),
    Row(MLP + "experts.{e}.down_proj.weight", ("layers/moe/down/kernel", "D X -> X D")),
    Row(MLP + "shared_expert.gate_proj.weight", ("layers/moe/shared/gate/kernel", "S D -> D S")),
    Row(MLP + "shared_expert.up_proj.weight", ("layers/moe/shared/up/kernel", "S D -> D S")),
    Row(MLP + "shared_expert.down_proj.weight", ("layers/moe/shared/down/kernel", "D S -> S D")),
    Row(MLP + "shared_expert_gate.weight", ("layers/moe/score/kernel", "One D -> D One")),
)
# q_proj by packing: no gate in it; per KV group all queries, then all gates (the paper's authors); per head query, then gate
# (Qwen3-Next). With one query head per KV head the last two are the same.
Q_PROJ = {
    "none": (
        Row(ATTENTION + "q_proj.weight", (QUERY + "kernel", "(N H) D -> D N H")),
        Row(ATTENTION + "q_proj.bias", (QUERY + "bias", "(N H) -> N H")),
    ),
    "group": (
        Row(
            ATTENTION + "q_proj.weight",
            (QUERY + "kernel", "K (G H) D -> D (K G) H"),
            (GATE + "kernel", "K (G C) D -> D (K G) C"),
        ),
        Row(ATTENTION + "q_proj.bias", (QUERY + "bias", "K (G H) -> (K G) H"), (GATE + "bias", "K (G C) -> (K G) C")),
    ),
    "head": (
        Row(ATTENTION + "q_proj.weight", (QUERY + "kernel", "N H D -> D N H"), (GATE + "kernel", "N C D -> D N C")),
        Row(ATTENTION + "q_proj.bias", (QUERY + "bias", "N H -> N H"), (GATE + "bias", "N C -> N C")),
    ),
}


def axes(side: str) -> list[str]:
    return side.replace("(", " ").replace(")", " ").split()


def extent(side: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Shape of one side of a pattern: "K (G H) D" -> (K, G*H, D)."""
    groups, shape = iter(side.replace("(", " ( ").replace(")", " ) ").split()), []
    for token in groups:
        merged = itertools.takewhile(lambda t: t != ")", groups) if token == "(" else (token,)
        shape.append(math.prod(sizes[letter] for letter in merged))
    return tuple(shape)


def rearrange(array: np.ndarray, source: str, target: str, sizes: Mapping[str, int]) -> np.ndarray:
    """`array`, laid out as one side of a pattern, laid out as the other."""
    letters = axes(source)
    apart = array.reshape([sizes[letter] for letter in letters])
    return apart.transpose([letters.index(letter) for letter in axes(target)]).reshape(extent(target, sizes))


class Layout:
    """The rows that a model of this config has, with every dimension's size.

    Args:
        packing: of q_proj, see `Q_PROJ`.
    """

    def __init__(self, config: TransformerConfig, packing: str = "none"):
        moe, gates = config.moe, config.gate_specs
        self.sizes = {
            "V": config.vocab_size, "D": config.d_model, "N": config.num_heads, "K": config.num_kv_heads, "H": config.head_dim,
            "G": config.num_heads // config.num_kv_heads, "F": config.ffn_dim, "E": moe.num_experts, "X": moe.expert_dim,
            "S": moe.shared_dim, "C": 1 if gates and gates[0].granularity == "headwise" else config.head_dim, "One": 1,
        }  # fmt: skip
        self.config = config
        self.shapes = {path: leaf.shape for path, leaf in abstract_parameters(config).items()}
        self.rows = [row for row in TABLE + Q_PROJ[packing] if row.parts[0].path in self.shapes]
        self.home = {part.path: (row, i) for row in self.rows for i, part in enumerate(row.parts)}
        if strange := sorted(self.shapes.keys() - self.home.keys()):
            raise ConfigError(f"no Hugging Face tensor corresponds to {', '.join(strange)}")

    def _seconds(self, row: Row) -> list[int]:
        return [extent(part.pattern.split("->")[0], self.sizes)[1] for part in row.parts]

    def their_shape(self, row: Row) -> tuple[int, ...]:
        first = extent(row.parts[0].pattern.split("->")[0], self.sizes)
        return first if len(row.parts) == 1 else (first[0] * sum(self._seconds(row)), *first[2:])

    def split(self, row: Row, array: np.ndarray, i: int) -> np.ndarray:
        """Our i-th part of their tensor."""
        theirs, ours = row.parts[i].pattern.split("->")
        if len(row.parts) > 1:
            seconds, first = self._seconds(row), extent(theirs, self.sizes)[0]
            begin = sum(seconds[:i])
            array = array.reshape(first, sum(seconds), *array.shape[1:])[:, begin : begin + seconds[i]]
        return rearrange(array, theirs, ours, self.sizes)

    def merge(self, row: Row, arrays: list[np.ndarray]) -> np.ndarray:
        """Their tensor from our parts."""
        theirs = [
            rearrange(a, *reversed(part.pattern.split("->")), self.sizes) for a, part in zip(arrays, row.parts, strict=True)
        ]
        return theirs[0] if len(theirs) == 1 else np.concatenate(theirs, axis=1).reshape(self.their_shape(row))

    def stack(self, row: Row) -> tuple[int, ...]:
        """Sizes of the leading dimensions of ours that are separate tensors of theirs: (), (L,) or (L, E)."""
        return (self.config.num_layers,) * ("{l}" in row.key) + (self.config.moe.num_experts,) * ("{e}" in row.key)

    def keys(self, row: Row) -> Iterator[tuple[tuple[int, ...], str]]:
        """((layer, expert), key) of each tensor of a row."""
        for at in np.ndindex(*self.stack(row)):
            yield at, row.key.format(**dict(zip("le", at, strict=False)))

    # --- theirs -> ours ------------------------------------------------------------------------------------------------------

    def check(
        self, shapes: Mapping[str, tuple[int, ...]], where: str, ignored: Callable[[str], bool] = lambda key: False
    ) -> None:
        """Raise `ConfigError` unless the tensors there are exactly those the model needs, in their shapes."""
        wanted = {key: self.their_shape(row) for row in self.rows for _, key in self.keys(row)}
        faults = [f"{key} is missing" for key in wanted if key not in shapes]
        faults += [
            f"{k} is {tuple(shapes[k])}, must be {shape}" for k, shape in wanted.items() if k in shapes and shapes[k] != shape
        ]
        faults += [f"{key} is left over" for key in shapes if key not in wanted and not ignored(key)]
        if faults:
            more = f"; and {len(faults) - 10} more" if len(faults) > 10 else ""
            raise ConfigError(f"{where} does not fit its config.json: {'; '.join(faults[:10])}{more}")

    def parameters(self, tensors: Mapping[str, np.ndarray]) -> dict[str, Assembled]:
        """Our parameters by path, made of their tensors when and as far as they are indexed."""
        return {path: Assembled(self, path, tensors) for path in self.shapes}

    # --- ours -> theirs ------------------------------------------------------------------------------------------------------

    def tensors(self, params: Mapping[str, Array], norm_shift: float = 0.0) -> Iterator[Tensor]:
        """Their tensors, each made when it is read: one layer of one of our parameters is on the host at a time.

        `norm_shift` is added to norm weights, in float32: -1 where theirs are zero-centred and ours are not, 1 the other way.
        """
        cache: dict[str, tuple[tuple[int, ...], np.ndarray]] = {}

        def layer(path: str, at: tuple[int, ...]) -> np.ndarray:
            if cache.get(path, (None,))[0] != at:
                array = np.asarray(params[path][at])
                cache[path] = at, array.astype(np.float32) + np.float32(norm_shift) if shifted(path) else array
            return cache[path][1]

        def shifted(path: str) -> bool:
            return bool(norm_shift) and path.endswith("norm/weight")

        def make(row: Row, at: tuple[int, ...]) -> Callable[[], np.ndarray]:
            return lambda: self.merge(row, [layer(part.path, at[:1])[at[1:]] for part in row.parts])

        for row in sorted(self.rows, key=lambda row: "{l}" in row.key):
            cache.clear()
            path = row.parts[0].path
            dtype = np.dtype(np.float32 if shifted(path) else params[path].dtype)
            for at, key in self.keys(row):
                yield Tensor(key, self.their_shape(row), dtype, make(row, at))


class Assembled:
    """One of our parameters, not yet read. Indexing it, by slices and by numbers in the leading dimensions, reads those slices
    of their tensors that it needs, and no more."""

    def __init__(self, layout: Layout, path: str, tensors: Mapping[str, np.ndarray]):
        self.layout, self.path, self.tensors, self.shape = layout, path, tensors, layout.shapes[path]
        self.row, self.part = layout.home[path]
        self.stack = layout.stack(self.row)

    def _key(self, at: tuple[int, ...]) -> str:
        return self.row.key.format(**dict(zip("le", at, strict=False)))

    @property
    def dtype(self) -> np.dtype:
        return getattr(self.tensors, "dtype", None) or self.tensors[self._key((0,) * len(self.stack))].dtype

    def __getitem__(self, index: int | slice | tuple[int | slice, ...]) -> np.ndarray:
        index = index if isinstance(index, tuple) else (index,)
        index += (slice(None),) * (len(self.shape) - len(index))
        depth = len(self.stack)
        lists = [(range(n)[i],) if isinstance(i, int) else range(n)[i] for i, n in zip(index, self.stack, strict=False)]
        pieces = (
            self.layout.split(self.row, self.tensors[self._key(at)], self.part)[index[depth:]]
            for at in itertools.product(*lists)
        )
        if not depth:
            return next(pieces)
        result = None
        for to, piece in zip(np.ndindex(*map(len, lists)), pieces, strict=True):
            if result is None:
                result = np.empty([*map(len, lists), *piece.shape], piece.dtype)
            result[to] = piece
        return result[tuple(0 if isinstance(i, int) else slice(None) for i in index[:depth])]
