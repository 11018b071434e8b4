"""The model: embedding -> scan over blocks -> norm -> head; and its parameter and FLOP counts."""

from __future__ import annotations

import math
import re

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from gatedattn.config import TransformerConfig
from gatedattn.layers import Embedding, GatedAttentionBlock, Linear, RMSNorm, rope
from gatedattn.layers.attention import Probe
from gatedattn.linear import project
from gatedattn.sharding import constrain, path_string

OFFLOAD = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["block_input"],
    offload_src="device",
    offload_dst="pinned_host",
)


class Transformer(nnx.Module):
    """A decoder-only language model with gated attention.

    `layers` is one `GatedAttentionBlock` whose parameters carry a leading dimension L; the forward pass scans over it, so that
    compile time and program size do not grow with depth.
    """

    def __init__(self, config: TransformerConfig, *, param_dtype=jnp.float32, rngs: nnx.Rngs):
        self.config = config
        weights = dict(init_std=config.init_std, dtype=jnp.dtype(config.dtype), param_dtype=param_dtype, rngs=rngs)
        self.embedding = Embedding(config.vocab_size, config.d_model, **weights)
        self.position = Embedding(config.max_seq_len, config.d_model, **weights) if config.position == "learned" else None

        def layer(key):
            return nnx.split(GatedAttentionBlock(config, param_dtype=param_dtype, rngs=nnx.Rngs(key)))

        keys = jax.random.split(rngs.params(), config.num_layers)
        graphdef = nnx.split(nnx.eval_shape(lambda: GatedAttentionBlock(config, param_dtype=param_dtype, rngs=nnx.Rngs(0))))[0]
        self.layers = nnx.merge(graphdef, jax.vmap(lambda key: layer(key)[1])(keys))
        self.final_norm = RMSNorm(
            config.d_model, eps=config.norm_eps, zero_centered=config.norm_zero_centered, param_dtype=param_dtype
        )
        self.head = None if config.tie_embeddings else Linear(config.d_model, config.vocab_size, **weights)

    def embed(self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """What enters the first layer."""
        x = self.config.embedding_scale * self.embedding(tokens)
        if self.position is not None:
            x = x + self.position(positions)
        return constrain(x, "BTD")

    def hidden(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        *,
        probe: Probe | None = None,
    ) -> tuple[Float[Array, "B T D"], dict]:
        """The residual stream after the final norm, before the head.

        `config.remat` says what the backward pass computes again instead of keeping it: none; attn, the attention half of each block
        (projections, norms, gates; not the attention kernel); mlp, the other half; full, the whole block; offload, the whole block,
        its input waiting in the host's memory.

        aux holds, for a mixture of experts, load_balance and router_z (means over the layers), router_load [L, E] and
        router_entropy [L]; and aux["probe"], a tree with a leading L, if a probe is given (see `gatedattn.probes`).
        """
        config = self.config
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        x = self.embed(tokens, positions)
        graphdef, params = nnx.split(self.layers)
        if config.position == "rope":
            positions = rope.turns(positions, config.rope, config.head_dim, x.dtype)

        def block(x, layer):
            x = checkpoint_name(x, "block_input")
            return nnx.merge(graphdef, layer)(x, positions, segment_ids, probe=probe)

        if config.remat in ("full", "offload"):
            block = jax.checkpoint(block, prevent_cse=False, policy=OFFLOAD if config.remat == "offload" else None)
        x, aux = jax.lax.scan(block, x, params)
        for name in ("load_balance", "router_z"):
            if name in aux:
                aux[name] = aux[name].mean()
        return self.final_norm(x), aux

    def unembedding(self) -> Float[Array, "D V"]:
        """The matrix that turns the final hidden state into logits."""
        return self.embedding.table[...].T if self.head is None else self.head.kernel[...]

    def logits(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Logits of the final hidden state, in at least float32."""
        return project(x, self.unembedding(), out_dtype=jnp.promote_types(x.dtype, jnp.float32))

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T V"], dict]:
        """Logits in at least float32. For training use `hidden` with the chunked loss, which never holds all logits."""
        x, aux = self.hidden(tokens, positions, segment_ids)
        return self.logits(x), aux


def abstract_parameters(config: TransformerConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Path -> shape and dtype of every parameter, nothing allocated."""
    params = jax.eval_shape(lambda: nnx.state(Transformer(config, rngs=nnx.Rngs(0)), nnx.Param))
    return {path_string(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}


def count(config: TransformerConfig) -> dict[str, int]:
    """Parameters in all, those that one token passes through (top-k of the experts), and those of embedding and head."""
    sizes = {path: math.prod(leaf.shape) for path, leaf in abstract_parameters(config).items()}
    embedding = sum(size for path, size in sizes.items() if path.startswith(("embedding/", "position/", "head/")))
    gate = sum(size for path, size in sizes.items() if "/gates/" in path)
    active = sum(_active(config, path, size) for path, size in sizes.items())
    return {
        "params_total": sum(sizes.values()), "params_active": active, "params_embedding": embedding, "params_gate": gate,
    }  # fmt: skip


def _active(config: TransformerConfig, path: str, size: int) -> int:
    """How many of a parameter's numbers one token meets."""
    expert = "moe/" in path and path.split("/")[2] in ("gate", "up", "down")
    return size * config.moe.top_k // config.moe.num_experts if expert else size


def flops_per_token(config: TransformerConfig, seq_len: int) -> int:
    """Training FLOPs per token: 3 times the forward pass, recomputation not counted.

    Forward: 2 per active parameter that is multiplied (the embedding look-up is none, the head is), plus 4 N H per visible key and
    layer; a causal query sees (T + 1) / 2 keys on average, fewer with a window (so causal attention counts half).
    """
    counts = count(config)
    looked_up = config.d_model * (config.max_seq_len if config.position == "learned" else 0)
    looked_up += 0 if config.tie_embeddings else config.d_model * config.vocab_size
    return round(3 * (2 * (counts["params_active"] - looked_up) + _attention_flops(config, seq_len)))


def _attention_flops(config: TransformerConfig, seq_len: int) -> float:
    window = min(config.window or seq_len, seq_len)
    keys = window - window * (window - 1) / (2 * seq_len)  # mean over queries of min(t + 1, window)
    return 4 * config.num_layers * config.num_heads * config.head_dim * keys


def recomputed_flops_per_token(config: TransformerConfig, seq_len: int) -> int:
    """FLOPs per token that training does a second time: what `config.remat` asks for, and the scores in the attention kernel's
    backward pass (half its forward pass). The last product of what is recomputed is spared: nothing reads it.
    """
    again = {
        "none": "(?!)",
        "attn": r"attention/(?!output)",
        "mlp": r"(mlp|moe|shared)/(?!.*down)",
        "full": r"layers/(?!(mlp|moe|moe/shared)/down)",
    }[config.remat.replace("offload", "full")]
    sizes = {path: math.prod(leaf.shape) for path, leaf in abstract_parameters(config).items() if re.search(again, path)}
    attention = _attention_flops(config, seq_len) * (1.5 if config.remat in ("full", "offload") else 0.5)
    return round(2 * sum(_active(config, path, size) for path, size in sizes.items() if path.endswith("kernel")) + attention)
