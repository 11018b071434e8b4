"""What a forward pass looks like inside: the few numbers that training records, and all that the analysis shows."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from gatedattn.probes import activations, gates
from gatedattn.probes.attention import FIRST, Attention, documents_start, mean, places
from gatedattn.transformer import Transformer


def sink_rate(bos_share: Float[np.ndarray, "L N"], threshold: float = 0.3) -> float:
    """Share of (layer, head) pairs whose bos_share exceeds the threshold (0.3: arXiv 2410.10781; 0.8: arXiv 2504.02732)."""
    return float(np.mean(np.asarray(bos_share) > threshold))


def measure(
    model: Transformer,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    *,
    query_mask: Bool[Array, "B T"] | None = None,
) -> dict:
    """One forward pass, watched: what training records. All float32, with a leading L; padding (segment 0) is never counted.

        bos_share           [L, N]  mean over queries (a document's first token left out) of the attention probability on the
                                    first token of the query's document
        attention_self      [L, N]  the same mean of the probability on the query's own token
        attention_previous  [L, N]  the same mean of the probability on the token before it
        gates               {spec: {"mean", "below_0.1", "above_0.9"}}, each [L, M]: mean gate score over tokens (and channels),
                                    share of scores under 0.1 and over 0.9; M heads, 1 if the heads share a score
        branch_gates        [L, N, 3]  sparse attention: mean gate of the compressed, selected and sliding branch
        activation_max      [L]     largest |residual stream| after the block

    No T x T map is made (see `gatedattn.probes.attention`). Probability that a learned sink or a softmax-off-by-one takes belongs
    to no token, so it lowers all three.

    Args:
        segment_ids: packed documents; by default each row is one.
        query_mask: average attention over these queries only (Bigram-Backcopy: the non-trigger ones).
    """
    return _watch(_measure, model, tokens, positions, segment_ids, query_mask)[0]


def inspect(
    model: Transformer,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    *,
    query_mask: Bool[Array, "B T"] | None = None,
) -> tuple[dict, Float[Array, "B T D"]]:
    """What `measure` returns and the following, and the final hidden states. docs/definitions.md has the formulas.

        first_tokens        [L, N, 4]  as bos_share, on each of the first four tokens of a document, over the queries after it
        bos_by_position     [L, T, N]  as bos_share, by the query's place in its document; NaN where no document reaches
        attention_entropy   [L, N]     nats
        attention_distance  [L, N]     tokens between query and key
        sdpa, sdpa_gated    {"mean", "below_0.01", "below_0.001"} of |SDPA output|, each [L, N], before and after the g1 gates
        gates               {spec: ...} joined by "deciles" [L, M, 9], "histogram" [L, M, BINS] (its edges: `gates.edges`), "entropy"
                            (sigmoids) [L, M], "openness" [L, B, T, M] (mean score over channels), "weight_norm", "logit_min" and
                            "logit_max" [L, M]
        activations         {place: {"max", "row", "token", "channel"}}, each [L]: the largest |x| and where it sits; places: "input",
                            "attention" and "mlp" (what the sub-layer adds), "middle" (between them), "block" (after both)
        kurtosis            [L]        of the residual stream after the block
        activation_median   [L]        of |residual stream| after the block
        massive             [L]        share of tokens with |residual stream| > 100 and > 1000 medians after the block
        router_load [L, E], router_entropy [L]    mixture of experts

    Memory grows with T, not with T x T. Arguments as `measure`.
    """
    found, aux, hidden = _watch(_inspect, model, tokens, positions, segment_ids, query_mask)
    return found | {name: aux[name] for name in ("router_load", "router_entropy") if name in aux}, hidden


def _watch(look, model, tokens, positions, segment_ids, query_mask):
    """Run the model with the probe `look(kind, place, real, queries, **captured)`: what it found, the rest of aux, the output."""
    if segment_ids is None:
        segment_ids = jnp.ones_like(tokens)
    first = documents_start(segment_ids)
    real = segment_ids != 0
    queries = real & ~first if query_mask is None else real & ~first & query_mask
    probe = functools.partial(look, place=places(first), real=real, queries=queries)
    hidden, aux = model.hidden(tokens, positions, segment_ids, probe=probe)
    return aux.pop("probe"), aux, hidden


def _attention(place, captured) -> Attention:
    return Attention(place, **{name: captured[name] for name in ("q", "k", "lse", "kept", "weights", "attend", "mass")})


def _measure(kind: str, *, place, real, queries, **captured) -> dict:
    if kind == "block":
        return {"activation_max": jnp.abs(jnp.where(real[..., None], captured["x"], 0)).max().astype(jnp.float32)}
    attention = _attention(place, captured)

    def share(mass):
        return mean(mass.astype(jnp.float32), queries)

    result = {
        "bos_share": share(attention.on_first()[..., 0]),
        "attention_self": share(attention.on_self()),
        "attention_previous": share(attention.on_previous()),  # queries leave out first tokens: no other document's token
    }
    if captured["branches"] is not None:
        result["branch_gates"] = mean(captured["branches"], real)
    if captured["scores"]:
        result["gates"] = {spec: gates.shares(score, real) for spec, score in captured["scores"].items()}
    return result


def _inspect(kind: str, *, place, real, queries, **captured) -> dict:
    result = _measure(kind, place=place, real=real, queries=queries, **captured)
    if kind == "block":
        named = {"input": "start", "attention": "attention", "middle": "middle", "mlp": "mlp", "block": "x"}
        result["activations"] = {name: activations.largest(captured[key], real) for name, key in named.items()}
        return result | {"kurtosis": activations.kurtosis(captured["x"], real)} | activations.massive(captured["x"], real)

    attention = _attention(place, captured)
    mass = attention.on_first(FIRST).astype(jnp.float32)  # [B, T, N, 4]
    result["first_tokens"] = jnp.stack([mean(mass[..., i], queries & (place > i)) for i in range(FIRST)], axis=-1)
    T = place.shape[1]
    total = jnp.zeros((T, mass.shape[2])).at[place].add(jnp.where(queries[..., None], mass[..., 0], 0))
    count = jnp.zeros((T, 1)).at[place].add(queries[..., None].astype(jnp.float32))
    result["bos_by_position"] = jnp.where(count > 0, total / jnp.maximum(count, 1), jnp.nan)
    result["attention_entropy"] = mean(attention.entropy().astype(jnp.float32), queries)
    result["attention_distance"] = mean(attention.distance().astype(jnp.float32), queries)
    result |= {name: activations.sizes(captured[key], real) for name, key in (("sdpa", "sdpa"), ("sdpa_gated", "gated"))}
    for gate in captured["gates"]:
        spec = str(gate.spec)
        result["gates"][spec] |= gates.details(gate, captured["scores"][spec], captured["sources"][spec], real)
    return result
