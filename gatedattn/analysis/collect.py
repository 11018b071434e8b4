"""One model, one text: everything that is measured, on the host."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float, Int

from gatedattn import probes
from gatedattn.config import ConfigError, TransformerConfig, to_mapping
from gatedattn.data.tokenizers import Tokenizer
from gatedattn.training.loss import next_token_loss
from gatedattn.training.recorder import finite
from gatedattn.transformer import Transformer, count

LARGE = {"bos_by_position", "openness"}  # arrays with a dimension for the tokens: too long for JSON


@dataclass(frozen=True)
class Analysis:
    """found: what `probes.inspect` returns, as numpy; maps: of the first `window` tokens of the first row, for chosen layers."""

    name: str
    config: TransformerConfig
    tokens: Int[np.ndarray, "B T"]
    labels: list[str]  # the first row's tokens, as text
    loss: float
    found: dict
    layers: list[int]
    maps: Float[np.ndarray, "layers N window window"]

    @property
    def gate_mean(self) -> dict[str, float]:
        """Mean score of each gate over the layers that have it, heads, tokens and channels."""
        return {spec: float(np.nanmean(gate["mean"])) for spec, gate in self.found.get("gates", {}).items()}

    def row(self) -> dict:
        """The model's row of the paper's Table 4, with what this project records as well.

        M-Act is the mean over layers of the largest |residual stream| after the layer, massive tokens the share of those with a
        massive activation in the layer with most of them, F-Attn the mean over layers and heads of bos_share."""
        share = self.found["bos_share"]
        return {
            "model": self.name,
            "gates": self.config.layer_gates,
            "mean gate": self.gate_mean,
            "M-Act": float(np.mean(self.found["activation_max"])),
            "massive tokens": float(np.max(self.found["massive"])),
            "F-Attn": float(np.mean(share)),
            "best head": float(np.max(share)),
            "sink rate (0.3)": probes.sink_rate(share),
            "sink rate (0.8)": probes.sink_rate(share, 0.8),
            "loss": self.loss,
            "perplexity": math.exp(min(self.loss, 700)),
        }

    def mapping(self) -> dict:
        """JSON-ready: the row, the configuration, and what was found, but for what has a value for every token."""

        def small(found: dict) -> dict:
            return {k: small(v) if isinstance(v, dict) else v for k, v in found.items() if k not in LARGE}

        about = {"rows": len(self.tokens), "tokens_per_row": self.tokens.shape[1], "params": count(self.config)["params_total"]}
        return finite(self.row() | about | {"config": to_mapping(self.config)} | small(self.found))

    def arrays(self) -> dict[str, np.ndarray]:
        """The rest."""
        gates = {f"openness/{spec}": gate["openness"] for spec, gate in self.found.get("gates", {}).items()}
        positions = {"bos_by_position": self.found["bos_by_position"]}
        return {"tokens": self.tokens, "layers": np.array(self.layers), "maps": self.maps} | positions | gates


def rows_of(text: str, tokenizer: Tokenizer, rows: int, length: int) -> Int[np.ndarray, "B T"]:
    """The beginning of a text as rows of `length` tokens, each beginning with BOS; fewer or shorter ones if the text is short."""
    # No token is longer than a few dozen characters on average text: do not tokenize a whole library for its first page.
    ids = tokenizer.encode(text[: 64 * rows * length])
    if len(ids) < 2:
        raise ConfigError(f"the text has {len(ids)} tokens: at least two are needed")
    body = min(length - 1, len(ids))
    rows = min(rows, len(ids) // body)
    parts = ids[: rows * body].reshape(rows, body)
    return np.concatenate([np.full((rows, 1), tokenizer.bos_id, parts.dtype), parts], axis=1).astype(np.int32)


def label(tokenizer: Tokenizer, token: int) -> str:
    """A token as one would print it in a figure."""
    if token == tokenizer.bos_id:
        return "BOS"
    return tokenizer.decode([token]).replace("\n", "⏎").replace(" ", "·") or f"#{token}"


def spread(layers: int, count: int = 4) -> list[int]:
    """`count` layers from the first to the last."""
    return sorted({round(i) for i in np.linspace(0, layers - 1, min(count, layers))})


def analyze_model(
    model: Transformer,
    tokenizer: Tokenizer,
    text: str,
    *,
    name: str = "model",
    rows: int = 4,
    length: int = 512,
    layers: Sequence[int] = (),
    window: int = 24,
) -> Analysis:
    """Read the beginning of a text with a model and measure what happens inside.

    Args:
        rows, length: how much of the text: rows of `length` tokens, BOS included. Memory grows with rows x length.
        layers, window: attention maps of these layers (spread evenly by default), of the first `window` tokens only.

    Raises `ConfigError` if the text or the request does not fit the model.
    """
    config = model.config
    if length < 3:
        raise ConfigError(f"length={length}: must be at least 3")
    if config.position == "learned" and length > config.max_seq_len:
        raise ConfigError(f"length={length}: {name} has learned only {config.max_seq_len} positions")
    for layer in layers:
        if not 0 <= layer < config.num_layers:
            raise ConfigError(f"layer {layer}: {name} has the layers 0 .. {config.num_layers - 1}")
    if tokenizer.vocab_size > config.vocab_size:
        raise ConfigError(f"{name}: its tokenizer has {tokenizer.vocab_size} ids, the model {config.vocab_size}")
    tokens = rows_of(text, tokenizer, rows, length)
    layers = list(layers) or spread(config.num_layers)
    graphdef, params = nnx.split(model)
    found, loss = jax.device_get(_look(params, tokens, graphdef=graphdef))
    maps = jax.device_get(_maps(params, tokens[:1, :window], np.array(layers), graphdef=graphdef))
    labels = [label(tokenizer, int(token)) for token in tokens[0]]
    return Analysis(name, config, tokens, labels, float(loss), found, layers, maps)


@functools.partial(jax.jit, static_argnames="graphdef")
def _look(params, tokens, *, graphdef):
    model = nnx.merge(graphdef, params)
    found, hidden = probes.inspect(model, tokens)
    targets = jnp.roll(tokens, -1, axis=1)
    mask = jnp.ones_like(tokens, bool).at[:, -1].set(False)
    sums = next_token_loss(hidden, model.unembedding(), targets, mask)
    return found, sums["ce_sum"] / sums["count"]


@functools.partial(jax.jit, static_argnames="graphdef")
def _maps(params, tokens, layers, *, graphdef):
    return probes.attention_maps(nnx.merge(graphdef, params), tokens)[layers, 0]
