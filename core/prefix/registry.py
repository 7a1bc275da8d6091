"""Prefix caches by the name that `--prefix-cache` takes. A new one is a new file and one line here."""

from __future__ import annotations

from collections.abc import Callable

from core.errors import ConfigError
from core.prefix.base import PrefixCache
from core.prefix.none import NoPrefixCache
from core.prefix.radix import RadixCache
from core.prefix.tenants import TenantOf, tenant_of

PREFIX_CACHES: dict[str, Callable[[int, TenantOf], PrefixCache]] = {
    "radix": RadixCache,
    "none": NoPrefixCache,
}
"""Name -> factory. A factory takes the page size in tokens, and the function that names the tenant of a salt."""


def build_prefix_cache(name: str, page_size: int, of: TenantOf = tenant_of) -> PrefixCache:
    """A new, empty cache. Raises ConfigError for a name that is not in `PREFIX_CACHES`."""
    factory = PREFIX_CACHES.get(name)
    if factory is None:
        raise ConfigError(f"prefix_cache must be one of {', '.join(PREFIX_CACHES)}; got {name!r}")
    return factory(page_size, of)
