"""Which tenant each cached page counts for, and which tenants give pages up when there are too few.

Three rules, in this order:
(1) A tenant that used none of its pages while the cache gave up as many pages as it holds counts as gone. It gives up
before all others, so a tenant that is left alone may use everything.
(2) Each tenant keeps an equal share of the pages that stay. Tenants above it give up the excess, the largest first.
(3) Where that is not enough, because pages are locked, tenants give up from their shares too.
A tenant gives up its own least recently used pages first. With one tenant this is plain LRU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from core.prefix.node import Tenant

TenantOf = Callable[[str], str]
"""Salt -> name of the tenant that pages under that salt count for."""


def tenant_of(salt: str) -> str:
    """The part of `salt` before its first NUL; all salts without a NUL belong to one tenant, ""."""
    tenant, nul, _ = salt.partition("\0")
    return tenant if nul else ""


class Tenants:
    """The tenants that have pages in one cache."""

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
        """The tenant of `salt`, made if it has no pages yet. The caller gives it a page right away."""
        name = self._of(salt)
        found = self._by_name.get(name)
        if found is None:
            found = self._by_name[name] = Tenant(name)
        return found

    def used(self, tenant: Tenant) -> None:
        """A page of `tenant` was found by a request, or is new."""
        tenant.used_at = self._given_up

    def gave_up(self, tenant: Tenant, pages: int) -> None:
        """`tenant` lost `pages` pages; a tenant without pages is forgotten."""
        self._given_up += pages
        tenant.pages -= pages
        if not tenant.pages:
            del self._by_name[tenant.name]

    def turns(self, wanted: int) -> Iterator[tuple[Tenant, int]]:
        """(tenant, most pages to take from it), in the order in which they give up.

        The caller takes pages after each item, and stops as soon as `wanted` have gone. O(T log T) for T tenants.
        """
        if len(self._by_name) == 1:
            (only,) = self._by_name.values()
            yield only, only.pages
            return
        total = sum(each.pages for each in self)
        # Rule (1).
        gone = [each for each in self if self._given_up - each.used_at >= total]
        for each in sorted(gone, key=lambda each: each.used_at):
            yield each, each.pages
        # Rule (2). Tenants that gave up all their pages above are no longer among `self`.
        left = sorted(self, key=lambda each: each.pages, reverse=True)
        share = max(0, total - wanted) // max(1, len(left))
        for each in left:
            if each.pages > share:
                yield each, each.pages - share
        # Rule (3): what tenants have above their share may be locked.
        for each in left:
            yield each, each.pages
