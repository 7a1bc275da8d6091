"""Host memory for keys and values of retracted requests, and the copies there and back. Forward thread only.

Copies out run on a stream of their own, so that no step waits for them: what they read is leased. Copies back run on
the forward stream, before the first step of their row: a step waits for these bytes, and not for the prompt's compute.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch

from core.device.event import Event
from core.device.recorder import Recorder
from core.device.staging import WORD, Staging
from core.device.streams import DeviceStreams
from core.memory.host_bytes import host_bytes
from core.memory.host_moves import CopyBack, CopyOut, HostCopy
from core.types.arrays import Ints

BOUNCE = 8 << 20
"""Bytes of the device buffers through which copies pass: scattered slots on one side, blocks on the other."""
HOST = "host_kv"
"""Name of the arena for a `Recorder`; its places are blocks."""


class HostArena:
    """Blocks 1 to `num_blocks` of `block` bytes each, pinned where the device is CUDA.

    A copy of n tokens is, for each tensor of `pool` in turn, the bytes of its n slots, end to end over the blocks.
    """

    def __init__(
        self,
        pool: tuple[str, Sequence[torch.Tensor]],
        num_blocks: int,
        block: int,
        streams: DeviceStreams,
        bounce: int = BOUNCE,
    ) -> None:
        """`pool`: its name, and its tensors, each [slots, ...] and contiguous.

        Raises ConfigError where host memory has no room.
        """
        self._name, tensors = pool
        self._slots = [_as_words(tensor) for tensor in tensors]
        self._block = block
        self._streams = streams
        self._staging = Staging(streams.device)
        self._recorder: Recorder | None = streams.recorder
        # Drawn now: the first copy finds it.
        self._stream = streams.transfer
        self._bytes = host_bytes(self, num_blocks * block, streams.device)
        # At least one slot; allocated once, so that no copy finds the device's memory full. One for each stream.
        size = -(-max([bounce, *(_row_bytes(slots) for slots in self._slots)]) // WORD) * WORD
        self._bounce_out, self._bounce_back = (
            torch.empty(size, dtype=torch.uint8, device=streams.device) for _ in range(2)
        )
        self._landing: dict[int, Event] = {}
        """By number of the copy: fired once it is in host memory."""

    def copy_out(self, out: CopyOut) -> Event:
        """Begin a copy, behind all steps that were launched; the event fires when it has landed."""
        ready, landed = self._streams.new_event(), self._streams.new_event()
        ready.record(self._streams.forward)
        with self._streams.on_transfer():
            ready.wait(self._stream)
            if self._recorder is not None:
                self._recorder.read(self._name, out.slots)
                self._recorder.wrote(HOST, out.copy.blocks)
            (index,) = self._staging.upload([out.slots])
            for slots, first, last, at in self._pieces(out.copy.tokens, 0, self._bounce_out):
                passing = _passing(self._bounce_out, slots, last - first)
                torch.index_select(slots, 0, index[first:last], out=passing)
                self._each_run(out.copy, at, self._bounce_out[: passing.nbytes], to_host=True)
            landed.record(self._stream)
        for number in out.dropped:
            del self._landing[number]
        self._landing[out.copy.number] = landed
        return landed

    def copy_back(self, back: CopyBack, staging: Staging | None = None) -> None:
        """Fill the slots of `back` on the forward stream, which waits until the copy has landed; the host does not.

        `staging`: may have the slots on the device already.
        """
        self._landing.pop(back.copy.number).wait(self._streams.forward)
        if self._recorder is not None:
            self._recorder.read(HOST, back.copy.blocks)
            self._recorder.wrote(self._name, back.slots)
        if not len(back.slots):
            return
        (index,) = (staging or self._staging).upload([back.slots])
        for slots, first, last, at in self._pieces(back.copy.tokens, back.skip, self._bounce_back):
            passing = _passing(self._bounce_back, slots, last - first)
            self._each_run(back.copy, at, self._bounce_back[: passing.nbytes], to_host=False)
            slots.index_copy_(0, index[first - back.skip : last - back.skip], passing)

    def _pieces(self, tokens: int, skip: int, bounce: torch.Tensor) -> Iterator[tuple[torch.Tensor, int, int, int]]:
        """(tensor, first and last token, offset in the copy in bytes) of what passes `bounce` at once."""
        at = 0
        for slots in self._slots:
            size = _row_bytes(slots)
            step = bounce.numel() // size
            for first in range(skip, tokens, step):
                yield slots, first, min(first + step, tokens), at + first * size
            at += tokens * size

    def _each_run(self, copy: HostCopy, at: int, passing: torch.Tensor, *, to_host: bool) -> None:
        """Copy `passing`, uint8[n], to or from byte `at` of `copy` on: once for each run of neighbouring blocks."""
        end, block = at + passing.numel(), self._block
        for begin, stop, home in _runs(copy.blocks, block):
            low, high = max(at, begin), min(end, stop)
            if low >= high:
                continue
            held = self._bytes[home + low - begin : home + high - begin]
            moved = passing[low - at : high - at]
            if to_host:
                held.copy_(moved, non_blocking=True)
            else:
                moved.copy_(held, non_blocking=True)


def _runs(blocks: Ints, block: int) -> list[tuple[int, int, int]]:
    """(first byte, end, place in the arena) of each run of blocks that follow one another in both."""
    cuts = [0, *(np.flatnonzero(np.diff(blocks) != 1) + 1).tolist(), len(blocks)]
    return [(cut * block, to * block, (int(blocks[cut]) - 1) * block) for cut, to in pairwise(cuts)]


def _as_words(tensor: torch.Tensor) -> torch.Tensor:
    """[slots, n]: the same memory as whole words, or bytes where a slot has no whole number of words.

    Copies need no dtype, and not every one can be gathered.
    """
    flat = tensor.view(tensor.shape[0], -1)
    return flat.view(torch.int64 if flat.shape[1] * flat.itemsize % WORD == 0 else torch.uint8)


def _row_bytes(slots: torch.Tensor) -> int:
    return slots.shape[1] * slots.itemsize


def _passing(bounce: torch.Tensor, slots: torch.Tensor, count: int) -> torch.Tensor:
    """The beginning of `bounce` as `count` slots."""
    return bounce[: count * _row_bytes(slots)].view(slots.dtype).view(count, slots.shape[1])
