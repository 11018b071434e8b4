"""How attention scores become weights."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

HIDDEN = -1e30  # score of a hidden key; finite, so that a block without visible keys gives exp(-inf) = 0 rather than NaN
EPSILON = 1e-8  # softpick's, as in its authors' code
KINDS = ("softmax", "sigmoid", "softpick")


@dataclasses.dataclass(frozen=True)
class Weights:
    """w[t, s] from a query's scores a_s over the keys s that it sees:

        softmax     exp(a_s) / sum_j exp(a_j)
        sigmoid     sigmoid(a_s + bias): every key by itself, no normaliser (arXiv 2409.04431, where bias = -ln n for sequences of n)
        softpick    max(exp(a_s) - 1, 0) / (sum_j |exp(a_j) - 1| + 1e-8): may be zero for all keys (arXiv 2504.20966)

    The methods serve kernels that meet the keys block by block. A block adds to a numerator and to a divisor, both in units of
    exp(`top`), where top is at least every score met so far (and 0, but for softmax: then nothing overflows); the logarithm of the whole
    divisor, `log_total`, is all that the weights need afterwards. A sigmoid divides by 1.
    """

    kind: str = "softmax"
    bias: float = 0.0

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"weights={self.kind!r}: must be one of {', '.join(KINDS)}")

    def top(self, scores: Float[Array, "*R S"]) -> Float[Array, "*R"]:
        highest = scores.max(-1)
        return {"softmax": highest, "softpick": jnp.maximum(highest, 0), "sigmoid": jnp.zeros_like(highest)}[self.kind]

    def terms(self, scores: Float[Array, "*R S"], top: Float[Array, "*R"]) -> tuple[Float[Array, "*R S"], Float[Array, "*R S"]]:
        """What each key adds to the numerator (times its value) and to the divisor."""
        weights = self.of(scores, top)
        if self.kind == "softpick":
            negative = -jnp.exp(-top)[..., None] * jnp.expm1(jnp.minimum(scores, 0))
            return weights, weights + jnp.where(scores == HIDDEN, 0, negative)
        return weights, weights if self.kind == "softmax" else jnp.zeros_like(weights)

    def divisor(self, total: Float[Array, "*R"]) -> Float[Array, "*R"]:
        return {"softmax": total, "softpick": total + EPSILON, "sigmoid": jnp.ones_like(total)}[self.kind]

    def of(self, scores: Float[Array, "*R S"], log_total: Float[Array, "*R"]) -> Float[Array, "*R S"]:
        if self.kind == "sigmoid":
            return jax.nn.sigmoid(scores + self.bias)
        weights = jnp.exp(scores - log_total[..., None])
        return -weights * jnp.expm1(-jax.nn.relu(scores)) if self.kind == "softpick" else weights

    def gradient(
        self,
        scores: Float[Array, "*R S"],
        weights: Float[Array, "*R S"],
        log_total: Float[Array, "*R"],
        dw: Float[Array, "*R S"],
        delta: Float[Array, "*R"],
    ) -> Float[Array, "*R S"]:
        """d loss / d scores, from dw = d loss / d weights with the divisor held fast, and delta = -d loss / d log_total."""
        if self.kind == "sigmoid":
            return weights * (1 - weights) * dw
        if self.kind == "softpick":  # d (exp(a) - 1) = exp(a), above 0; d |exp(a) - 1| = sign(a) exp(a)
            return jnp.exp(scores - log_total[..., None]) * ((scores > 0) * dw - jnp.sign(scores) * delta[..., None])
        return weights * (dw - delta[..., None])

    def dense(self, scores: Float[Array, "*R S"]) -> tuple[Float[Array, "*R S"], Float[Array, "*R"]]:
        """The definition: all weights of a query at once, and `log_total`. Hidden keys have scores of -inf."""
        if self.kind == "softmax":
            return jax.nn.softmax(scores, axis=-1), jax.nn.logsumexp(scores, axis=-1)
        if self.kind == "sigmoid":
            return jax.nn.sigmoid(scores + self.bias), jnp.zeros_like(scores[..., 0])
        top = jax.lax.stop_gradient(jnp.maximum(scores.max(-1, keepdims=True), 0))
        grown = jnp.where(scores == -jnp.inf, 0, jnp.exp(scores - top) - jnp.exp(-top))
        total = jnp.abs(grown).sum(-1, keepdims=True) + EPSILON
        return jax.nn.relu(grown) / total, (top + jnp.log(total))[..., 0]


SOFTMAX = Weights()
