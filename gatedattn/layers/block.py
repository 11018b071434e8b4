"""One layer of the transformer."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from gatedattn import kernels
from gatedattn.config import TransformerConfig
from gatedattn.kernels.prefix import Prefix
from gatedattn.layers.attention import Cache, GatedAttention, Probe
from gatedattn.layers.mlp import MLP
from gatedattn.layers.moe import MoE
from gatedattn.layers.norm import residual_norm
from gatedattn.linear import PRODUCT
from gatedattn.sharding import constrain

SAVED = jax.checkpoint_policies.save_only_these_names(kernels.SAVED)
PRODUCTS = jax.checkpoint_policies.save_only_these_names(PRODUCT)


def keep_attention(primitive, *avals, **params):
    """A rematerialisation policy: keeps what the attention kernel returned, known by its name, or (GPUs' name nothing) by its call."""
    called = primitive.name == "pallas_call" or primitive.name.startswith("dot_product_attention_fwd")
    return called or SAVED(primitive, *avals, **params)


def keep_products(primitive, *avals, **params):
    """Keeps matrix products, too. Norms, activations, gates and rotations are computed again: cheaper than to write and read them."""
    return keep_attention(primitive, *avals, **params) or PRODUCTS(primitive, *avals, **params)


SIZES = ("d_model", "num_heads", "num_kv_heads", "head_dim", "ffn_dim")


class GatedAttentionBlock(nnx.Module):
    """x = x + clip(post(attention(norm(x))));   x = x + clip(post(mlp(norm(x)))).

    `mlp` is a SwiGLU MLP or a mixture of experts; `post` is an RMSNorm with `config.sandwich_norm` and the identity otherwise; `clip`
    limits each output to +-`config.activation_clip`, if that is set.

    Args:
        config, fields: a `TransformerConfig`, or those of its fields that concern a layer as keywords; without a config the sizes
            must be given: `GatedAttentionBlock(d_model=512, num_heads=8, num_kv_heads=2, head_dim=64, ffn_dim=1408, rngs=rngs)`.
        dtype: of the computation, any floating type; the config's by default.

    Raises:
        ValueError: settings that do not fit together. TypeError: a size is missing.
    """

    def __init__(
        self, config: TransformerConfig | None = None, *, dtype=None, param_dtype=jnp.float32, rngs: nnx.Rngs, **fields: Any
    ):
        if config is None:
            experts = "moe" in fields and fields["moe"].num_experts
            missing = [name for name in SIZES if name not in fields and not (name == "ffn_dim" and experts)]
            if missing:
                raise TypeError(f"GatedAttentionBlock needs a config, or {', '.join(missing)}")
        config = dataclasses.replace(config or TransformerConfig(), **fields)
        dtype = jnp.dtype(dtype or config.dtype)
        self.clip, self.remat = config.activation_clip, config.remat

        def norm():
            return residual_norm(config, dtype=dtype, param_dtype=param_dtype, rngs=rngs)

        weights = dict(init_std=config.init_std, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.attention_norm, self.mlp_norm = norm(), norm()
        self.attention_post_norm, self.mlp_post_norm = (norm(), norm()) if config.sandwich_norm else (None, None)
        self.attention = GatedAttention(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            d_model=config.d_model,
            gates=config.gate_specs,
            qk_norm=config.qk_norm,
            rope=config.rope if config.position == "rope" else None,
            window=config.window,
            sink=config.sink,
            attention=config.attention,
            sigmoid_length=config.sigmoid_length,
            sdpa_norm=config.sdpa_norm,
            sdpa_activation=config.sdpa_activation,
            switch=config.switch,
            nsa=config.nsa,
            use_bias=config.attention_bias,
            output_bias=config.output_bias,
            norm_eps=config.norm_eps,
            norm_zero_centered=config.norm_zero_centered,
            kernel=config.kernel,
            **weights,
        )
        self.mlp = None if config.is_moe else MLP(config.d_model, config.ffn_dim, **weights)
        self.moe = MoE(config.d_model, config.moe, **weights) if config.is_moe else None

    def __call__(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        *,
        probe: Probe | None = None,
        cache: Cache | None = None,
        prefix: Prefix | None = None,
        keep: bool = False,
    ) -> tuple[Float[Array, "B T D"], dict]:
        """Arguments as for `GatedAttention`; aux holds the MoE's losses and loads, aux["probe"] what the probe made of this layer,
        aux["cache"] the cache grown by x."""

        def attend(x):
            with jax.named_scope("attention"):
                options = dict(probe=probe, cache=cache, prefix=prefix, keep=keep)
                y, aux = self.attention(self.attention_norm(x), positions, segment_ids, **options)
                return self._finish(y, self.attention_post_norm), aux

        def mix(middle):
            with jax.named_scope("mlp"):
                if self.moe is None:
                    y, aux = self.mlp(self.mlp_norm(middle)), {}
                else:
                    y, aux = self.moe(self.mlp_norm(middle), None if segment_ids is None else segment_ids != 0)
                return self._finish(y, self.mlp_post_norm), aux

        checkpoint = functools.partial(jax.checkpoint, prevent_cse=False)
        if self.remat in ("none", "attn", "mlp"):  # of the others the whole block is computed again, see Transformer.hidden
            if cache is None:  # nobody differentiates with one
                attend = checkpoint(attend, policy=keep_attention if self.remat == "attn" else keep_products)
            if self.remat == "mlp":
                mix = checkpoint(mix)
            elif self.moe is None:
                mix = checkpoint(mix, policy=keep_products)
        attended, aux = attend(x)
        middle = constrain(x + attended, "BTD")
        y, moe_aux = mix(middle)
        result = constrain(middle + y, "BTD")
        aux |= moe_aux
        if probe is not None:
            aux["probe"] |= probe("block", start=x, attention=attended, middle=middle, mlp=y, x=result)
        return result, aux

    def _finish(self, y, post_norm):
        y = y if post_norm is None else post_norm(y)
        return jnp.clip(y, -self.clip, self.clip) if self.clip else y
