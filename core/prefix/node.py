"""A node of the radix tree, which is also the opaque handle that requests lock; and the tenant that it counts for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt


class PrefixNode:
    """The edge into a node and what hangs below it. Only `core.prefix` looks inside; others pass it to `lock`/`unlock`.

    A node stands for the prefix from its root to its own end. Splitting never changes that: the node that requests may
    hold stays the *lower* part, and a new node takes the upper part.
    """

    __slots__ = ("children", "dead", "holds", "key", "locks", "pages", "parent", "salt", "tenant")

    def __init__(self, parent: PrefixNode | None, key: bytes, pages: npt.NDArray[np.int64], salt: str = "") -> None:
        self.parent = parent
        """None for roots and for dead nodes."""
        self.key = key
        """Token ids of the edge, 8 bytes each (int64). Compared in full: a hash only finds the candidate."""
        self.pages = pages
        """int64[k]. Invariant: `key` has k * page_size ids; k is 0 for roots only."""
        self.children: dict[bytes, PrefixNode] = {}
        """By the bytes of their first page. Invariant: no two children share a first page."""
        self.holds = 0
        """Locks taken on this node itself, not on one below it."""
        self.locks = 0
        """Invariant: holds + the sum of the children's locks; so an ancestor of a locked node is locked."""
        self.dead = False
        """Whether its pages were given up. Locking a dead node is a bug of the caller."""
        self.tenant: Tenant | None = None if parent is None else parent.tenant
        """The tenant that these pages count for; None for a root below which nothing was ever kept."""
        self.salt = salt
        """Of a root: the namespace that it begins. Empty for other nodes."""

    @classmethod
    def root(cls, salt: str) -> PrefixNode:
        """The empty prefix of namespace `salt`. Owns no page, so it may be dropped without being in any tree."""
        return cls(None, b"", np.empty(0, np.int64), salt)

    @property
    def is_root(self) -> bool:
        """Whether this is the empty prefix."""
        return not self.key

    @property
    def counts_for(self) -> str | None:
        """Name of the tenant that its pages count for; None where nothing was ever kept."""
        return None if self.tenant is None else self.tenant.name

    def path(self) -> Iterator[PrefixNode]:
        """This node, its parent, and so on up to the root."""
        node: PrefixNode | None = self
        while node is not None:
            yield node
            node = node.parent

    def leads_to(self, other: PrefixNode) -> bool:
        """Whether `other` is this node or below it, so that a request that locks `other` reads this node's pages."""
        return self in other.path()

    def below(self) -> Iterator[PrefixNode]:
        """This node and all its descendants, parents first. No recursion: a path may have a node per page."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


class Tenant:
    """What a cache holds for one tenant: its unlocked nodes by age, and the number of its pages."""

    __slots__ = ("name", "pages", "recent", "used_at")

    def __init__(self, name: str) -> None:
        self.name = name
        self.pages = 0
        """Cached pages of the tenant, locked ones included."""
        self.recent: OrderedDict[PrefixNode, None] = OrderedDict()
        """Invariant: exactly its unlocked nodes except roots, oldest first, parents after their children."""
        self.used_at = 0
        """When a page of this tenant was used last, in pages that the cache had given up by then, of any tenant."""
