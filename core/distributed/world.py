"""The ranks of one engine, over torch.distributed: what the leader tells the others, in one order for all.

Rank 0 leads. Whatever it says, it says from the thread that launches steps, and each rank hears it in that order,
between the collectives of one step and those of the next. One group carries both.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from core.errors import StartupError

LEADER: Final = 0
HOST: Final = "127.0.0.1"
LOOPBACK: Final = "lo"
"""The interface that has it."""
FIRST: Final = 1 << 14
"""Bytes of the first part of a message, its length included: most messages have no other."""
_LENGTH: Final = 8
MOST_SENT: Final = 8
"""Messages, each of two parts at most, that are on their way to a rank."""
JOIN_SECONDS: Final = 120.0
"""How long a rank waits for the others at start."""
PAUSE: Final = 0.02
"""Seconds between two looks for them."""
SILENCE: Final = timedelta(days=365)
"""Ranks that have no work wait for news without end; a rank that is gone is noticed by its closed connection."""


def _wait_for(ranks: list[str], store: TCPStore, check: Callable[[], None]) -> None:
    """Raises TimeoutError that names the ranks which are not there in time."""
    end = time.monotonic() + JOIN_SECONDS
    while not store.check(ranks):
        check()
        if time.monotonic() > end:
            raise TimeoutError("no word of rank " + ", ".join(each for each in ranks if not store.check([each])))
        time.sleep(PAUSE)


class World:
    """This process among `size` ranks. One thread at a time."""

    def __init__(self, rank: int, size: int, store: TCPStore) -> None:
        """Of a process group that was joined: see `join`."""
        self._store = store
        self.rank = rank
        self.size = size
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()

    @classmethod
    def join(
        cls,
        rank: int,
        size: int,
        port: int,
        device: torch.device,
        listener: socket.socket | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> World:
        """Meet the other ranks at `port` of this machine, where rank 0 has the `listener`.

        Nothing outside the machine can connect. `check` is asked while the leader waits, and raises where that is in
        vain. Raises StartupError where a rank stays away, or this process is a rank already.
        """
        if dist.is_initialized():
            raise StartupError("a process can be a rank of one engine at a time")
        # Both would otherwise listen on every interface.
        os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
        listening = None if listener is None else listener.detach()
        backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
        try:
            store = TCPStore(
                *(HOST, port, size, rank == LEADER),
                timeout=timedelta(seconds=JOIN_SECONDS),
                wait_for_workers=False,
                master_listen_fd=listening,
            )
            store.set(str(rank), "here")
            _wait_for([str(each) for each in range(size)], store, check)
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=SILENCE)
        except (dist.DistError, TimeoutError, RuntimeError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise StartupError(
                f"rank {rank} of {size} did not meet the others at {HOST}:{port} within {JOIN_SECONDS:.0f} s: {reason}"
            ) from error
        return cls(rank, size, store)

    def send(self, data: bytes) -> None:
        """Tell all others `data`; every one of them is in `receive`, or comes there. Leader only.

        Waits for none of them, except where one is `MOST_SENT` messages behind. Raises RuntimeError once one is gone.
        """
        whole = bytearray(len(data).to_bytes(_LENGTH, "little") + data)
        whole += bytes(max(0, FIRST - len(whole)))
        told = torch.frombuffer(whole, dtype=torch.uint8)
        for rank in range(1, self.size):
            for part in (told[:FIRST], told[FIRST:]):
                if len(part):
                    self._sent.append((dist.isend(part, rank), told))
        while len(self._sent) > MOST_SENT * self.size:
            self._sent.popleft()[0].wait()

    def receive(self) -> memoryview:
        """What the leader sends next; waits for it. Raises RuntimeError once the leader is gone."""
        first = torch.zeros(FIRST, dtype=torch.uint8)
        dist.recv(first, LEADER)
        length = int.from_bytes(first[:_LENGTH].numpy().tobytes(), "little")
        if length <= FIRST - _LENGTH:
            return first.numpy().data[_LENGTH : _LENGTH + length]
        whole = torch.empty(length, dtype=torch.uint8)
        whole[: FIRST - _LENGTH] = first[_LENGTH:]
        rest = whole[FIRST - _LENGTH :]
        dist.recv(rest, LEADER)
        return whole.numpy().data

    def fail(self, reason: str) -> None:
        """Leave word why this rank ends."""
        with contextlib.suppress(RuntimeError):
            self._store.set(f"failed-{self.rank}", reason)

    def failure(self, seconds: float) -> str | None:
        """Why a rank has ended, as it told by `fail`, with its number; None if none has told within `seconds`."""
        end = time.monotonic() + seconds
        names = {f"failed-{rank}": rank for rank in range(self.size)}
        while True:
            for name, rank in names.items():
                if self._store.check([name]):
                    return f"rank {rank}: {self._store.get(name).decode()}"
            if time.monotonic() > end:
                return None
            time.sleep(PAUSE)

    def share(self, tokens: torch.Tensor) -> None:
        """Make `tokens`, contiguous, what they are on the leader, on its device and stream."""
        dist.broadcast(tokens, LEADER)

    def leave(self) -> None:
        """End the group. Idempotent."""
        if dist.is_initialized():
            dist.destroy_process_group()
