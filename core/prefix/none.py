"""The cache that keeps nothing between requests.

The samples of one request (n > 1) still share the pages of their prompt, because they run at the same time. Within a
namespace made by `group_salt` this cache is a radix tree that gives up its pages as soon as no request locks them.
"""

from __future__ import annotations

from collections.abc import Sequence

from core.invariants import check
from core.prefix.base import GROUP_MARK, NO_PAGES, Ids, InsertResult, Pages, PrefixCache, PrefixMatch, group_salt
from core.prefix.node import PrefixNode
from core.prefix.radix import RadixCache
from core.prefix.tenants import TenantOf, tenant_of


class NoPrefixCache(PrefixCache):
    """Matches nothing and adopts nothing, except among the samples of one request."""

    def __init__(self, page_size: int, of: TenantOf = tenant_of) -> None:
        self.page_size = page_size
        self._groups = RadixCache(page_size, of)

    def namespace(self, salt: str, group_id: str | None) -> str:
        """The group's own namespace, or "" without a group. `salt` is not used, so a client cannot name a group."""
        return group_salt(group_id) if group_id is not None else ""

    def match(self, ids: Ids, limit: int, salt: str) -> PrefixMatch:
        """The prefix that another sample of the same request put here; always empty outside groups."""
        if salt.startswith(GROUP_MARK):
            return self._groups.match(ids, limit, salt)
        return PrefixMatch(NO_PAGES, PrefixNode.root(salt))

    def peek(self, ids: Ids, limit: int, salt: str) -> int:
        """Tokens that `match` would find; always 0 outside groups."""
        return self._groups.peek(ids, limit, salt) if salt.startswith(GROUP_MARK) else 0

    def lock(self, node: PrefixNode) -> None:
        self._groups.lock(node)

    def unlock(self, node: PrefixNode) -> Pages:
        """Give up every page that is not locked now, including pages that were inserted and never locked."""
        self._groups.unlock(node)
        return self._groups.clear()

    def takes(self, salt: str) -> bool:
        """Whether `salt` is a group's."""
        return salt.startswith(GROUP_MARK)

    def insert(self, ids: Ids, pages: Pages, salt: str, owned_from: int) -> InsertResult:
        """Offer pages to the request's group. Outside groups nothing is adopted, and every page stays the caller's."""
        if salt.startswith(GROUP_MARK):
            return self._groups.insert(ids, pages, salt, owned_from)
        # No match outside groups was longer than 0, so no caller can have a locked prefix.
        check("prefix_lock_balance", owned_from == 0, owned_from=owned_from, held_pages=0)
        return InsertResult(None, 0, NO_PAGES, NO_PAGES)

    def evict(self, num_pages: int) -> Pages:
        return self._groups.evict(num_pages)

    def clear(self, tenant: str | None = None) -> Pages:
        return self._groups.clear(tenant)

    def behind(self, ids: Ids, kept: int, salt: str) -> PrefixNode | None:
        """The node at which the rest of `ids` begins; always None outside groups."""
        return self._groups.behind(ids, kept, salt) if salt.startswith(GROUP_MARK) else None

    def condemn(self, node: PrefixNode) -> Pages:
        return self._groups.condemn(node)

    @property
    def cached_pages(self) -> int:
        return self._groups.cached_pages

    @property
    def locked_pages(self) -> int:
        return self._groups.locked_pages

    def held_only_by(self, nodes: Sequence[PrefixNode]) -> int:
        return self._groups.held_only_by(nodes)

    def check_integrity(self) -> None:
        self._groups.check_integrity()
