"""Flax NNX modules, as plain containers of parameters: no sharding metadata, nothing sown, results returned as `(y, aux)`."""

from gatedattn.layers.attention import Gate, GatedAttention
from gatedattn.layers.block import GatedAttentionBlock
from gatedattn.layers.linear import Embedding, Linear
from gatedattn.layers.mlp import MLP
from gatedattn.layers.moe import MoE
from gatedattn.layers.norm import RMSNorm

__all__ = ["MLP", "Embedding", "Gate", "GatedAttention", "GatedAttentionBlock", "Linear", "MoE", "RMSNorm"]
