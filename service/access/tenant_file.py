"""The file of tenants' limits, read again when it changes.

# names as in the token file, or of client certificates; "*" is each tenant that is not listed
alice: {requests_per_second: 20, concurrent_requests: 64, concurrent_sequences: 128, tokens_per_minute: 600000}
"*": {concurrent_requests: 4}
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.errors import StartupError
from service.access.reloaded_file import Reloaded
from service.config.yaml_files import load_yaml
from service.tenant_ids import NAME_RULE, is_name

EVERYBODY = "*"
OTHER = "other"
"""The label of tenants that the file does not list."""

MAX_TENANTS = 1024
MAX_LIMIT = 1e15
"""A float counts in steps of one up to here."""
MAX_SHOWN_CHARS = 80
MIN_RATE = 0.001
MIN_WEIGHT, MAX_WEIGHT = 0.01, 100.0


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """The limits of one tenant, over all connections and front ends. None: no limit of its own."""

    requests_per_second: float | None = None
    concurrent_requests: int | None = None
    concurrent_sequences: int | None = None
    tokens_per_minute: float | None = None
    weight: float = 1.0
    """The tenant's share of the machine beside others that want theirs: twice the weight, twice the tokens, rows and
    pages."""

    @property
    def none(self) -> bool:
        """Whether nothing is limited."""
        return dataclasses.replace(self, weight=1.0) == TenantLimits()

    @property
    def locked(self) -> bool:
        """Whether the tenant may call nothing at all."""
        return self.concurrent_requests == 0


class TenantBook:
    """The limits of one state of the file. Immutable."""

    def __init__(self, limits: Mapping[str, TenantLimits]) -> None:
        self._limits = dict(limits)
        self._other = self._limits.pop(EVERYBODY, TenantLimits())

    @property
    def names(self) -> tuple[str, ...]:
        """The tenants that the file lists."""
        return tuple(self._limits)

    def of(self, tenant: str) -> TenantLimits:
        """The limits of `tenant`."""
        return self._limits.get(tenant, self._other)

    def label(self, tenant: str) -> str:
        """The label of `tenant` in metrics: its name if the file lists it, else OTHER. Callers never make labels."""
        return tenant if tenant in self._limits else OTHER


def tenants_file(path: str | Path) -> Reloaded[TenantBook]:
    """The limits of the file at `path`, read again when it changes. Raises StartupError."""
    return Reloaded("tenants file", (path,), lambda contents: parse_tenants(contents[0], path))


def parse_tenants(content: bytes, path: str | Path) -> TenantBook:
    """The limits by tenant. Raises StartupError, which names the file and the tenant."""
    listed = load_yaml(content, path)
    if not isinstance(listed, dict):
        raise StartupError(f"{path}: must hold names of tenants with their limits")
    if len(listed) > MAX_TENANTS:
        raise StartupError(f"{path}: lists {len(listed)} tenants, at most {MAX_TENANTS}")
    return TenantBook({_name(name, path): _limits(given, f"{path}: {name!r}") for name, given in listed.items()})


def _name(given: Any, path: str | Path) -> str:
    if not (isinstance(given, str) and is_name(given)):
        shown = ascii(given)[:MAX_SHOWN_CHARS] if isinstance(given, str) else f"a name of type {type(given).__name__}"
        raise StartupError(f"{path}: {shown} is no name of a tenant: {NAME_RULE}")
    return given


def _limits(given: Any, where: str) -> TenantLimits:
    known = {field.name for field in dataclasses.fields(TenantLimits)}
    if given is None:
        return TenantLimits()
    if not isinstance(given, dict) or not set(given) <= known:
        raise StartupError(f"{where}: may have {' and '.join(sorted(known))}")
    return TenantLimits(
        requests_per_second=_rate(given, "requests_per_second", MIN_RATE, where),
        concurrent_requests=_count(given, "concurrent_requests", 0, where),
        concurrent_sequences=_count(given, "concurrent_sequences", 1, where),
        tokens_per_minute=_rate(given, "tokens_per_minute", 1, where),
        weight=_weight(given.get("weight", 1.0), where),
    )


def _weight(given: Any, where: str) -> float:
    if not (_is_number(given) and MIN_WEIGHT <= given <= MAX_WEIGHT):
        raise StartupError(f"{where}: weight must be a number from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}")
    return float(given)


def _rate(given: Mapping[str, Any], name: str, least: float, where: str) -> float | None:
    value = given.get(name)
    if value is not None and not (_is_number(value) and least <= value <= MAX_LIMIT):
        raise StartupError(f"{where}: {name} must be a number from {least:g} to {MAX_LIMIT:g}")
    return None if value is None else float(value)


def _count(given: Mapping[str, Any], name: str, least: int, where: str) -> int | None:
    value = given.get(name)
    if value is not None and not (_is_number(value) and isinstance(value, int) and least <= value <= MAX_LIMIT):
        raise StartupError(f"{where}: {name} must be a whole number from {least} to {MAX_LIMIT:g}")
    return value


def _is_number(given: Any) -> bool:
    return isinstance(given, int | float) and not isinstance(given, bool)
