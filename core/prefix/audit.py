"""Recounts a radix tree from its structure alone, for `check_integrity`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from core.invariants import check
from core.prefix.node import PrefixNode, Tenant


@dataclass(slots=True)
class Recount:
    """Counts of a walk over the tree: all pages, and the pages of locked nodes."""

    cached: int = 0
    locked: int = 0


def audit(roots: Mapping[str, PrefixNode], tenants: Sequence[Tenant], page_bytes: int) -> Recount:
    """Check every node, its tenant, and the order of recency; return the pages counted on the way.

    `page_bytes`: length of one page's key. Raises InvariantViolation naming what is off.
    """
    seen: set[int] = set()
    recent = [node for tenant in tenants for node in tenant.recent]
    ages = {node: age for age, node in enumerate(recent)}
    held = dict.fromkeys(tenants, 0)
    total, unlocked = Recount(), 0
    for salt, root in roots.items():
        check("page_conservation", bool(root.children) and root.salt == salt and root.is_root, salt=salt)
        for node in root.below():
            _check_links(node, page_bytes)
            _check_locks(node, ages)
            pages = node.pages.tolist()
            check("page_conservation", seen.isdisjoint(pages) and 0 not in pages, pages=pages)
            seen.update(pages)
            total.cached += len(pages)
            total.locked += len(pages) if node.locks else 0
            unlocked += not node.locks and not node.is_root
            check("page_conservation", node.tenant is root.tenant and node.tenant in held, salt=salt)
            if node.tenant is not None:
                held[node.tenant] += len(pages)
    check("prefix_lock_balance", unlocked == len(recent), unlocked=unlocked, recent=len(recent))
    for tenant, pages in held.items():
        check("page_conservation", tenant.pages == pages > 0, kept=tenant.pages, counted=pages)
    return total


def _check_links(node: PrefixNode, page_bytes: int) -> None:
    """Parent and child know each other, and an edge has as many ids as pages."""
    check("prefix_page_alignment", len(node.key) == node.pages.size * page_bytes, bytes=len(node.key))
    check("page_conservation", not node.dead, pages=node.pages)
    for first, child in node.children.items():
        check("page_conservation", child.parent is node and not child.is_root, pages=child.pages)
        check("prefix_page_alignment", child.key[:page_bytes] == first, pages=child.pages)


def _check_locks(node: PrefixNode, ages: Mapping[PrefixNode, int]) -> None:
    """Locks add up along the path. Unlocked nodes, and only they, have an age; parents are younger than children."""
    below = sum(child.locks for child in node.children.values())
    check("prefix_lock_balance", node.locks == node.holds + below and node.holds >= 0, locks=node.locks, below=below)
    if node.is_root:
        return
    check("prefix_lock_balance", (node in ages) == (node.locks == 0), locks=node.locks)
    for child in node.children.values():
        younger = node.locks > 0 or ages[child] < ages[node]
        check("prefix_lock_balance", younger, locks=node.locks)
