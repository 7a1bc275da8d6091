"""Which blocks of host memory hold copies of retracted requests. Host state only; the bytes are the arena's."""

from __future__ import annotations

from core.memory.host_moves import HostCopy
from core.memory.kv_allocator import PagedKVAllocator

BLOCK = 1 << 18
"""Bytes of a block: large enough that the bus is busy with it, small enough that little is lost in the last one."""


class HostTier:
    """Hands out blocks for copies, up to `nbytes` bytes in all. No copy is dropped for another.

    All copies belong to requests that wait, and the request that is retracted last is mostly the last to come back.
    Blocks may be handed out the moment they are freed: the stream that copies out waits for the forward stream, which
    is the one that copies back (law 4).
    """

    def __init__(self, nbytes: int, bytes_per_token: int, block: int = BLOCK) -> None:
        """`bytes_per_token`: keys and values of all layers."""
        assert nbytes >= block and bytes_per_token >= 1, (nbytes, bytes_per_token)
        self._blocks = PagedKVAllocator(nbytes // block, block)
        self._bytes_per_token = bytes_per_token
        self._next = 1

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

    def take(self, tokens: int) -> HostCopy | None:
        """Room for a copy of `tokens` tokens, at least one; None, and no change, where there is none."""
        blocks = self._blocks.alloc(self._blocks.pages_for(tokens * self._bytes_per_token))
        if blocks is None:
            return None
        number, self._next = self._next, self._next + 1
        return HostCopy(number, tokens, blocks)

    def free(self, copy: HostCopy) -> None:
        """The copy is needed no more. Raises InvariantViolation for one that was freed."""
        self._blocks.free(copy.blocks)

    def check_integrity(self) -> None:
        """Recompute the partition into free and held blocks."""
        self._blocks.check_integrity()
