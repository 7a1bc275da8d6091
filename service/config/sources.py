"""Reads a frozen dataclass of settings from flags, the environment and one YAML file, in that order of precedence.

It knows no setting by name: `core.config.setting` attaches to a dataclass field what the readers, `--help` and the
documentation need, and `load` walks the fields, those of nested dataclasses too. Every message names where the bad
value came from.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, reduce
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from core.errors import ConfigError
from service.config.yaml_files import MAX_YAML_BYTES, load_yaml

ENV_PREFIX = "SLIPSTREAM_"

_TRUE = frozenset({"true", "1", "yes", "on"})
_FALSE = frozenset({"false", "0", "no", "off"})
_NONE = "none"

Config = TypeVar("Config")


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: a dataclass field and what was attached to it."""

    name: str
    place: tuple[str, ...]
    """The fields that lead to it, its own last."""
    kind: type
    group: str
    help: str
    default: Any
    choices: tuple[str, ...]
    metavar: str
    low: float | None

    @property
    def optional(self) -> bool:
        """Whether "not set" is a value of its own."""
        return self.default in (None, "", ())

    @property
    def flag(self) -> str:
        """The flag on the command line; a switch has a `--no-` twin."""
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        """The environment variable."""
        return ENV_PREFIX + self.name.upper()

    def parse(self, raw: Any, source: str) -> Any:
        """`raw`, text or a YAML scalar, as a value of this setting; ConfigError naming `source` otherwise."""
        if raw is None or (self.optional and isinstance(raw, str) and raw.lower() == _NONE):
            if self.optional:
                return self.default
            raise ConfigError(f"{source}: needs a value")
        value = _READERS[self.kind](raw)
        if value is None:
            raise ConfigError(f"{source}: {raw!r} is not {_NOUNS[self.kind]}")
        if self.choices and value not in self.choices:
            raise ConfigError(f"{source}: must be one of {', '.join(self.choices)}; got {raw!r}")
        if self.low is not None and not value >= self.low:
            raise ConfigError(f"{source}: must be at least {self.low:g}; got {raw!r}")
        return value


def settings_of(config: Any) -> Mapping[str, Setting]:
    """The settings of a dataclass and of those that it holds, by name.

    In the order they are written, those of one group together. Worked out once per class: annotations take milliseconds
    to resolve, and every scrape of the metrics asks for values.
    """
    return _settings_of(config, ())


@cache
def _settings_of(config: Any, at: tuple[str, ...]) -> Mapping[str, Setting]:
    """Those of `config`, which is at the fields `at` of another dataclass."""
    hints, found = get_type_hints(config), list[Setting]()
    for each in dataclasses.fields(config):
        hint, place = hints[each.name], (*at, each.name)
        if dataclasses.is_dataclass(hint):
            found += _settings_of(hint, place).values()  # type: ignore[arg-type]
        elif "help" in each.metadata:
            told = dict(each.metadata)
            name = told.pop("flag") or each.name
            found.append(Setting(name=name, place=place, kind=_kind(hint), default=each.default, **told))
    groups = list(dict.fromkeys(each.group for each in found))
    return MappingProxyType({each.name: each for each in sorted(found, key=lambda each: groups.index(each.group))})


def _kind(hint: Any) -> type:
    """`int` of `int | None`, `tuple` of `tuple[str, ...]`."""
    (hint, *_) = [each for each in get_args(hint) if each is not NoneType] if isinstance(hint, UnionType) else [hint]
    kind: type = get_origin(hint) or hint
    return kind


def with_settings(config: type[Config], values: Mapping[str, Any]) -> Config:
    """A `config` with these values by names of settings, else defaults. Raises TypeError for names of none."""
    settings, nested = settings_of(config), dict[str, Any]()
    for name, value in values.items():
        if name not in settings:
            raise TypeError(f"{config.__name__} has no setting {name!r}")
        room = nested
        for step in settings[name].place[:-1]:
            room = room.setdefault(step, {})
        room[settings[name].place[-1]] = value
    return _made(config, nested)


def _made(kind: type[Config], values: Mapping[str, Any]) -> Config:
    hints = get_type_hints(kind)
    return kind(**{name: _made(hints[name], each) if isinstance(each, dict) else each for name, each in values.items()})


def values_of(config: Any) -> dict[str, Any]:
    """The values of all settings of `config`, by name: what `with_settings` makes an equal one from."""
    return {name: reduce(getattr, each.place, config) for name, each in settings_of(type(config)).items()}


def load(config: type[Config], flags: Mapping[str, Any], env: Mapping[str, str], file: str | None = None) -> Config:
    """The configuration: `flags` (None means not given) over `env` over the YAML `file` over defaults."""
    settings = settings_of(config)
    values = _from_file(settings, file) if file else {}
    values |= _from_env(settings, env)
    values |= {name: settings[name].parse(raw, settings[name].flag) for name, raw in flags.items() if raw is not None}
    return with_settings(config, values)


def _from_env(settings: Mapping[str, Setting], env: Mapping[str, str]) -> dict[str, Any]:
    found = {}
    for name, each in settings.items():
        raw = env.get(each.env, "").strip()
        # Kubernetes gives every pod SLIPSTREAM_PORT=tcp://10.0.0.1:50051 for a Service named "slipstream".
        if raw and not (each.kind is int and raw.startswith(("tcp://", "udp://"))):
            found[name] = each.parse(raw, each.env)
    return found


def _from_file(settings: Mapping[str, Setting], file: str) -> dict[str, Any]:
    found = {}
    for key, raw in _read_yaml(file).items():
        name = str(key).replace("-", "_")
        if name not in settings:
            close = difflib.get_close_matches(name, settings, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ConfigError(f"{file}: unknown key {str(key)!r}{hint}")
        if name in found:
            raise ConfigError(f"{file}: {name} is given twice")
        found[name] = settings[name].parse(raw, f"{file}: {key}")
    return found


def _read_yaml(file: str) -> dict[Any, Any]:
    try:
        with Path(file).open("rb") as opened:
            written = opened.read(MAX_YAML_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror or error}") from None
    content = load_yaml(written, file)
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: must hold keys and values at the top level")
    return content


def _bool(raw: Any) -> bool | None:
    if isinstance(raw, bool):
        return raw
    word = str(raw).lower()
    return True if word in _TRUE else False if word in _FALSE else None


def _int(raw: Any) -> int | None:
    if isinstance(raw, bool | float):
        return None
    try:
        return int(raw)
    except (TypeError, ValueError):
        return None


def _float(raw: Any) -> float | None:
    if isinstance(raw, bool):
        return None
    try:
        value = float(raw)
    except (TypeError, ValueError, OverflowError):
        return None
    return value if math.isfinite(value) else None


def _str(raw: Any) -> str | None:
    return raw if isinstance(raw, str) and raw else None


def _pairs(raw: Any) -> tuple[tuple[str, str], ...] | None:
    """`name=value` texts, one or many, as pairs; None if one is something else."""
    texts = raw.split(",") if isinstance(raw, str) else raw if isinstance(raw, list | tuple) else [raw]
    found = [tuple(str(text).strip().split("=", 1)) for text in texts]
    return tuple((name, value) for name, value in found) if all(len(p) == 2 and all(p) for p in found) else None


_READERS: dict[type, Callable[[Any], Any]] = {bool: _bool, int: _int, float: _float, str: _str, tuple: _pairs}
_NOUNS: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    tuple: "NAME=VALUE",
}
