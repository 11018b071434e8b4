"""What a setting may be: checks whose messages say what was given and what is allowed."""

from __future__ import annotations

import dataclasses
import difflib
import math


class ConfigError(ValueError):
    """A configuration that cannot run. The message says what was given, what is allowed, what to type instead."""


def check(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def positive(obj, *names: str) -> None:
    for name in names:
        value = getattr(obj, name)
        check(
            0 < value < math.inf, f"{type(obj).__name__}.{name}={value}: must be positive" + " and finite" * (value == math.inf)
        )


def not_negative(obj, *names: str) -> None:
    for name in names:
        value = getattr(obj, name)
        check(
            0 <= value < math.inf,
            f"{type(obj).__name__}.{name}={value}: must not be negative" + " nor infinite" * (value == math.inf),
        )


def one_of(obj, name: str, allowed: tuple[str, ...]) -> None:
    value = getattr(obj, name)
    if value not in allowed:
        raise ConfigError(
            f"{type(obj).__name__}.{name}={value!r}: must be one of {', '.join(allowed)}{suggest(value, allowed)}"
        )


def read_only_with(on: bool, switch: str, group: str, obj, *but: str) -> None:
    """Refuses settings that nothing would read: all but those named must have their defaults, unless `on`, which `switch` makes it."""
    given = [
        f"{group}.{f.name}={getattr(obj, f.name)}"
        for f in dataclasses.fields(obj)
        if f.name not in but and getattr(obj, f.name) != f.default
    ]
    check(on or not given, f"{', '.join(given)}: nothing would read it without {switch}; set that, or leave it out")


def suggest(word: str, known, most: int = 1) -> str:
    """`" (did you mean 'x'?)"` for the known word nearest to `word`, or the nearest ones; or an empty string."""
    near = difflib.get_close_matches(str(word), dict.fromkeys(map(str, known)), n=most, cutoff=0.5)
    return f" (did you mean {' or '.join(map(repr, near))}?)" if near else ""
