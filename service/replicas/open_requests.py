"""The requests of a server with several engines that have not ended: where each is, and a description of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from core.errors import DuplicateRequest
from core.types.streams import StreamInfo
from service.replicas.replica_engine import ReplicaEngine


class Described(Protocol):
    """A request that can be described."""

    def info(self) -> StreamInfo: ...


@dataclass
class Arriving:
    """A request that no engine has answered yet, and the engine that is being asked."""

    engine: ReplicaEngine | None = None
    aborted: bool = False


@dataclass
class OpenRequests:
    """`core.engine.api.OpenStreams`, by request id. Ids are unique among all engines. Event-loop thread only."""

    _open: dict[str, tuple[Described, ReplicaEngine]] = field(default_factory=dict)
    _arriving: dict[str, Arriving] = field(default_factory=dict)
    _counted: set[str] = field(default_factory=set)
    """Of those that are open, the ones whose engine has told of their end: their last events are on the way."""
    _told: Callable[[StreamInfo], None] = lambda _: None

    def __len__(self) -> int:
        return len(self._open)

    def oldest(self, count: int) -> tuple[StreamInfo, ...]:
        """At most `count` requests, oldest first."""
        return tuple(request.info() for request, _ in islice(self._open.values(), count))

    def on_end(self, told: Callable[[StreamInfo], None]) -> None:
        """Call `told` with each request that has ended, as its engine counted it. There is one listener."""
        self._told = told

    def ended(self, info: StreamInfo) -> None:
        """Take what an engine tells of a request that has ended, or what is known of one whose engine is lost. Once."""
        if info.request_id in self._counted:
            return
        if info.request_id in self._open:
            self._counted.add(info.request_id)
        self._told(info)

    @contextmanager
    def arriving(self, request_id: str) -> Iterator[Arriving]:
        """Hold the id while engines are asked to take the request. Yields what is to be told the engine.

        Raises DuplicateRequest for an id that is open or arriving. An empty id is chosen by the engine.
        """
        arriving = Arriving()
        if not request_id:
            yield arriving
            return
        if request_id in self._open or request_id in self._arriving:
            raise DuplicateRequest("a live request has this request_id")
        self._arriving[request_id] = arriving
        try:
            yield arriving
        finally:
            del self._arriving[request_id]

    def add(self, request_id: str, request: Described, engine: ReplicaEngine) -> None:
        """Note that `engine` has taken the request."""
        self._open[request_id] = request, engine

    def remove(self, request_id: str) -> None:
        """Note that the request has ended. Idempotent."""
        self._open.pop(request_id, None)
        self._counted.discard(request_id)

    def abort(self, request_id: str) -> ReplicaEngine | None:
        """The engine that has the request or is asked to take it, and that is to abort it; None where there is none.

        No further engine is asked to take it.
        """
        if request_id in self._open:
            return self._open[request_id][1]
        arriving = self._arriving.get(request_id)
        if arriving is None:
            return None
        arriving.aborted = True
        return arriving.engine
