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
from gatedattn.kernels.prefix import Prefix
from gatedattn.layers import Embedding, GatedAttentionBlock, Linear, rope
from gatedattn.layers.attention import Probe
from gatedattn.layers.norm import residual_norm
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
    compile time and program size do not grow with depth. With a `config.pattern` of P layers it is a list of P such blocks, of
    leading dimension L / P each ("layers/0/attention/query/kernel"), and a step of the scan passes through all P.
    """

    def __init__(self, config: TransformerConfig, *, param_dtype=jnp.float32, rngs: nnx.Rngs):
        self.config = config
        weights = dict(init_std=config.init_std, dtype=jnp.dtype(config.dtype), param_dtype=param_dtype, rngs=rngs)
        self.embedding = Embedding(config.vocab_size, config.d_model, **weights)
        self.position = Embedding(config.max_seq_len, config.d_model, **weights) if config.position == "learned" else None

        def stack(layer, keys):
            def block(key):
                return GatedAttentionBlock(layer, param_dtype=param_dtype, rngs=nnx.Rngs(key))

            graphdef = nnx.graphdef(nnx.eval_shape(lambda: block(0)))
            return nnx.merge(graphdef, jax.vmap(lambda key: nnx.split(block(key))[1])(keys))

        keys, period = jax.random.split(rngs.params(), config.num_layers), config.period
        stacks = [stack(layer, keys[i :: len(period)]) for i, layer in enumerate(period)]
        self.layers = nnx.List(stacks) if config.pattern else stacks[0]
        self.final_norm = residual_norm(config, param_dtype=param_dtype, rngs=rngs)
        self.head = None if config.tie_embeddings else Linear(config.d_model, config.vocab_size, **weights)
        self.registers = Embedding(config.registers, config.d_model, **weights) if config.registers else None

    @property
    def stacks(self) -> list[GatedAttentionBlock]:
        """The blocks of a period, in order: `layers`, as a list whether there is a pattern or not."""
        return list(self.layers) if self.config.pattern else [self.layers]

    def embed(self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """What enters the first layer."""
        x = self.config.embedding_scale * self.embedding(tokens)
        if self.position is not None:
            x = x + self.position(positions)
        return constrain(x, "BTD")

    def prefix(self) -> list[Prefix | None]:
        """Keys and values of the register tokens in every layer, [L / P, m, K, H] for each of the `stacks`; None without registers.

        They stand at the positions -m .. -1 of every document, see one another in causal order, and nothing before them: so they are the
        same for all documents, and packed ones share them. (Rotated scores depend on distances alone: tokens may count from 0.)
        """
        if self.registers is None:
            return [None] * len(self.stacks)
        config, table = self.config, self.registers.table[...]
        x = constrain((config.embedding_scale * table).astype(config.dtype)[None], "BTD")
        before = rope.turns(jnp.arange(-config.registers, 0)[None], config.rope, config.head_dim, x.dtype)
        graphdefs, params = zip(*map(nnx.split, self.stacks), strict=True)

        def period(x, layers):
            kept = []
            for graphdef, layer in zip(graphdefs, layers, strict=True):
                x, aux = nnx.merge(graphdef, layer)(x, before, keep=True)
                kept.append(aux["prefix"])
            return x, kept

        return jax.lax.scan(period, x, params)[1]

    def hidden(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        *,
        probe: Probe | None = None,
    ) -> tuple[Float[Array, "B T D"], dict]:
        """The residual stream after the final norm, before the head.

        `config.remat` says what the backward pass computes again instead of keeping it: none, no matrix product and no attention kernel
        (norms, activations, gates and rotations it does, but for those of experts); attn, also the attention half of each block
        (not the kernel); mlp, the other half; full, the whole block; offload, the whole block, its input waiting in the host's memory.

        aux holds, for a mixture of experts, load_balance and router_z (means over the layers), router_load [L, E] and
        router_entropy [L]; and aux["probe"], a tree with a leading L, if a probe is given (see `gatedattn.probes`). What only some
        layers of a pattern have (a gate, say) is NaN in the others.
        """
        config = self.config
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        x = self.embed(tokens, positions)
        graphdefs, params = zip(*map(nnx.split, self.stacks), strict=True)
        if any(layer.position == "rope" for layer in config.period):
            positions = rope.turns(positions, config.rope, config.head_dim, x.dtype)

        def block(graphdef):
            def apply(x, layer, prefix):
                x = checkpoint_name(x, "block_input")
                return nnx.merge(graphdef, layer)(x, positions, segment_ids, probe=probe, prefix=prefix)

            if config.remat in ("full", "offload"):
                apply = jax.checkpoint(apply, prevent_cse=False, policy=OFFLOAD if config.remat == "offload" else None)
            return apply

        blocks = list(map(block, graphdefs))

        def period(x, layers):
            found = []
            for apply, *layer in zip(blocks, *layers, strict=True):
                x, aux = apply(x, *layer)
                found.append(aux)
            return x, found

        x, found = jax.lax.scan(period, x, (params, self.prefix()))
        aux = in_layer_order(found) if config.pattern else found[0]
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


def in_layer_order(found: list):
    """What each of P blocks found in its layers, trees of [L / P, ...], as one tree of [L, ...]; NaN for layers without it."""
    present = [tree for tree in found if tree is not None]
    if isinstance(present[0], dict):
        names = dict.fromkeys(name for tree in present for name in tree)
        return {name: in_layer_order([None if tree is None else tree.get(name) for tree in found]) for name in names}

    def interleave(*arrays):
        rest = iter(arrays)
        filled = [jnp.full_like(arrays[0], jnp.nan) if tree is None else next(rest) for tree in found]
        return jnp.stack(filled, axis=1).reshape(-1, *arrays[0].shape[1:])

    return jax.tree.map(interleave, *present)


def abstract_parameters(config: TransformerConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Path -> shape and dtype of every parameter, nothing allocated."""
    params = jax.eval_shape(lambda: nnx.state(Transformer(config, rngs=nnx.Rngs(0)), nnx.Param))
    return {path_string(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}


def count(config: TransformerConfig) -> dict[str, int]:
    """Parameters in all, those that one token passes through (top-k of the experts), and those of embedding and head."""
    sizes = {path: math.prod(leaf.shape) for path, leaf in abstract_parameters(config).items()}
    embedding = sum(size for path, size in sizes.items() if path.startswith(("embedding/", "position/", "registers/", "head/")))
    gate = sum(size for path, size in sizes.items() if "/gates/" in path)
    active = sum(_active(config, path, size) for path, size in sizes.items())
    return {
        "params_total": sum(sizes.values()), "params_active": active, "params_embedding": embedding, "params_gate": gate,
    }  # fmt: skip


def _active(config: TransformerConfig, path: str, size: int) -> int:
    """How many of a parameter's numbers one token meets."""
    if re.search(r"moe/(gate|up|down)/", path):
        return size * config.moe.top_k // config.moe.num_experts
    projection = re.search(r"attention/(key|value|output)/kernel", path)
    if projection and projection[1][0] in config.switch.projections:
        return size * config.switch.top_k // config.switch.num_experts
    return size


def flops_per_token(config: TransformerConfig, seq_len: int) -> int:
    """Training FLOPs per token: 3 times the forward pass, recomputation not counted.

    Forward: 2 per active parameter that is multiplied (the embedding look-up is none, the head is), plus 4 N H per visible key and
    layer; a causal query sees (T + 1) / 2 keys on average, fewer with a window (so causal attention counts half), and the registers
    (whose own way through the layers, once a batch, is left out).
    """
    counts, nsa = count(config), config.nsa
    looked_up = config.d_model * (config.max_seq_len if config.position == "learned" else 0)
    looked_up += 0 if config.tie_embeddings else config.d_model * config.vocab_size
    looked_up += config.d_model * config.registers
    if nsa.enabled and nsa.sparse and nsa.compression == "mlp":  # once for a block, not for a token
        maps = 2 * config.num_kv_heads * (nsa.compress_block + 1) * config.head_dim**2
        looked_up += config.num_layers * (2 * (nsa.compress_block + 1) * config.head_dim**2 - maps // nsa.compress_stride)
        looked_up += config.num_layers * 2 * nsa.compress_block * config.head_dim
    return round(3 * (2 * (counts["params_active"] - looked_up) + _attention_flops(config, seq_len)))


def _attention_flops(config: TransformerConfig, seq_len: int) -> float:
    def read(window: int) -> float:
        w = min(window or seq_len, seq_len)
        return w - w * (w - 1) / (2 * seq_len)  # mean over queries of min(t + 1, window)

    nsa, keys = config.nsa, sum(read(layer.window) for layer in config.period) / len(config.period)
    if nsa.enabled and not nsa.sparse:
        keys *= 3
    elif nsa.enabled:
        ends = range(nsa.compress_block - 1, seq_len, nsa.compress_stride)  # of the compressed blocks
        compressed = sum(seq_len - end for end in ends) / seq_len
        keys = compressed + read(nsa.select_block * nsa.select_count) + read(nsa.window)
    return 4 * config.num_layers * config.num_heads * config.head_dim * (keys + config.registers)


def recomputed_flops_per_token(config: TransformerConfig, seq_len: int) -> int:
    """FLOPs per token that training does a second time: what `config.remat` asks for, and the scores in the attention kernel's
    backward pass (half its forward pass). The last product of what is recomputed is spared: nothing reads it.
    """
    again = {
        "none": "(?!)",
        "attn": r"attention/(?!output)",
        "mlp": r"(mlp|moe|shared)/(?!.*down)",
        "full": r"layers/(?!(\d+/)?(mlp|moe|moe/shared)/down)",
    }[config.remat.replace("offload", "full")]
    sizes = {path: math.prod(leaf.shape) for path, leaf in abstract_parameters(config).items() if re.search(again, path)}
    attention = _attention_flops(config, seq_len) * (1.5 if config.remat in ("full", "offload") else 0.5)
    return round(2 * sum(_active(config, path, size) for path, size in sizes.items() if path.endswith("kernel")) + attention)
