"""Room for keys and values in host memory: whether an engine has any, and what is kept in it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from core.config import MemoryConfig
from core.errors import ConfigError
from core.memory.cross.cross_pages import CROSS
from core.memory.host_bytes import check_room
from core.memory.host_prefixes import HostMemory, HostPrefixes
from core.memory.host_tier import BLOCK, HostTier
from core.memory.recurrent.state_slots import NAME as STATES
from core.memory.window.window_pages import NAME as WINDOW
from core.prefix.tenants import TenantOf

logger = logging.getLogger(__name__)

HELD: Final = {STATES: "recurrent states", CROSS: "keys of an encoder", WINDOW: "a pool of window layers"}
"""Pools that rows hold something of beside KV pages, which no copy in host memory has, as a log says it."""


def not_copied(companions: Iterable[str]) -> list[str]:
    """What rows hold that no copy in host memory has, for a log."""
    return [HELD[name] for name in companions if name in HELD]


def build_host_memory(
    memory: MemoryConfig,
    bytes_per_token: int,
    beside: Sequence[str],
    tenant: TenantOf | None,
    *,
    rejoins: bool,
) -> HostMemory | None:
    """Room as configured, if a copy is all that a row holds. `bytes_per_token`: of the KV pool, and what drafts.

    `beside`: what rows hold more. `tenant`: tells the tenant of a namespace; None where no prefixes are kept.
    `rejoins`: whether retracted requests may leave copies. Raises ConfigError where the machine has no such room.
    """
    if memory.host_cache_bytes and beside:
        # Not refused: the same settings may be given to servers of many models.
        logger.warning(
            "host_cache_bytes is unused, and what the device gives up is computed again: rows also hold %s",
            ", ".join(beside),
        )
        return None
    if tenant is None and not rejoins:
        return None
    # Before anything is sized by it: the list of blocks alone may be more than the machine has.
    check_room(memory.host_cache_bytes)
    block = min(BLOCK, memory.host_cache_bytes)
    if not (block and bytes_per_token):
        return None
    tier = HostTier(memory.host_cache_bytes, bytes_per_token, block)
    chunk = _chunk(memory)
    if tenant is not None and tier.blocks_for(chunk) > tier.num_blocks:
        logger.warning(
            "no prefix is kept in host memory: %d tokens (host_cache_chunk) take more than the %d bytes of "
            "host_cache_bytes",
            *(chunk, memory.host_cache_bytes),
        )
    return HostMemory(tier, None if tenant is None else HostPrefixes(tier, chunk, tenant), rejoins)


def build_passage(
    role: str,
    memory: MemoryConfig,
    bytes_per_token: int,
    along: Mapping[str, int],
    companions: Iterable[str],
    *,
    leaves: bool,
) -> HostMemory:
    """Room through which keys go to engines of another role, and nothing else that a row of `companions` holds.

    `along`: bytes of a slot of each pool of which a prompt takes something along, by its name. `leaves`: whether
    retracted requests may leave copies. Raises ConfigError where the machine has no such room, or a prompt's keys are
    not all that another engine would need.
    """
    if CROSS in companions:
        raise ConfigError(f"role {role} is not possible for this model: rows also hold {HELD[CROSS]}")
    if STATES in along and role == "prefill" and memory.prefix_cache == "none":
        raise ConfigError("role prefill needs prefix_cache radix for this model: it takes the states that go along")
    return HostMemory(_tier(memory, bytes_per_token, along), None, rejoins=False, leaves=leaves)


def build_returns(
    memory: MemoryConfig, bytes_per_token: int, along: Mapping[str, int], tenant: TenantOf | None
) -> HostMemory:
    """Room for prefixes and retracted requests whose rows hold more than keys. `along`: as of `build_passage`.

    `tenant`: tells the tenant of a namespace; None where no prefixes are kept. Raises ConfigError where the machine has
    no such room.
    """
    tier = _tier(memory, bytes_per_token, along)
    prefixes = None if tenant is None else HostPrefixes(tier, _chunk(memory), tenant)
    return HostMemory(tier, prefixes, rejoins=False, leaves=True)


def _chunk(memory: MemoryConfig) -> int:
    """Tokens of a chunk: whole pages."""
    return -(-memory.host_cache_chunk // memory.page_size) * memory.page_size


def _tier(memory: MemoryConfig, bytes_per_token: int, along: Mapping[str, int]) -> HostTier:
    check_room(memory.host_cache_bytes)
    return HostTier(memory.host_cache_bytes, max(1, bytes_per_token), min(BLOCK, memory.host_cache_bytes), along)
