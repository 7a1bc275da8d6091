"""A compressed radix tree over page-sized chunks of token ids, one root per salt.

Recency is one ordered dict of *all* unlocked nodes of a tenant, kept so that a parent is always younger than its
children: a use of a prefix touches its nodes from the tail up. So the oldest entry is always a leaf, which eviction can
take, and a parent whose last child went is exactly as old as its own last use. Nodes are never sorted.
`core.prefix.tenants` decides which tenant gives up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from core.invariants import check
from core.prefix.audit import audit
from core.prefix.base import NO_PAGES, Ids, InsertResult, Pages, PrefixCache, PrefixMatch
from core.prefix.node import PrefixNode, Tenant
from core.prefix.observer import PrefixObserver
from core.prefix.tenants import TenantOf, Tenants, tenant_of
from core.types.prefixes import PrefixStored

_ID_BYTES = 8


def page_key(data: bytes, at: int, page_bytes: int) -> bytes:
    """The key of a child in `children`: the bytes of its whole first page, so different pages never collide."""
    return data[at : at + page_bytes]


def shared_pages(edge: bytes, data: bytes, at: int, page_bytes: int) -> int:
    """How many leading pages of `edge` equal those of `data` from byte `at` on; `edge` has whole pages of ids."""
    span = min(len(edge), len(data) - at)
    if edge[:span] == data[at : at + span]:
        return span // page_bytes
    count = span // _ID_BYTES
    differs = np.frombuffer(edge, np.int64, count) != np.frombuffer(data, np.int64, count, at)
    return int(differs.argmax()) * _ID_BYTES // page_bytes


@dataclass(slots=True)
class _Reach:
    """How much of a sequence the tree holds: all nodes of `path` (root first), then `shared` pages of `partial`."""

    path: list[PrefixNode]
    partial: PrefixNode | None = None
    shared: int = 0
    held: int = 0
    """Pages of the sequence that are held, `shared` ones included."""

    def pages(self) -> Pages:
        """int64[held]: the page numbers, in the order of the sequence. Call before `partial` is split."""
        parts = [node.pages for node in self.path]
        if self.partial is not None:
            parts.append(self.partial.pages[: self.shared])
        return np.concatenate(parts)

    def duplicates(self, offered: Pages, owned: int) -> tuple[Pages, Pages]:
        """(duplicates, originals), int64[n] each: pages of `offered[owned:]` that are held under other numbers."""
        if owned == self.held:
            return NO_PAGES, NO_PAGES
        mine, theirs = offered[owned : self.held], self.pages()[owned:]
        differs: npt.NDArray[np.bool_] = mine != theirs
        return mine[differs], theirs[differs]


class RadixCache(PrefixCache):
    """Keeps inserted pages until they are evicted.

    Match, insert, lock and unlock cost O(pages of the prompt), evict O(pages that go). A split copies the edge once.
    """

    def __init__(self, page_size: int, of: TenantOf = tenant_of) -> None:
        self.page_size = page_size
        self._page_bytes = page_size * _ID_BYTES
        self._roots: dict[str, PrefixNode] = {}
        """By salt. Invariant: every root here has a child, so namespaces without pages cost nothing."""
        self._tenants = Tenants(of)
        self._owned: npt.NDArray[np.bool_] = np.zeros(1024, np.bool_)
        """By page number: whether some node holds it. Grows with the largest number seen."""
        self._cached = 0
        self._locked = 0
        self._observer: PrefixObserver | None = None

    def namespace(self, salt: str, group_id: str | None) -> str:
        """`salt` itself: samples of one request share their prompt as any two requests with that salt do."""
        return salt

    def match(self, ids: Ids, limit: int, salt: str) -> PrefixMatch:
        """Follow `ids` from the root, and split the last edge if the match ends within it."""
        reach = self._reach(self._bytes(ids, limit), salt)
        pages = reach.pages()
        node = self._end(reach)
        self._touch(node)
        return PrefixMatch(pages, node)

    def peek(self, ids: Ids, limit: int, salt: str) -> int:
        return self._reach(self._bytes(ids, limit), salt).held * self.page_size

    def lock(self, node: PrefixNode) -> None:
        """Count a lock on every node of the path; a node's first lock takes it out of the recency order."""
        check("prefix_lock_balance", not node.dead, held=node.holds)
        node.holds += 1
        for each in node.path():
            each.locks += 1
            if each.locks == 1 and not each.is_root:
                del _tenant(each).recent[each]
                self._locked += each.pages.size

    def unlock(self, node: PrefixNode) -> Pages:
        """Undo one lock on every node of the path; a node without locks becomes the youngest. Drops no page."""
        check("prefix_lock_balance", node.holds > 0, held=node.holds, dead=node.dead)
        node.holds -= 1
        # From the node up, so that a parent is entered after its child and is younger.
        for each in node.path():
            each.locks -= 1
            if each.locks == 0 and not each.is_root:
                _tenant(each).recent[each] = None
                self._locked -= each.pages.size
        return NO_PAGES

    def insert(self, ids: Ids, pages: Pages, salt: str, owned_from: int) -> InsertResult:
        total = pages.size * self.page_size
        check("prefix_page_alignment", total <= ids.size, pages=pages.size, tokens=ids.size)
        aligned = owned_from % self.page_size == 0 and 0 <= owned_from <= total
        check("prefix_page_alignment", aligned, owned_from=owned_from, offered=total)
        data, owned = self._bytes(ids, total), owned_from // self.page_size
        reach = self._reach(data, salt)
        held = reach.held
        check("prefix_lock_balance", owned <= held, owned_from=owned_from, held_pages=held)
        # First, since it checks: where it raises nothing has changed, not even by the split of `_end`.
        self._take(pages[held:])
        duplicates, originals = reach.duplicates(pages, owned)
        node = self._end(reach)
        if held < pages.size:
            node = self._attach(node, data[held * self._page_bytes :], pages[held:].copy())
            if self._observer is not None:
                self._observer.stored(salt, _stored(node))
        self._touch(node)
        return InsertResult(node, pages.size - held, duplicates, originals)

    def evict(self, num_pages: int) -> Pages:
        """Take pages from one tenant after the other, as `Tenants.turns` orders them."""
        wanted, freed = min(num_pages, self.evictable_pages), [NO_PAGES]
        if wanted <= 0:
            return NO_PAGES
        for tenant, most in self._tenants.turns(wanted):
            for pages in self._give_up(tenant, min(most, wanted)):
                freed.append(pages)
                wanted -= pages.size
            if not wanted:
                break
        return np.concatenate(freed)

    def _give_up(self, tenant: Tenant, count: int) -> Iterator[Pages]:
        """Drop at most `count` unlocked pages of `tenant`, the oldest first. The last node is trimmed to the page."""
        while count > 0 and tenant.recent:
            node = next(iter(tenant.recent))
            if node.pages.size > count:
                # The split leaves the tail in `node`, which is dropped: a caller with an old handle finds it dead.
                upper = self._split(node, node.pages.size - count)
                # As old as `node` was: it stays the next to give up.
                tenant.recent[upper] = None
                tenant.recent.move_to_end(upper, last=False)
            count -= node.pages.size
            self._drop(node)
            yield node.pages

    def clear(self, tenant: str | None = None) -> Pages:
        if tenant is None:
            return self.evict(self.evictable_pages)
        found = self._tenants.find(tenant)
        return np.concatenate([NO_PAGES, *(() if found is None else self._give_up(found, found.pages))])

    def behind(self, ids: Ids, kept: int, salt: str) -> PrefixNode | None:
        """Find the node in which the page after `kept` tokens lies, and split it there. O(pages of `ids`)."""
        pages, reach = kept // self.page_size, self._reach(self._bytes(ids, ids.size), salt)
        check("prefix_page_alignment", kept % self.page_size == 0, kept=kept)
        if reach.held <= pages:
            return None
        found = [node for node in (*reach.path[1:], reach.partial) if node is not None]
        before = 0
        for node in found:
            if before + node.pages.size > pages:
                break
            before += node.pages.size
        if before < pages:
            self._split(node, pages - before)
            # Enters the upper part into the recency order, younger than the nodes below it.
            self._touch(node)
        return node

    def condemn(self, node: PrefixNode) -> Pages:
        """Drop `node` and all below it, leaves first. O(nodes and pages that go)."""
        if node.dead:
            return NO_PAGES
        check("prefix_lock_balance", node.locks == 0 and not node.is_root, locks=node.locks)
        doomed = list(node.below())
        for each in reversed(doomed):
            self._drop(each)
        return np.concatenate([each.pages for each in doomed])

    def observe(self, observer: PrefixObserver | None) -> bool:
        self._observer = observer
        return True

    def contents(self, salt: str) -> list[PrefixStored]:
        root = self._roots.get(salt)
        return [] if root is None else [_stored(node) for node in root.below() if not node.is_root]

    @property
    def cached_pages(self) -> int:
        return self._cached

    @property
    def locked_pages(self) -> int:
        return self._locked

    @property
    def namespaces(self) -> int:
        """Number of salts under which pages are cached; the memory for roots and tenants grows with it."""
        return len(self._roots)

    def held_only_by(self, nodes: Sequence[PrefixNode]) -> int:
        """Count one undone lock on every node of each path. O(nodes of the paths)."""
        undone = Counter(each for node in nodes for each in node.path())
        return sum(each.pages.size for each, count in undone.items() if each.locks == count)

    def check_integrity(self) -> None:
        counted = audit(self._roots, list(self._tenants), self._page_bytes)
        check("page_conservation", counted.cached == self._cached, counted=counted.cached, kept=self._cached)
        check("prefix_lock_balance", counted.locked == self._locked, counted=counted.locked, kept=self._locked)
        marked = int(np.count_nonzero(self._owned))
        check("page_conservation", marked == self._cached, marked=marked, cached=self._cached)

    def _bytes(self, ids: Ids, limit: int) -> bytes:
        """The ids of the whole pages within the first `limit` ids, as int64 bytes like `PrefixNode.key`."""
        usable = max(0, min(limit, ids.size)) // self.page_size * self.page_size
        return np.ascontiguousarray(ids[:usable], np.int64).tobytes()

    def _reach(self, data: bytes, salt: str) -> _Reach:
        """Follow `data` from the root of `salt` as far as the tree holds it. Mutates nothing."""
        reach = _Reach([self._roots.get(salt) or PrefixNode.root(salt)])
        at = 0
        while at < len(data):
            child = reach.path[-1].children.get(page_key(data, at, self._page_bytes))
            if child is None:
                break
            shared = shared_pages(child.key, data, at, self._page_bytes)
            reach.held += shared
            if shared < child.pages.size:
                reach.partial, reach.shared = child, shared
                break
            reach.path.append(child)
            at += len(child.key)
        return reach

    def _end(self, reach: _Reach) -> PrefixNode:
        """The node at which the held prefix ends, made by a split if that is within an edge. The caller touches it."""
        return reach.path[-1] if reach.partial is None else self._split(reach.partial, reach.shared)

    def _split(self, node: PrefixNode, keep: int) -> PrefixNode:
        """Put a new node that takes the first `keep` pages above `node`, which keeps its end, holds, locks and age.

        Every lock on `node` protects the upper part as well. An unlocked upper node is *not* entered into the recency
        order: the caller knows how old it is, and must enter it.
        """
        parent, cut = node.parent, keep * self._page_bytes
        assert parent is not None, "roots have no edge to split"
        upper = PrefixNode(parent, node.key[:cut], node.pages[:keep])
        upper.tenant = node.tenant
        upper.locks = node.locks
        parent.children[page_key(upper.key, 0, self._page_bytes)] = upper
        node.parent, node.key, node.pages = upper, node.key[cut:], node.pages[keep:]
        upper.children[page_key(node.key, 0, self._page_bytes)] = node
        return upper

    def _attach(self, parent: PrefixNode, key: bytes, pages: Pages) -> PrefixNode:
        """A new leaf below `parent` with `pages`, which `_take` has made the cache's own."""
        if parent.is_root:
            self._roots[parent.salt] = parent
            parent.tenant = self._tenants.enter(parent.salt)
        node = PrefixNode(parent, key, pages)
        _tenant(node).pages += pages.size
        parent.children[page_key(key, 0, self._page_bytes)] = node
        return node

    def _drop(self, node: PrefixNode) -> None:
        """Forget an unlocked leaf, and its root if nothing is left below it."""
        parent = node.parent
        assert parent is not None, "roots are never among the recent nodes"
        check("page_conservation", not node.children, children=len(node.children))
        del parent.children[page_key(node.key, 0, self._page_bytes)]
        tenant = _tenant(node)
        del tenant.recent[node]
        self._tenants.gave_up(tenant, node.pages.size)
        self._owned[node.pages] = False
        self._cached -= node.pages.size
        node.parent, node.dead = None, True
        if self._observer is not None:
            self._observer.removed(node.pages)
        if parent.is_root and not parent.children:
            del self._roots[parent.salt]

    def _touch(self, node: PrefixNode) -> None:
        """Make the unlocked part of the path the youngest, tail first so that parents stay younger."""
        if node.is_root:
            return
        tenant = _tenant(node)
        self._tenants.used(tenant)
        for each in node.path():
            if each.locks or each.is_root:
                break
            tenant.recent[each] = None
            tenant.recent.move_to_end(each)

    def _take(self, pages: Pages) -> None:
        """Become the owner of `pages`; a page with two owners would mix two requests' tokens."""
        if not pages.size:
            return
        lowest, highest = int(pages.min()), int(pages.max())
        check("page_padding_reserved", lowest > 0, lowest=lowest)
        if highest >= self._owned.size:
            # More than doubles, so it stays rare.
            self._owned = np.append(self._owned, np.zeros(highest + 1, np.bool_))
        twice = bool(self._owned[pages].any()) or np.unique(pages).size != pages.size
        check("page_conservation", not twice, offered=pages)
        self._owned[pages] = True
        self._cached += pages.size


def _tenant(node: PrefixNode) -> Tenant:
    assert node.tenant is not None, "of a node that holds pages"
    return node.tenant


def _stored(node: PrefixNode) -> PrefixStored:
    """The ids and pages of one edge. Keys and page arrays are replaced, never changed, so none is copied."""
    parent = node.parent
    assert parent is not None, "of a live node"
    before = 0 if parent.is_root else int(parent.pages[-1])
    return PrefixStored(before, np.frombuffer(node.key, np.int64), node.pages)
