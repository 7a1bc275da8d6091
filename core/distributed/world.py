"""The ranks of one engine, over torch.distributed: what the leader tells the others, in one order for all.

Rank 0 leads. Whatever it says, it says from the thread that launches steps, and each rank hears it in that order,
between the collectives of one step and those of the next. One group carries both.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from core.distributed.meeting import INTERFACE, LEADER, PAUSE, Meeting
from core.distributed.pulse import Pulse
from core.errors import StartupError

FIRST: Final = 1 << 14
"""Bytes of the first part of a message, its length included: most messages have no other."""
_LENGTH: Final = 8
MOST_SENT: Final = 8
"""Messages, each of two parts at most, that are on their way to a rank."""
SILENCE: Final = timedelta(days=365)
"""Ranks that have no work wait for news without end; a rank that is gone is noticed by its closed connection."""


def _enter(store: Store, rank: int, here: str, *, asks: bool) -> None:
    """Say that this rank is there. Raises TimeoutError where another process is, or was."""
    if store.add(f"taken-{rank}", 1) > 1:
        raise TimeoutError("another process is or was this rank; start all ranks again")
    store.set(f"address-{rank}", here)
    store.set(f"secret-{rank}", "a" if asks else "no")
    store.set(str(rank), "here")


def _check_secrets(store: Store, rank: int, size: int) -> None:
    """Raises TimeoutError where some ranks have a secret and others none: the proof would wait for an answer."""
    told = [store.get(f"secret-{each}").decode() for each in range(size)]
    if len(set(told)) > 1:
        others = [str(each) for each in range(size) if told[each] != told[rank]]
        said = f"rank {', '.join(others)} has {'no' if told[rank] == 'a' else 'a'} rank_secret_file"
        raise TimeoutError(f"{said}, and rank {rank} {'has one' if told[rank] == 'a' else 'none'}")


def is_loss(error: BaseException) -> bool:
    """Whether `error` says that a connection to another rank is gone."""
    return any(each in str(error) for each in ("losed by peer", "reset by peer"))


def _set_interface(name: str | None) -> None:
    """What the environment had before: processes that are started later have it too."""
    if name is None:
        os.environ.pop(INTERFACE, None)
    else:
        os.environ[INTERFACE] = name


class World:
    """This process among `size` ranks. One thread at a time."""

    def __init__(self, rank: int, size: int, store: Store, meeting: Meeting, undo: ExitStack) -> None:
        """Of a process group that was joined: see `join`. `undo`: what is closed when it is left."""
        self._undo = undo
        self._store = store
        self._meeting = meeting
        self.rank = rank
        self.size = size
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()
        self.pulse: Pulse | None = None
        """Signs of life of ranks on other machines."""

    @classmethod
    def join(
        cls, rank: int, size: int, meeting: Meeting, device: torch.device, check: Callable[[], None] = lambda: None
    ) -> World:
        """Meet the other ranks.

        Strangers are no ranks: see `Meeting`. `check` is asked while this one waits, and raises where that is in
        vain. Raises StartupError where a rank stays away, or this process is a rank already.
        """
        if dist.is_initialized():
            raise StartupError("a process can be a rank of one engine at a time")
        backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
        with ExitStack() as undo:
            undo.callback(_set_interface, os.environ.get(INTERFACE))
            here = meeting.listen_inside()
            try:
                store = meeting.store(rank, size)
                _enter(store, rank, here, asks=bool(meeting.secret))
                meeting.wait_for(range(size), store, check)
                _check_secrets(store, rank, size)
                dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=SILENCE)
            except (dist.DistError, TimeoutError, RuntimeError, ValueError) as error:
                reason = str(error).partition("\n")[0]
                raise StartupError(
                    f"rank {rank} of {size} did not meet the others at {meeting.host}:{meeting.port} within "
                    f"{meeting.seconds:.0f} s: {reason}"
                ) from error
            undo.callback(dist.destroy_process_group)
            meeting.prove()
            return cls(rank, size, store, meeting, undo.pop_all())

    def group(self, **settings: Any) -> Any:
        """Another group of all ranks, with connections of its own. All make it at the same time."""
        made = dist.new_group(list(range(self.size)), **settings)
        self._meeting.prove(made)
        return made

    def beat(self) -> Pulse:
        """Give signs of life from now on; the leader watches all others, and they watch it."""
        watched = [rank for rank in range(self.size) if rank != self.rank and LEADER in (rank, self.rank)]
        client = replace(self._meeting, listener=None)
        self.pulse = Pulse(client.store(self.rank, self.size), self.rank, {each: self.called(each) for each in watched})
        self.pulse.start()
        return self.pulse

    def named(self, error: str) -> str | None:
        """The ranks at the address at which a connection failed, as `error` of gloo has it; None where it has none."""
        if self.pulse is None:
            return None
        addresses = {rank: self.said(rank, "address") for rank in range(self.size) if rank != self.rank}
        there = {rank: address for rank, address in addresses.items() if f"[{address}]" in error}
        return f"rank {', '.join(map(str, there))} at {next(iter(there.values()))}" if there else None

    def called(self, rank: int) -> str:
        """`rank` as an operator finds it."""
        return f"rank {rank} at {self.said(rank, 'address')}"

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

    def say(self, name: str, value: str) -> None:
        """Leave word for the others, under a `name`."""
        self._store.set(f"{name}-{self.rank}", value)

    def said(self, rank: int, name: str) -> str:
        """The word of `rank` under that name; waits for it. Raises RuntimeError where it does not come."""
        told: bytes = self._store.get(f"{name}-{rank}")
        return told.decode()

    def fail(self, reason: str) -> None:
        """Leave word why this rank ends."""
        with contextlib.suppress(RuntimeError):
            self.say("failed", reason)

    def failure(self, seconds: float) -> str | None:
        """Why a rank has ended, as it told by `fail`, with its number; None if none has told within `seconds`."""
        end = time.monotonic() + seconds
        names = {f"failed-{rank}": rank for rank in range(self.size)}
        while True:
            for name, rank in names.items():
                if self._store.check([name]):
                    return f"rank {rank}: {self.said(rank, 'failed')}"
            if time.monotonic() > end:
                return None
            time.sleep(PAUSE)

    def say_ended(self) -> None:
        """Leave word that this rank has heard all, and ends."""
        with contextlib.suppress(RuntimeError):
            self.say("ended", "")

    def wait_for_ended(self, ranks: Iterable[int], seconds: float) -> None:
        """Until each of `ranks` has said so, or is gone, or for `seconds`: what is on its way would be lost."""
        end, names = time.monotonic() + seconds, [f"ended-{rank}" for rank in ranks]
        with contextlib.suppress(RuntimeError):
            while names and not self._store.check(names) and time.monotonic() < end:
                time.sleep(PAUSE)

    def share(self, tokens: torch.Tensor) -> None:
        """Make `tokens`, contiguous, what they are on the leader, on its device and stream."""
        dist.broadcast(tokens, LEADER)

    def leave(self) -> None:
        """End the group. Idempotent."""
        if self.pulse is not None:
            self.pulse.stop()
        self._undo.close()
