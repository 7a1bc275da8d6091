"""NIXL for one side of a transfer: an engine reads memory of another one, over RDMA, shared memory or TCP.

NIXL (github.com/ai-dynamo/nixl) is asked for by `transfer_engine`, and is not installed by itself. Its thread that
makes progress never sleeps: it takes a whole core of an engine that transfers nothing. So there is none here. Progress
is made while bytes are under way, by the thread that waits for them; on two cores they went 2.5 times as fast over TCP,
and five times over shared memory, as beside two such threads.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from core.errors import ConfigError

MOST_MET: Final = 256
"""Agents that are remembered; that of an engine which was not heard of for longest is met anew."""
Table = npt.NDArray[np.uint64]
T = TypeVar("T")


class NixlFailed(OSError):
    """NIXL has no connection to the other agent any more, or refuses what was asked for."""


@dataclass(eq=False, slots=True)
class Read:
    """A read that was begun, of the agent `name`."""

    name: str
    handle: Any
    """NIXL's own."""
    is_over: bool = False


def _told(method: Callable[..., T]) -> Callable[..., T]:
    """`method`, with the errors of NIXL, which have no common class, as NixlFailed."""

    @wraps(method)
    def tell(self: NixlAgent, *args: Any) -> T:
        try:
            return method(self, *args)
        except self.errors as error:
            raise NixlFailed(f"NIXL: {type(error).__name__}: {error}") from None

    return tell


class NixlAgent:
    """One agent of this process. Methods belong to one thread; those that ask NIXL for something raise NixlFailed."""

    def __init__(self, *, loopback: bool) -> None:
        """`loopback`: open no port beyond this machine, unless `UCX_NET_DEVICES` says which.

        Raises ConfigError where NIXL is there and does not work.
        """
        # Both read them as they are loaded. What they say belongs to the log: standard output is the command's own.
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
        os.environ.setdefault("UCX_LOG_FILE", "stderr")
        if loopback:
            # Its ports ask for no secret.
            os.environ.setdefault("UCX_NET_DEVICES", "lo")
        try:
            self._agent = self._made()
        except Exception as error:  # of a library's own kinds, or that it cannot be loaded
            raise ConfigError(f"transfer_engine nixl does not work here: {type(error).__name__}: {error}") from error
        self._held: dict[tuple[int, int], object] = {}
        """By address and size: memory that NIXL may touch, which stays where it is."""
        self._met: OrderedDict[str, str] = OrderedDict()
        """Name of an agent -> digest of what it has told of itself."""
        self._reading: Counter[str] = Counter()
        """By name of an agent: reads that are under way."""
        self._lost: set[str] = set()
        """Agents that are forgotten when these have ended: of an agent that is gone NIXL says of each read at once that
        there is none, and its bytes come all the same."""

    def _made(self) -> Any:
        import nixl._api as nixl

        printing = logging.getLogger("nixl")
        printing.handlers.clear()
        printing.propagate = True
        printing.setLevel(logging.WARNING)

        bindings = vars(nixl.nixlBind).values()
        self.errors = tuple(each for each in bindings if isinstance(each, type) and issubclass(each, Exception))
        self.name = f"slipstream-{secrets.token_hex(16)}"
        config = nixl.nixl_agent_config(enable_prog_thread=False, backends=[])
        agent = nixl.nixl_agent(self.name, config)
        agent.create_backend("UCX")
        return agent

    @_told
    def lend(self, parts: Sequence[memoryview]) -> Table:
        """uint64[n, 2]: address and size of each of `parts` that has bytes. NIXL may read and write there from now on.

        All memory that a part belongs to is registered at its first time, and kept until `close`: an arena, that is.
        """
        lent = [part for part in parts if len(part)]
        for part in lent:
            held = np.frombuffer(memoryview(part.obj).cast("B"), np.uint8)
            if (place := _place(held.data)) not in self._held:
                self._agent.register_memory([(*place, 0, "")], mem_type="DRAM")
                self._held[place] = held
        return np.array([_place(part) for part in lent], np.uint64).reshape(len(lent), 2)

    @_told
    def told(self) -> bytes:
        """What another agent has to know of this one to read what was lent."""
        told: bytes = self._agent.get_agent_metadata()
        return told

    @_told
    def meet(self, name: str, told: bytes) -> None:
        """Know the agent `name` by what it has `told`.

        An agent that was met by half, of words cut short, NIXL refuses for ever: only a peer with the secret can do so.
        """
        if name in self._lost:
            raise NixlFailed("the connection was lost, and reads over it have not ended")
        digest = hashlib.sha256(told).hexdigest()
        if self._met.get(name) != digest:
            met = self._agent.add_remote_agent(told)
            if (known := met.decode() if isinstance(met, bytes) else met) != name:
                # Or a peer would have agents kept here that nothing counts.
                self._agent.remove_remote_agent(known)
                raise NixlFailed("an agent calls itself otherwise")
            self._met[name] = digest
        self._met.move_to_end(name)
        if len(self._met) > MOST_MET:
            idle = [each for each in self._met if each != name and not self._reading[each]]
            for oldest in idle[: len(self._met) - MOST_MET]:
                self.forget(oldest)

    @_told
    def forget(self, name: str) -> None:
        """Know the agent `name` no more: at once, or when all that is read from it has ended."""
        if self._reading[name]:
            self._lost.add(name)
        elif self._met.pop(name, None) is not None:
            self._agent.remove_remote_agent(name)

    @_told
    def read(self, name: str, pieces: Table) -> Read | None:
        """Begin to read `pieces`, uint64[n, 3]: address here, address at the agent `name`, bytes; None if done."""
        here, there, sizes = pieces.T
        device = np.zeros_like(sizes)
        lists = [
            self._agent.get_xfer_descs(np.stack((at, sizes, device), axis=1), mem_type="DRAM") for at in (here, there)
        ]
        read = Read(name, self._agent.initialize_xfer("READ", *lists, name))
        self._reading[name] += 1
        return read if self._looked(read, self._agent.transfer) else None

    @_told
    def under_way(self, read: Read) -> bool:
        """Whether it is. Makes progress. Once it is not, or NixlFailed is raised, nothing writes for it any more.

        NIXL tells errors of connections that are over, on which nothing comes.
        """
        return self._looked(read, self._agent.check_xfer_state)

    @_told
    def progress(self) -> None:
        """Answer agents that read here, where the network does not do that by itself."""
        self._agent.get_new_notifs()

    def close(self) -> None:
        """End it, with all that is under way. Idempotent."""
        self._agent = None
        self._held.clear()

    def _looked(self, read: Read, look: Callable[[Any], str]) -> bool:
        """Whether `look` says that `read` is under way. What it has otherwise come to is over, and counted once."""
        if read.is_over:
            return False
        state = ""
        try:
            if (state := look(read.handle)) == "PROC":
                return True
        finally:
            if state != "PROC":
                self._ended(read)
        self._agent.release_xfer_handle(read.handle)
        if state != "DONE":
            raise NixlFailed(f"NIXL: a read ended as {state}")
        return False

    def _ended(self, read: Read) -> None:
        read.is_over = True
        self._reading -= Counter([read.name])
        if read.name in self._lost and not self._reading[read.name]:
            self._lost.discard(read.name)
            self.forget(read.name)


def _place(part: memoryview) -> tuple[int, int]:
    """Address and size of `part`."""
    return int(np.frombuffer(part, np.uint8).__array_interface__["data"][0]), len(part)
