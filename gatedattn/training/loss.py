"""Next-token cross-entropy that never holds the logits of more than one chunk of tokens."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def next_token_loss(
    hidden: Float[Array, "B T D"],
    unembedding: Float[Array, "D V"],
    targets: Int[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    z_loss: float = 0.0,
    chunk: int = 2048,
) -> dict[str, Array]:
    """Sums over the unmasked tokens, so that any number of batches can be added up and divided by the total count once.

        logits = hidden @ unembedding,  lse = logsumexp(logits)
        ce_sum = sum(lse - logits[target]),  z_sum = sum(lse^2),  loss_sum = ce_sum + z_loss * z_sum

    `count` is the number of unmasked tokens, `correct` how many of them had the target among the largest logits. Only
    `loss_sum` carries a gradient. Float32 logits (float64 for float64 inputs) exist for `chunk` tokens at a time, also in the
    backward pass: the gradients of a chunk are computed right after its loss, which spares computing the logits a second time.
    """
    rows = targets.size
    chunks = -(-rows // chunk)
    chunk = -(-rows // chunks)  # even chunks need the least padding

    def split(x):
        # Chunk i takes the rows i, i + chunks, i + 2 * chunks, ...: a batch sharded over devices then stays so in each chunk.
        x = x.reshape(rows, *x.shape[2:])
        x = jnp.pad(x, [(0, chunk * chunks - rows)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(chunk, chunks, *x.shape[1:]).swapaxes(0, 1)

    return _chunked(split(hidden), unembedding, split(targets), split(mask.astype(bool)), z_loss)


def _chunk_sums(hidden, unembedding, targets, mask, z_loss, gradient: bool):
    """Sums of one chunk [R, D]; with `gradient`, also d loss_sum / d hidden and d loss_sum / d unembedding."""
    accumulate = jnp.promote_types(jnp.float32, hidden.dtype)
    w = unembedding.astype(hidden.dtype)
    logits = jnp.dot(hidden, w, preferred_element_type=accumulate)
    # A comparison, not a gather: it fuses, and it works when V is sharded.
    hit = jax.lax.broadcasted_iota(targets.dtype, logits.shape, 1) == targets[:, None]
    label = jnp.sum(jnp.where(hit, logits, 0), axis=-1)
    largest = jnp.max(logits, axis=-1)
    exp = jnp.exp(logits - largest[:, None])
    normalizer = jnp.sum(exp, axis=-1)
    lse = jnp.log(normalizer) + largest

    ce, z = jnp.where(mask, lse - label, 0), jnp.where(mask, lse**2, 0)
    sums = {
        "loss_sum": jnp.sum(ce + z_loss * z),
        "ce_sum": jnp.sum(ce),
        "z_sum": jnp.sum(z),
        "count": jnp.sum(mask, dtype=accumulate),
        "correct": jnp.sum(mask & (label >= largest), dtype=accumulate),
    }
    if not gradient:
        return sums
    d_logits = exp * ((1 + 2 * z_loss * lse) / normalizer)[:, None] - hit  # d ce = p - onehot, d lse^2 = 2 lse p
    d_logits = jnp.where(mask[:, None], d_logits, 0).astype(hidden.dtype)
    d_unembedding = jnp.dot(hidden.T, d_logits, preferred_element_type=accumulate)
    return sums, jnp.dot(d_logits, w.T), d_unembedding


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _chunked(hidden, unembedding, targets, mask, z_loss):
    def body(total, x):
        h, y, m = x
        return jax.tree.map(jnp.add, total, _chunk_sums(h, unembedding, y, m, z_loss, gradient=False)), None

    return jax.lax.scan(body, _zeros(hidden), (hidden, targets, mask))[0]


def _zeros(hidden):
    dtype = jnp.promote_types(jnp.float32, hidden.dtype)
    return {name: jnp.zeros((), dtype) for name in ("loss_sum", "ce_sum", "z_sum", "count", "correct")}


def _forward(hidden, unembedding, targets, mask, z_loss):
    def body(carry, x):
        total, d_unembedding = carry
        h, y, m = x
        sums, d_h, d_w = _chunk_sums(h, unembedding, y, m, z_loss, gradient=True)
        return (jax.tree.map(jnp.add, total, sums), d_unembedding + d_w), d_h

    zeros = _zeros(hidden)
    start = zeros, jnp.zeros(unembedding.shape, zeros["ce_sum"].dtype)
    (total, d_unembedding), d_hidden = jax.lax.scan(body, start, (hidden, targets, mask))
    return total, (d_hidden, d_unembedding.astype(unembedding.dtype))


def _backward(z_loss, gradients, cotangent):
    d_hidden, d_unembedding = gradients
    g = cotangent["loss_sum"]
    return (g * d_hidden).astype(d_hidden.dtype), (g * d_unembedding).astype(d_unembedding.dtype), None, None


_chunked.defvjp(_forward, _backward)
