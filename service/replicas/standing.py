"""What was done to all replicas, so that one that starts later is made as they are."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from core.errors import EngineDead, SlipstreamError
from core.types.control import WeightSource
from service.errors import EngineSilent, NotReady
from service.replicas.replica_engine import ReplicaEngine

log = logging.getLogger(__name__)
Answer = TypeVar("Answer")


class Members(Protocol):
    """The engines by place, and what it means to lose one."""

    def ready(self) -> dict[int, ReplicaEngine]:
        """Those that serve and were heard of lately."""
        ...

    def silent(self) -> dict[int, ReplicaEngine]:
        """Those that serve and are silent."""
        ...

    def restart(self, place: int, engine: ReplicaEngine) -> None:
        """End `engine` at `place`, if it is still there; another one starts there."""
        ...


class Standing:
    """Kept while something is done to all replicas, and while a new one is made as they are."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self.weights: tuple[WeightSource, str] | None = None
        """Where those that serve are, and their version; None: those of the settings."""
        self.paused: bool | None = None
        """None: not paused. Else whether streams were ended and requests are refused."""
        self.asleep = False
        self.adapters: dict[str, tuple[str, bool]] = {}
        """Loaded since the start: path, and whether pinned."""
        self.unloaded: set[str] = set()
        """Names that were unloaded and not loaded again."""

    async def in_turn(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """The result of `work`, which waits for its turn."""
        async with self._lock:
            return await work

    async def alone(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """The result of `work`, which waits for its turn, and goes on to its end if the caller leaves."""
        return await to_its_end(self.in_turn(work))

    async def repeat(self, engine: ReplicaEngine, peer: ReplicaEngine | None) -> None:
        """Make `engine`, which has just started, as `peer` is, which serves already. Raises what the calls do."""
        if self.weights is not None:
            source, version = self.weights
            try:
                await engine.control.update_weights(source, version)
            except SlipstreamError as error:
                log.error("weights %s are not to be had of %r any more", version, source.path or source.name)
                raise error
        if self.adapters or self.unloaded:
            await self._same_adapters(engine, peer)
        if self.paused is not None:
            await engine.control.pause(ends=self.paused)
        if self.asleep:
            await engine.control.sleep()

    async def _same_adapters(self, engine: ReplicaEngine, peer: ReplicaEngine | None) -> None:
        has = await _names(engine)
        if peer is not None:
            # Some that were loaded once may have been evicted since.
            wanted = await _names(peer)
        else:
            wanted = (has | set(self.adapters)) - self.unloaded
        for name in has - wanted:
            await engine.unload_adapter(name)
        for name, (path, pinned) in self.adapters.items():
            if name in wanted - has:
                try:
                    await engine.load_adapter(name, path, pinned=pinned)
                except SlipstreamError as error:
                    # Requests for it go to the others.
                    log.error("adapter %s cannot be loaded again: %s", name, error.message)


async def to_its_end(work: Coroutine[Any, Any, Answer]) -> Answer:
    """The result of `work`, which goes on if the caller leaves.

    Cut off, it would have been done to some replicas and not to others.
    """
    task = asyncio.create_task(work)
    # Retrieved: asyncio would log the error of a caller that has left.
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return await asyncio.shield(task)


async def _names(engine: ReplicaEngine) -> set[str]:
    return {info.name for info in (await engine.list_adapters()).adapters if not info.unloading}


async def in_all(
    members: Members, call: Callable[[ReplicaEngine], Awaitable[Answer]], *, changes: bool = True
) -> tuple[dict[int, Answer], dict[int, BaseException]]:
    """Call all at once. Returns the answers and the errors by place, without engines that ended meanwhile.

    Those that are silent are left out; if the call `changes` something, they are started again, to be made as the
    others are. Raises NotReady where none is left.
    """
    ready, left_out = members.ready(), members.silent()
    found = await asyncio.gather(*map(call, ready.values()), return_exceptions=True)
    answers: dict[int, Answer] = {}
    errors: dict[int, BaseException] = {}
    for place, each in zip(ready, found, strict=True):
        if isinstance(each, EngineSilent):
            left_out[place] = ready[place]
        elif not isinstance(each, BaseException):
            answers[place] = each
        elif not isinstance(each, EngineDead):
            errors[place] = each
    if not answers and not errors:
        raise NotReady("no engine of this server is ready")
    if answers and changes:
        for place, engine in left_out.items():
            members.restart(place, engine)
    return answers, errors


async def done_in_all(members: Members, call: Callable[[ReplicaEngine], Awaitable[Answer]]) -> Sequence[Answer]:
    """As `in_all`, for what all must have done. Raises the first error where none could do it.

    Where some could, the others are started again, to be made as these are.
    """
    ready = members.ready()
    answers, errors = await in_all(members, call)
    for place, error in errors.items():
        if not answers:
            raise error
        log.error("engine %d could not do what the others did (%s): it is started again", place, error)
        if place in ready:
            members.restart(place, ready[place])
    return tuple(answers.values())
