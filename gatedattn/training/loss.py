"""Next-token cross-entropy that never holds the logits of more than one chunk of tokens."""

import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from gatedattn.linear import flipped, rowwise
from gatedattn.sharding import division, explicit


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

    Under a mesh each device goes through its own tokens, `chunk` at a time, and the gradient of the unembedding is summed over
    devices once, at the end.
    """
    return _loss(hidden, unembedding, targets, mask.astype(bool), z_loss, chunk)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _loss(hidden, unembedding, targets, mask, z_loss, chunk):
    return _on_devices(hidden, unembedding, targets, mask, z_loss, chunk, gradient=False)[0]


def _forward(hidden, unembedding, targets, mask, z_loss, chunk):
    total, *gradients = _on_devices(hidden, unembedding, targets, mask, z_loss, chunk, gradient=True)
    return total, gradients


def _backward(z_loss, chunk, gradients, cotangent):
    d_hidden, d_unembedding = gradients
    g = cotangent["loss_sum"]
    return (g * d_hidden).astype(d_hidden.dtype), (g * d_unembedding).astype(d_unembedding.dtype), None, None


_loss.defvjp(_forward, _backward)


def _on_devices(hidden, unembedding, targets, mask, z_loss, chunk, gradient: bool):
    """`_over_chunks` on each device's own tokens, and the sums over devices."""
    f = functools.partial(_over_chunks, z_loss=z_loss, chunk=chunk, gradient=gradient)
    w = unembedding.astype(hidden.dtype)  # before it is gathered
    cut = () if explicit() else tuple(division(letter, size) for letter, size in zip("BT", targets.shape, strict=True))
    axes = tuple(axis for part in cut for axis in part)
    if not axes:
        total, *gradients = f(hidden, w, targets, mask)
    else:
        sizes = jax.sharding.get_abstract_mesh().shape
        scatter = "fsdp" if "fsdp" in axes and hidden.shape[-1] % sizes["fsdp"] == 0 else None  # as the parameter lies

        def on_part(*part):
            total, *gradients = f(*part)
            if gradients:
                gradients[1] = _sum_over_devices(gradients[1], [axis for axis in axes if axis != scatter], scatter)
            return jax.lax.psum(total, axes), *gradients

        rows = P(*(part or None for part in cut))
        outs = (P(), rows, P(scatter)) if gradient else (P(),)
        ins = (rows, P(), rows, rows)
        total, *gradients = jax.shard_map(on_part, in_specs=ins, out_specs=outs, axis_names=set(axes), check_vma=False)(
            hidden, w, targets, mask
        )
    if gradients:
        gradients[1] = gradients[1].astype(unembedding.dtype)
        # Summed before the layers' backward pass begins: else every device keeps its own [D, V] in full precision until after it.
        gradients = jax.lax.optimization_barrier(gradients)
    return total, *gradients


def _sum_over_devices(d_w: Float[Array, "D V"], axes: list[str], scatter: str | None) -> Float[Array, "d V"]:
    """The sum over `axes` and `scatter`; of the rows, those that are this device's. A large one is summed a part at a time: the TPU
    compiler makes two copies of what it sums and scatters.
    """
    if not scatter:
        return jax.lax.psum(d_w, axes)
    devices = jax.lax.axis_size(scatter)
    d_w = d_w.reshape(devices, -1, d_w.shape[1])
    parts = _parts(d_w.shape[1], d_w, 8)
    rows = d_w.shape[1] // parts

    def part(i):
        rows_of_each = jax.lax.dynamic_slice_in_dim(d_w, i * rows, rows, axis=1)
        return jax.lax.psum(jax.lax.psum_scatter(rows_of_each, scatter), axes)

    return jax.lax.map(part, jnp.arange(parts)).reshape(-1, d_w.shape[2])


def _over_chunks(hidden, w, targets, mask, z_loss, chunk, gradient: bool):
    """The sums over all rows; with `gradient`, also d loss_sum / d hidden and d loss_sum / d w, the latter in full precision."""
    rows = targets.size
    chunks = -(-rows // chunk)
    chunk = -(-rows // chunks)  # even chunks need the least padding

    def split(x):
        x = x.reshape(rows, *x.shape[2:])
        x = jnp.pad(x, [(0, chunk * chunks - rows)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(chunks, chunk, *x.shape[1:])

    def body(carry, x):
        total, *d_w = carry
        sums, *gradients = _chunk_sums(x[0], w, *x[1:], z_loss, gradient)
        total = jax.tree.map(jnp.add, total, sums)
        if not gradient:
            return (total,), ()
        d_hidden, d_logits = gradients
        return (total, _add_product(d_w[0], x[0], d_logits)), d_hidden

    dtype = jnp.promote_types(jnp.float32, hidden.dtype)
    start = ({name: jnp.zeros((), dtype) for name in ("loss_sum", "ce_sum", "z_sum", "count", "correct")},)
    start += (jnp.zeros(w.shape, dtype),) if gradient else ()
    (total, *d_w), d_hidden = jax.lax.scan(body, start, (split(hidden), split(targets), split(mask)))
    if not gradient:
        return (total,)
    d_hidden = d_hidden.reshape(chunk * chunks, -1)[:rows].reshape(hidden.shape)
    return total, d_hidden, d_w[0]


def _chunk_sums(hidden, w, targets, mask, z_loss, gradient: bool):
    """Sums of one chunk [R, D]; with `gradient`, also d loss_sum / d hidden and d loss_sum / d logits."""
    accumulate = jnp.promote_types(jnp.float32, hidden.dtype)
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
        return (sums,)
    d_logits = exp * ((1 + 2 * z_loss * lse) / normalizer)[:, None] - hit  # d ce = p - onehot, d lse^2 = 2 lse p
    d_logits = jnp.where(mask[:, None], d_logits, 0).astype(hidden.dtype)
    return sums, rowwise(d_logits, w).astype(hidden.dtype), d_logits


LARGE = 2**28  # bytes of a float32 [D, V]: of more there should not be two


def _parts(rows: int, d_w, most: int) -> int:
    return math.gcd(rows, most) if d_w.size * d_w.dtype.itemsize > LARGE else 1


def _add_product(d_w: Float[Array, "D V"], hidden: Float[Array, "R D"], d_logits: Float[Array, "R V"]) -> Float[Array, "D V"]:
    """d_w + hidden^T d_logits, half of the rows at a time: XLA adds a whole product to a second array, a part in place."""
    parts = _parts(len(d_w), d_w, 2)  # each reads all of d_logits
    if parts == 1:
        return d_w + jnp.dot(flipped(hidden), d_logits, preferred_element_type=d_w.dtype)
    rows = len(d_w) // parts

    def add(i, d_w):
        columns = jax.lax.dynamic_slice_in_dim(hidden, i * rows, rows, axis=1)
        product = jnp.dot(flipped(columns), d_logits, preferred_element_type=d_w.dtype)
        return jax.lax.dynamic_update_slice_in_dim(
            d_w, jax.lax.dynamic_slice_in_dim(d_w, i * rows, rows) + product, i * rows, 0
        )

    return jax.lax.fori_loop(0, parts, add, d_w)
