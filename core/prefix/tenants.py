"""Which tenant each cached page counts for, and which tenants give pages up when there are too few.

A tenant's cached pages are safe from others up to an equal share of all that stay. Beyond it the tenant with most gives
up first, its own least recently used. A tenant that used none of its pages while as many were given up as the cache has
counts as gone, and gives up before all others: one that is alone may use everything. With one tenant this is plain LRU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from core.prefix.node import Tenant

TenantOf = Callable[[str], str]
"""The tenant that pages under a salt count for."""


def tenant_of(salt: str) -> str:
    """What stands before the first NUL of a salt; salts without one are all of one tenant."""
    tenant, nul, _ = salt.partition("\0")
    return tenant if nul else ""


class Tenants:
    """The tenants of which a cache holds pages, by name."""

    def __init__(self, of: TenantOf = tenant_of) -> None:
        self._of = of
        self._by_name: dict[str, Tenant] = {}
        self._given_up = 0

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._by_name.values())

    def find(self, name: str) -> Tenant | None:
        """The tenant called `name`, if it has pages."""
        return self._by_name.get(name)

    def enter(self, salt: str) -> Tenant:
        """The tenant of `salt`, which is about to get a page."""
        name = self._of(salt)
        found = self._by_name.get(name)
        if found is None:
            found = self._by_name[name] = Tenant(name)
        return found

    def used(self, tenant: Tenant) -> None:
        """Something of `tenant` was found, or is new."""
        tenant.used_at = self._given_up

    def gave_up(self, tenant: Tenant, pages: int) -> None:
        """So many of its pages are gone."""
        self._given_up += pages
        tenant.pages -= pages
        if not tenant.pages:
            del self._by_name[tenant.name]

    def turns(self, wanted: int) -> Iterator[tuple[Tenant, int]]:
        """Tenants in the order in which they give up, and how many pages at most; to be asked until `wanted` have gone.

        O(T log T) in tenants.
        """
        if len(self._by_name) == 1:
            (only,) = self._by_name.values()
            yield only, only.pages
            return
        total = sum(each.pages for each in self)
        gone = [each for each in self if self._given_up - each.used_at >= total]
        for each in sorted(gone, key=lambda each: each.used_at):
            yield each, each.pages
        left = sorted(self, key=lambda each: each.pages, reverse=True)
        share = max(0, total - wanted) // max(1, len(left))
        for each in left:
            if each.pages > share:
                yield each, each.pages - share
        # Locked pages can be what is beyond the share of others.
        for each in left:
            yield each, each.pages
