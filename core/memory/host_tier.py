"""Which blocks of host memory hold copies of keys and values. Host state only; the bytes are the arena's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import mul
from types import MappingProxyType
from typing import Final

from core.memory.host_moves import HostCopy
from core.memory.kv_allocator import PagedKVAllocator

NOTHING: Final[Mapping[str, int]] = MappingProxyType({})
BLOCK = 1 << 18
"""Bytes of a block: large enough that the bus is busy with it, small enough that little is lost in the last one."""


class HostTier:
    """Hands out blocks for copies, up to `nbytes` bytes in all.

    No copy of a request that waits is dropped for another: the request that is retracted last is mostly the last to
    come back. Copies of prefixes, which nothing waits for, give way to both. Blocks may be handed out the moment they
    are freed: the stream that copies out waits for the forward stream, which is the one that copies back (law 4).
    """

    def __init__(
        self, nbytes: int, bytes_per_token: int, block: int = BLOCK, beside: Mapping[str, int] = NOTHING
    ) -> None:
        """`bytes_per_token`: keys and values of all layers. `beside`: bytes of a slot, by name of another pool."""
        assert nbytes >= block and bytes_per_token >= 1, (nbytes, bytes_per_token)
        self.beside = beside
        self._blocks = PagedKVAllocator(nbytes // block, block)
        self._bytes_per_token = bytes_per_token
        self._next = 1
        self._given_up: list[int] = []
        """Numbers of copies that the device has not been told to forget."""
        self.spare: Callable[[int], None] = lambda blocks: None
        """Called with a number of blocks that are lacking: frees copies that nothing waits for, if these are enough."""

    @property
    def block(self) -> int:
        """Bytes of a block."""
        return self._blocks.page_size

    @property
    def num_blocks(self) -> int:
        """Blocks in all; block 0, which is not among them, is never used."""
        return self._blocks.num_pages

    @property
    def used_bytes(self) -> int:
        """Bytes of the blocks that hold copies."""
        return self._blocks.held * self.block

    def take(self, tokens: int, beside: tuple[int, ...] = ()) -> HostCopy | None:
        """Room for a copy of `tokens` tokens; None, and no change, where there is none.

        `beside`: how many slots of each pool in `self.beside` it has too; empty for none. It has something of either.
        """
        count = self.blocks_for(tokens, beside)
        if count > self.num_blocks:
            return None
        if count > self._blocks.available:
            self.spare(count - self._blocks.available)
        blocks = self._blocks.alloc(count)
        if blocks is None:
            return None
        number, self._next = self._next, self._next + 1
        return HostCopy(number, tokens, blocks, beside)

    def free(self, copy: HostCopy) -> None:
        """The copy is needed no more. Raises InvariantViolation for one that was freed."""
        self._blocks.free(copy.blocks)
        self._given_up.append(copy.number)

    def put_back(self, copy: HostCopy) -> None:
        """As `free`, of a copy that was never told to the device: it has nothing to forget."""
        self._blocks.free(copy.blocks)

    def blocks_for(self, tokens: int, beside: tuple[int, ...] = ()) -> int:
        """Blocks that a copy of `tokens` tokens takes, and of so many slots of each pool beside."""
        others = sum(map(mul, beside, self.beside.values()))
        return self._blocks.pages_for(tokens * self._bytes_per_token + others)

    def take_given_up(self) -> tuple[int, ...]:
        """Numbers of copies that were freed since the last call. The very next copy out must carry them."""
        given_up, self._given_up = tuple(self._given_up), []
        return given_up

    def check_integrity(self) -> None:
        """Recompute the partition into free and held blocks."""
        self._blocks.check_integrity()
