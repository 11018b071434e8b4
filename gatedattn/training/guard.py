"""Bad steps: recognised and skipped on the device, so that nothing waits for the host.

A step is bad if its loss or its gradient norm is not finite, or spikes. With m the running median of the last `window` good
steps and s = 1.4826 median(|x - m|) their robust standard deviation, x is a spike if

    x > m + max(rise, deviations * s),    rise = loss_rise for the loss, grad_rise * m for the gradient norm

once `WARM_UP` steps have been seen. The thresholds are those by which `python -m gatedattn spikes` reads a logged curve, the
deviation is not: here it is that of the window at hand, there a running median of centred rises, which a trend does not widen
but which needs three times the warm-up (docs/definitions.md). And here every step counts, not every logged one.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from gatedattn.config import GuardConfig

WARM_UP = 10  # good steps that a running median needs
RECORDS = 64  # bad steps whose particulars wait on the device to be logged
NONFINITE, LOSS, GRADIENT = 1, 2, 4  # bits of a record's reason
REASONS = {NONFINITE: "not finite", LOSS: "loss spike", GRADIENT: "gradient spike"}


class GuardState(NamedTuple):
    """Replicated over all devices; saved with the parameters."""

    history: Float[Array, "2 W"]  # loss and gradient norm of the last good steps, a ring
    seen: Int[Array, ""]  # good steps so far
    in_row: Int[Array, ""]  # skipped steps up to now without one between that was not
    skipped: Int[Array, ""]  # all of them
    bad: Int[Array, ""]  # bad steps so far, skipped or not
    steps: Int[Array, "R"]  # the last bad steps, a ring: step (from 1), loss and gradient norm, and why
    values: Float[Array, "R 2"]
    reasons: Int[Array, "R"]


def init(config: GuardConfig) -> GuardState:
    zero = jnp.zeros((), jnp.int32)
    records = jnp.zeros(RECORDS, jnp.int32)
    history = jnp.zeros((2, config.window), jnp.float32)
    return GuardState(history, zero, zero, zero, zero, records, jnp.zeros((RECORDS, 2), jnp.float32), records)


def spikes(config: GuardConfig, history: Float[Array, "2 W"], seen: Int[Array, ""], x: Float[Array, "2"]) -> Bool[Array, "2"]:
    """Whether the loss and the gradient norm `x` stand out of their histories."""
    count = jnp.minimum(seen, config.window)
    known = jnp.arange(config.window) < count

    def median(values):
        ordered = jnp.sort(jnp.where(known, values, jnp.inf), axis=-1)
        low, high = jnp.maximum(count - 1, 0) // 2, count // 2
        return (ordered[..., low] + ordered[..., jnp.minimum(high, config.window - 1)]) / 2

    m = median(history)
    deviation = 1.4826 * median(jnp.abs(history - m[:, None]))
    rise = jnp.stack([jnp.float32(config.loss_rise), config.grad_rise * m[1]])
    return (count >= min(config.window, WARM_UP)) & (x > m + jnp.maximum(rise, config.deviations * deviation))


def judge(
    config: GuardConfig, state: GuardState, step: Int[Array, ""], loss: Float[Array, ""], grad_norm: Float[Array, ""]
) -> tuple[Bool[Array, ""], GuardState]:
    """Whether the update of this step (from 0) is to be applied, and the state after it."""
    x = jnp.stack([loss, grad_norm]).astype(jnp.float32)
    finite = jnp.all(jnp.isfinite(x))
    high = spikes(config, state.history, state.seen, x)
    reason = jnp.where(finite, LOSS * high[0] + GRADIENT * high[1], NONFINITE).astype(jnp.int32)
    bad = reason > 0
    apply = ~bad if config.skip == "spikes" else finite
    # A spike whose update is applied is what the loss is like now, and joins the history; a skipped one never happened.
    at = state.seen % config.window
    history = jnp.where(apply, state.history.at[:, at].set(x), state.history)
    record = state.bad % RECORDS

    def noted(ring, value):
        return jnp.where(bad, ring.at[record].set(value), ring)

    return apply, GuardState(
        history=history,
        seen=state.seen + apply,
        in_row=jnp.where(apply, 0, state.in_row + 1),
        skipped=state.skipped + ~apply,
        bad=state.bad + bad,
        steps=noted(state.steps, step + 1),
        values=noted(state.values, x),
        reasons=noted(state.reasons, reason),
    )


def select(apply: Bool[Array, ""], new, old):
    """The tree `new` where the update is applied, else `old`."""
    return jax.tree.map(lambda a, b: jnp.where(apply, a, b), new, old)


def records(state: GuardState, told: int) -> list[dict]:
    """What is to be logged of a state on the host: the bad steps after the first `told`, oldest first, as far as they are kept."""
    first = max(told, int(state.bad) - RECORDS)
    lines = []
    for number in range(first, int(state.bad)):
        at = number % RECORDS
        loss, grad_norm = (float(value) for value in np.asarray(state.values[at]))
        why = [text for bit, text in REASONS.items() if int(state.reasons[at]) & bit]
        lines.append({"step": int(state.steps[at]), "reason": ", ".join(why), "loss": loss, "grad_norm": grad_norm})
    return lines
