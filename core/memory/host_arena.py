"""Host memory for keys and values, and the copies there and back. Forward thread only.

Copies out run on a stream of their own, so that no step waits for them: what they read is leased. Copies back run on
the forward stream, before the first step of their row: a step waits for these bytes, and not for the prompt's compute.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch

from core.device.event import Event
from core.device.recorder import Recorder
from core.device.staging import WORD, Staging
from core.device.streams import DeviceStreams
from core.invariants import check
from core.memory.host_bytes import host_bytes
from core.memory.host_moves import CopyBack, CopyOut, HostCopy, parts
from core.types.arrays import Ints

BOUNCE = 8 << 20
"""Bytes of the device buffers through which copies pass: scattered slots on one side, blocks on the other."""
HOST = "host_kv"
"""Name of the arena for a `Recorder`; its places are blocks."""


class HostArena:
    """Blocks 1 to `num_blocks` of `block` bytes each, pinned where the device is CUDA.

    A copy of n tokens is, for each tensor of `pool` in turn, the bytes of its n slots, end to end over the blocks; and
    behind these, for each of the pools `beside`, the slots that the copy has of it.
    """

    def __init__(
        self,
        pool: tuple[str, Sequence[torch.Tensor]],
        num_blocks: int,
        block: int,
        streams: DeviceStreams,
        bounce: int = BOUNCE,
        beside: Sequence[tuple[str, Sequence[torch.Tensor]]] = (),
    ) -> None:
        """`pool`: its name, and all that it stores, each tensor [slots, ...] and contiguous; `beside`: other pools.

        Raises ConfigError where host memory has no room.
        """
        self._name, tensors = pool
        self._slots = [_as_words(tensor) for tensor in tensors]
        self._before = [0, *accumulate(_row_bytes(slots) for slots in self._slots)]
        """By tensor: bytes of a token in the tensors before it."""
        self._beside = [(other, [_as_words(tensor) for tensor in stored]) for other, stored in beside]
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
        self._carry = _by_processor if streams.at_once else _by_device
        self._held: dict[int, _Held] = {}
        """By number: each copy that was not given up."""

    def copy_out(self, out: CopyOut) -> Event:
        """Begin copies, behind all steps that were launched; the event fires when they have landed."""
        ready, landed = self._streams.new_event(), self._streams.new_event()
        for number in out.dropped:
            del self._held[number]
        # What lies beyond its blocks would be lost without a word.
        for copy in out.copies:
            needed, room = self._end_of(copy), len(copy.blocks) * self._block
            check("host_copy_room", needed <= room, needed=needed, room=room)
        self._held.update((copy.number, _Held(landed, _runs(copy.blocks, self._block))) for copy in out.copies)
        others = self._read_beside(out)
        ready.record(self._streams.forward)
        with self._streams.on_transfer():
            ready.wait(self._stream)
            if self._recorder is not None:
                self._recorder.read(self._name, out.slots)
                self._recorder.wrote(HOST, np.concatenate([copy.blocks for copy in out.copies]))
            (index,) = self._staging.upload([out.slots])
            for tensor, first, last in self._pieces(0, len(out.slots), self._bounce_out):
                passing = _passing(self._bounce_out, self._slots[tensor], last - first)
                torch.index_select(self._slots[tensor], 0, index[first:last], out=passing)
                self._each_part(out.copies, tensor, (first, last), self._bounce_out, to_host=True)
            for at, read in others:
                self._each_run(out.copies[0], at, read, to_host=True)
                if read.is_cuda:
                    read.record_stream(self._stream)
            landed.record(self._stream)
        return landed

    def copy_back(self, back: CopyBack, staging: Staging | None = None) -> None:
        """Fill the slots of `back` on the forward stream, which waits until the copies have landed; the host does not.

        `staging`: may have the slots on the device already.
        """
        for landed in dict.fromkeys(self._held[copy.number].landed for copy in back.copies):
            landed.wait(self._streams.forward)
        if self._recorder is not None:
            self._recorder.read(HOST, np.concatenate([copy.blocks for copy in back.copies]))
            self._recorder.wrote(self._name, back.slots)
        if len(back.slots):
            self._fill(back, staging or self._staging)
        if back.beside:
            self._fill_beside(back, staging or self._staging)

    def _fill(self, back: CopyBack, staging: Staging) -> None:
        (index,) = staging.upload([back.slots])
        for tensor, first, last in self._pieces(back.skip, back.skip + len(back.slots), self._bounce_back):
            passing = _passing(self._bounce_back, self._slots[tensor], last - first)
            self._each_part(back.copies, tensor, (first, last), self._bounce_back, to_host=False)
            self._slots[tensor].index_copy_(0, index[first - back.skip : last - back.skip], passing)

    def _read_beside(self, out: CopyOut) -> list[tuple[int, torch.Tensor]]:
        """(first byte in the copy, what is to be there: uint8[n]) of pools beside, read on the forward stream."""
        if not out.beside:
            return []
        with self._streams.on_forward():
            indices = self._staging.upload(list(out.beside))
            if self._recorder is not None:
                for (name, _), slots in zip(self._beside, out.beside, strict=True):
                    self._recorder.read(name, slots)
            return [
                (at, torch.index_select(tensor, 0, indices[pool]).view(torch.uint8).flatten())
                for pool, tensor, at in self._places_beside(out.copies[0])
            ]

    def _fill_beside(self, back: CopyBack, staging: Staging) -> None:
        (copy,), indices = back.copies, staging.upload(list(back.beside))
        for pool, tensor, at in self._places_beside(copy):
            size, count = _row_bytes(tensor), len(indices[pool])
            passing = torch.empty(count * size, dtype=torch.uint8, device=tensor.device)
            self._each_run(copy, at + (copy.beside[pool] - count) * size, passing, to_host=False)
            tensor.index_copy_(0, indices[pool], _passing(passing, tensor, count))
        if self._recorder is not None:
            for (name, _), slots in zip(self._beside, back.beside, strict=True):
                self._recorder.wrote(name, slots)

    def _places_beside(self, copy: HostCopy) -> Iterator[tuple[int, torch.Tensor, int]]:
        """(number of a pool beside, one of its tensors, first byte of its slots in `copy`)."""
        at = copy.tokens * self._before[-1]
        for pool, count in enumerate(copy.beside):
            for tensor in self._beside[pool][1]:
                yield pool, tensor, at
                at += count * _row_bytes(tensor)

    def _end_of(self, copy: HostCopy) -> int:
        """How many bytes `copy` has."""
        others = (count * _row_bytes(each) for count, (_, stored) in zip(copy.beside, self._beside) for each in stored)
        return copy.tokens * self._before[-1] + sum(others)

    def views(self, copy: HostCopy, start: int = 0) -> list[memoryview]:
        """The bytes of tokens [start, tokens) of `copy`, to be read once it has landed, or to be filled. Any thread.

        What comes of another engine has the same order: for each tensor in turn the bytes of these tokens, and then all
        that the copy has beside; nothing where no token is left.
        """
        if start and start >= copy.tokens:
            return []
        found, runs, held = list[memoryview](), _runs(copy.blocks, self._block), self._bytes.numpy().data
        spans = [
            (copy.tokens * before + start * _row_bytes(slots), copy.tokens * (before + _row_bytes(slots)))
            for slots, before in zip(self._slots, self._before, strict=False)
        ]
        for at, end in [*spans, (copy.tokens * self._before[-1], self._end_of(copy))]:
            for begin, stop, home in runs:
                if (low := max(at, begin)) < (high := min(end, stop)):
                    found.append(held[home + low - begin : home + high - begin])
        return found

    def _pieces(self, begin: int, end: int, bounce: torch.Tensor) -> Iterator[tuple[int, int, int]]:
        """(number of a tensor, first and last token) of what passes `bounce` at once, of tokens [begin, end)."""
        for tensor, slots in enumerate(self._slots):
            step = bounce.numel() // _row_bytes(slots)
            for first in range(begin, end, step):
                yield tensor, first, min(first + step, end)

    def _each_part(
        self, copies: Sequence[HostCopy], tensor: int, span: tuple[int, int], bounce: torch.Tensor, *, to_host: bool
    ) -> None:
        """Copy tokens [span) of `copies`, as far as this tensor has them, from or to the beginning of `bounce`."""
        size, before = _row_bytes(self._slots[tensor]), self._before[tensor]
        for part in parts(copies, *span):
            passing = bounce[part.at * size : (part.at + part.count) * size]
            self._each_run(part.copy, part.copy.tokens * before + part.first * size, passing, to_host=to_host)

    def _each_run(self, copy: HostCopy, at: int, passing: torch.Tensor, *, to_host: bool) -> None:
        """Copy `passing`, uint8[n], to or from byte `at` of `copy` on: once for each run of neighbouring blocks."""
        end = at + passing.numel()
        for begin, stop, home in self._held[copy.number].runs:
            low, high = max(at, begin), min(end, stop)
            if low >= high:
                continue
            held = self._bytes[home + low - begin : home + high - begin]
            moved = passing[low - at : high - at]
            self._carry(*((held, moved) if to_host else (moved, held)))


@dataclass(frozen=True, slots=True)
class _Held:
    landed: Event
    """Fired once the copy is in host memory."""
    runs: list[tuple[int, int, int]]
    """See `_runs`."""


def _by_device(to: torch.Tensor, held: torch.Tensor) -> None:
    to.copy_(held, non_blocking=True)


def _by_processor(to: torch.Tensor, held: torch.Tensor) -> None:
    # A team of OpenMP for every few hundred KiB would wait for cores that others use, ten times as long as this takes.
    np.copyto(to.numpy(), held.numpy())


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
