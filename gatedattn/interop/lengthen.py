"""RoPE changed when a model is loaded, so that it reads further than it was trained to."""

from __future__ import annotations

import dataclasses

from gatedattn.config import ConfigError, RopeConfig, TransformerConfig, from_mapping, suggest

EXAMPLE = "yarn,factor=4 or linear,factor=2 or theta=1000000"


def lengthen(config: TransformerConfig, rope: str, trained: int) -> TransformerConfig:
    """`config` with the RoPE settings that `rope` names changed: `RopeConfig`'s, comma-separated, a bare word being the scaling.

        lengthen(config, "yarn,factor=4", 8192)              reads 32,768 tokens, the model having been trained at 8,192
        lengthen(config, "theta=1000000", 4096)              another base (the paper goes from 10,000 to 1,000,000 at 32k)

    `max_seq_len`, how far evaluations read, becomes `original_max_len` x `factor` if that is more. `trained` is `original_max_len`
    unless `rope` gives it. An extension that the model already has is replaced, not added to.

    Raises:
        ConfigError: a key or a value that `RopeConfig` has not, a scaling without a factor, a model without RoPE.
    """
    if config.position != "rope":
        raise ConfigError(f"rope={rope!r}: the model has position={config.position}, not rope")
    kinds = {f.name: type(f.default) for f in dataclasses.fields(RopeConfig)}
    given: dict[str, str | int | float] = {}
    for item in filter(None, map(str.strip, rope.split(","))):
        key, equals, value = map(str.strip, item.partition("="))
        key, value = (key, value) if equals else ("scaling", key)
        if key not in kinds:
            raise ConfigError(f"rope={rope!r}: no setting {key!r}{suggest(key, kinds)}; e.g. {EXAMPLE}")
        if key in given:
            raise ConfigError(f"rope={rope!r}: {key} is given twice")
        try:
            given[key] = value if kinds[key] is str else float(value)
        except ValueError:
            raise ConfigError(f"rope={rope!r}: {key}={value!r} must be a number") from None
    if given.get("scaling", "none") != "none" and "factor" not in given:
        raise ConfigError(
            f"rope={rope!r}: by how much? Add factor=, the length to reach over the {trained} tokens it was trained at"
        )
    now = dataclasses.asdict(config.rope)
    if "scaling" in given:  # nothing of the extension it had
        now |= {f.name: f.default for f in dataclasses.fields(RopeConfig) if f.name not in ("theta", "fraction")}
        now["original_max_len"] = trained
    settings = from_mapping(RopeConfig, now | given, "rope")
    reach = round(settings.original_max_len * settings.factor) if settings.scaling != "none" else 0
    return dataclasses.replace(config, rope=settings, max_seq_len=max(config.max_seq_len, reach))
