"""Settings: fields of a configuration that a user may set, each with what is told of it and what it takes.

`setting` attaches a field's group, its help, its choices and its least value. Flags, environment, files, tables and
schemas are made from that (`service.config.sources`).
"""

from __future__ import annotations

from dataclasses import field, fields
from typing import Any

from core.errors import ConfigError


def setting(
    default: Any,
    group: str,
    help: str,
    *,
    flag: str = "",
    choices: tuple[str, ...] = (),
    metavar: str = "",
    low: float | None = None,
) -> Any:
    """A dataclass field that users may set, by default under its own name, else as `flag`.

    A default of None, "" or () makes it optional: not to be set is a value of its own. `low` is the least value.
    """
    told = {"group": group, "help": help, "flag": flag, "choices": choices, "metavar": metavar, "low": low}
    return field(default=default, metadata=told)


def check_settings(config: Any) -> None:
    """Raises ConfigError for a field of a dataclass, made by `setting`, whose value is not among what it takes."""
    for each in fields(config):
        name, value = each.metadata.get("flag") or each.name, getattr(config, each.name)
        if each.metadata.get("choices"):
            _one_of(name, value, each.metadata["choices"])
        at_least(name, value, each.metadata.get("low"))


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}; got {value!r}")


def at_least(name: str, value: float | None, low: float | None) -> None:
    """Raises ConfigError for a `value` of the setting `name` below `low`; None is no value, or no limit."""
    if value is not None and low is not None and not value >= low:
        raise ConfigError(f"{name} must be at least {low:g}; got {value!r}")
