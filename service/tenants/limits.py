"""The file of tenants' limits, read again when it changes.

# names as in the token file, or of client certificates; "*" is whoever is not listed
alice: {requests_per_second: 20, concurrent_requests: 64}
"*": {concurrent_requests: 4}
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from core.errors import StartupError
from service.reloaded import Reloaded

EVERYBODY = "*"
OTHER = "other"
"""The label of tenants that the file does not list."""

MAX_TENANTS = 1024
MIN_RATE = 0.001


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """What one tenant may do, over all connections and front ends; None: no limit of its own."""

    requests_per_second: float | None = None
    concurrent_requests: int | None = None

    @property
    def none(self) -> bool:
        """Whether nothing is limited."""
        return self.requests_per_second is None and self.concurrent_requests is None


class TenantBook:
    """The limits of one state of the file. Immutable."""

    def __init__(self, limits: Mapping[str, TenantLimits]) -> None:
        self._limits = dict(limits)
        self._other = self._limits.pop(EVERYBODY, TenantLimits())

    @property
    def names(self) -> tuple[str, ...]:
        """Who is listed."""
        return tuple(self._limits)

    def of(self, tenant: str) -> TenantLimits:
        """The limits of `tenant`."""
        return self._limits.get(tenant, self._other)

    def label(self, tenant: str) -> str:
        """What metrics call `tenant`: only the file makes labels, never a caller."""
        return tenant if tenant in self._limits else OTHER


def tenants_file(path: str | Path) -> Reloaded[TenantBook]:
    """The limits of the file at `path`, read again when it changes. Raises StartupError."""
    return Reloaded("tenants file", (path,), lambda contents: parse_tenants(contents[0], path))


def parse_tenants(content: bytes, path: str | Path) -> TenantBook:
    """Names and limits. StartupError names the file and the tenant."""
    try:
        listed = yaml.safe_load(content.decode("utf-8"))
    except (UnicodeDecodeError, yaml.YAMLError):
        raise StartupError(f"{path}: not valid YAML") from None
    if not isinstance(listed, dict) or not all(isinstance(name, str) and name for name in listed):
        raise StartupError(f"{path}: must hold names of tenants with their limits")
    if len(listed) > MAX_TENANTS:
        raise StartupError(f"{path}: lists {len(listed)} tenants, at most {MAX_TENANTS}")
    return TenantBook({name: _limits(given, f"{path}: {name!r}") for name, given in listed.items()})


def _limits(given: Any, where: str) -> TenantLimits:
    known = {field.name for field in dataclasses.fields(TenantLimits)}
    if given is None:
        return TenantLimits()
    if not isinstance(given, dict) or not set(given) <= known:
        raise StartupError(f"{where}: may have {' and '.join(sorted(known))}")
    rate, at_once = given.get("requests_per_second"), given.get("concurrent_requests")
    if rate is not None and not (_is_number(rate) and MIN_RATE <= rate < math.inf):
        raise StartupError(f"{where}: requests_per_second must be a number of at least {MIN_RATE:g}")
    if at_once is not None and not (_is_number(at_once) and isinstance(at_once, int) and at_once >= 0):
        raise StartupError(f"{where}: concurrent_requests must be a whole number of at least 0")
    return TenantLimits(None if rate is None else float(rate), at_once)


def _is_number(given: Any) -> bool:
    return isinstance(given, int | float) and not isinstance(given, bool)
