"""SwitchHead (arXiv 2312.07987): mixtures of experts in place of attention's key, value and output projections.

    v[s, m] = sum_e score[s, m, e] x_s W^V_e        (and k[s, m] likewise, by the same scores)
    out[t]  = sum_n sum_e score[t, n, e] y[t, n] W^O_e

over the `top_k` of E experts a head, score = sigmoid(x . w) for those: independent numbers that are not normalised, chosen by their
logits. The choice itself has no gradient. With one expert each projection is a plain one times a sigmoid of the hidden state: on the
value exactly the headwise gate g2, on the output exactly the headwise gate g1 (arXiv 2505.06708, appendix A.1).

All E maps are multiplied and the scores of those not chosen are zero: what is saved by choosing is not the computation here. The
authors' expert dropout and entropy regulariser, 0 in all their configurations, are left out.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from gatedattn.gates import INIT_STD
from gatedattn.layers.linear import Linear
from gatedattn.linear import project
from gatedattn.model_config import SwitchConfig
from gatedattn.sharding import constrain


class Router(nnx.Module):
    """score[t, m, e] = sigmoid(x_t . w_{m, e}) for the `top_k` largest of e, 0 for the others; float32. w ~ N(0, 0.02^2)."""

    def __init__(self, d_model: int, heads: int, config: SwitchConfig, *, param_dtype=jnp.float32, rngs: nnx.Rngs):
        self.top_k = config.top_k
        shape = (d_model, heads, config.num_experts)
        self.kernel = nnx.Param(INIT_STD * jax.random.normal(rngs.params(), shape, param_dtype))

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T M E"]:
        logits = project(x, self.kernel[...], out_dtype=jnp.float32)
        scores, E = jax.nn.sigmoid(logits), logits.shape[-1]
        if self.top_k == E:
            return scores
        _, chosen = lax.top_k(lax.stop_gradient(logits), self.top_k)
        return jnp.where((chosen[..., None] == jnp.arange(E)).any(-2), scores, 0)


def project_in(
    linear: Linear, x: Float[Array, "B T D"], scores: Float[Array, "B T M E"], config: SwitchConfig
) -> Float[Array, "B T M H"]:
    """sum_e scores[e] x W_e, with the K heads' experts side by side in `linear`, [D, K, E H]; M is K, or all N query heads.

    With `config.split` the kernel is [D, K, H], and expert e has the e-th of E equal parts of its rows.
    """
    E = config.num_experts
    if config.split:
        w = constrain(linear.kernel[...].astype(linear.dtype), ".K.")  # gathered, to be cut
        parts = x.astype(linear.dtype).reshape(*x.shape[:2], E, -1)
        maps = jnp.einsum("btei,eikh->btkeh", parts, w.reshape(E, -1, *w.shape[1:]))
    else:
        maps = linear(x)
        maps = maps.reshape(*maps.shape[:3], E, -1)
    B, T, K, _, H = maps.shape
    M = scores.shape[2]
    scores = constrain(scores, "BTK.").reshape(B, T, K, M // K, E)
    mixed = (scores[..., None] * maps[:, :, :, None].astype(jnp.float32)).sum(-2)
    return mixed.reshape(B, T, M, H).astype(linear.dtype)


def before_output(y: Float[Array, "B T N H"], scores: Float[Array, "B T N E"], config: SwitchConfig) -> Float[Array, "B T N I"]:
    """What the output projection multiplies: scores[e] y for every expert, I = E H; with `config.split` scores[e] times the e-th of
    E equal parts of y's channels, I = H."""
    parts = y.reshape(*y.shape[:3], config.num_experts if config.split else 1, -1)
    return (parts.astype(jnp.float32) * scores[..., None]).astype(y.dtype).reshape(*y.shape[:3], -1)
