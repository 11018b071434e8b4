"""Gated attention (arXiv 2505.06708) in JAX and Flax NNX."""

from gatedattn.config import RunConfig, TransformerConfig
from gatedattn.gates import GateSpec
from gatedattn.layers import MLP, Gate, GatedAttention, GatedAttentionBlock, MoE, RMSNorm
from gatedattn.transformer import Transformer
from gatedattn.version import __version__

__all__ = [
    "MLP",
    "Gate",
    "GateSpec",
    "GatedAttention",
    "GatedAttentionBlock",
    "MoE",
    "RMSNorm",
    "RunConfig",
    "Transformer",
    "TransformerConfig",
    "__version__",
]
