"""One node of the radix tree, which is also the opaque handle that requests hold and lock; and the tenant it is of."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt


class PrefixNode:
    """The edge into a node and what hangs below it. Only `core.prefix` looks inside; others pass it to `lock`/`unlock`.

    A node stands for the prefix from its root to its own end. Splitting never changes that: the node that others may
    hold stays the *lower* part, and a new node takes the upper one.
    """

    __slots__ = ("children", "dead", "holds", "key", "locks", "pages", "parent", "salt", "tenant")

    def __init__(self, parent: PrefixNode | None, key: bytes, pages: npt.NDArray[np.int64], salt: str = "") -> None:
        self.parent = parent
        """None for roots and for dead nodes."""
        self.key = key
        """Token ids of the edge as int64 bytes: exact, and hashed only to be found."""
        self.pages = pages
        """Invariant: pages.size * page_size ids in `key`; empty for roots only."""
        self.children: dict[bytes, PrefixNode] = {}
        """By the bytes of their first page. Invariant: no two children share a first page."""
        self.holds = 0
        """Locks taken on this very node."""
        self.locks = 0
        """Invariant: holds + the sum of the children's locks; so an ancestor of a locked node is locked."""
        self.dead = False
        """Its pages were given up; locking it now is a bug of the caller."""
        self.tenant: Tenant | None = None if parent is None else parent.tenant
        """Whose pages these are; None for a root below which nothing was ever kept."""
        self.salt = salt
        """Of a root, which namespace it begins."""

    @classmethod
    def root(cls, salt: str) -> PrefixNode:
        """The empty prefix of a namespace. Owns nothing, so a root that no tree knows does no harm."""
        return cls(None, b"", np.empty(0, np.int64), salt)

    @property
    def is_root(self) -> bool:
        """Whether this is the empty prefix."""
        return not self.key

    def path(self) -> Iterator[PrefixNode]:
        """This node, its parent, and so on up to the root."""
        node: PrefixNode | None = self
        while node is not None:
            yield node
            node = node.parent

    def leads_to(self, other: PrefixNode) -> bool:
        """Whether `other` is this node or below it: who locks it reads these pages."""
        return self in other.path()

    def below(self) -> Iterator[PrefixNode]:
        """This node and all its descendants, parents first. No recursion: a path may have a node per page."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


class Tenant:
    """What a cache keeps of one tenant: its unlocked nodes by age, and how many pages it has in all."""

    __slots__ = ("name", "pages", "recent", "used_at")

    def __init__(self, name: str) -> None:
        self.name = name
        self.pages = 0
        """Locked ones included."""
        self.recent: OrderedDict[PrefixNode, None] = OrderedDict()
        """Invariant: exactly its unlocked nodes but for roots, oldest first, parents after their children."""
        self.used_at = 0
        """Pages that the cache had given up, of any tenant, when one of this tenant's was used last."""
