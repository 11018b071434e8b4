"""Everything that can be wrong with a run before something is compiled."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jax

from gatedattn import data as data_lib
from gatedattn import kernels
from gatedattn.config import ConfigError, RunConfig
from gatedattn.data import Data
from gatedattn.kernels import grouped
from gatedattn.training import hosts, recorder
from gatedattn.training.placement import Placement


def prepare(
    config: RunConfig, workdir: str | Path | None, devices: Sequence[jax.Device] | None = None
) -> tuple[Data, Placement, dict]:
    """Platform, kernel, mesh and data of a run, opened.

    Returns the data, the placement, and what config.json tells besides the configuration. Raises `ConfigError`.
    """
    wanted = config.train.platform
    try:
        found = jax.default_backend()
    except RuntimeError as error:
        raise ConfigError(f"JAX finds no device: {str(error).splitlines()[0]}") from None
    if wanted not in ("any", found):
        raise ConfigError(
            f"train.platform={wanted}, but JAX found only {found}: install JAX for {wanted}, or set train.platform=any"
        )
    place = Placement.of(config, devices or jax.devices())
    kernel, passed, _ = choose_kernels(config, place)
    with hosts.one_after_the_other("data"):
        data = data_lib.load(
            config.data,
            seq_len=config.train.seq_len,
            batch_size=config.train.batch_size,
            seed=config.train.seed,
            workdir=workdir,
            vocab_size=config.model.vocab_size,
        )
    return data, place, recorder.environment(place.devices) | {"kernel": kernel, "kernels_passed_over": passed}


def choose_kernels(config: RunConfig, place: Placement) -> tuple[str, list[str], str | None]:
    """The attention kernel of a run and which better ones were passed over, and the grouped product of its experts, if it has any.

    Raises `ConfigError` for a kernel that cannot do what the run asks.
    """
    model = config.model
    try:
        experts = (
            grouped.choose(model.moe.kernel, place.platform, model.dtype) if model.is_moe and not model.moe.capacity else None
        )
        return *kernels.choose(model.kernel, attention_request(config, place)), experts
    except ValueError as error:
        raise ConfigError(f"model.{error}") from None


def attention_request(config: RunConfig, place: Placement) -> kernels.Request:
    """What a run will ask of an attention kernel."""
    model, ways = config.model, place.mesh.shape["context"] if place.mesh else 1
    window, sinks = max(layer.window for layer in model.period), any(layer.sink != "none" for layer in model.period)
    return kernels.Request(
        platform=place.platform, dtype=model.dtype, head_dim=model.head_dim, segment_ids=True, window=window, sinks=sinks,
        prefix=model.registers > 0, weights=model.attention, selected=model.nsa.enabled and model.nsa.sparse,
        context=ways, seq_len=config.train.seq_len,
    )  # fmt: skip
