"""Several engines as one: `core.engine.api.Engine` over replicas that each have the whole model.

Every request goes to one of them and stays there. What concerns the model is done in all of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from core.engine.api import EmbedCall, EngineState
from core.errors import Draining, EngineDead, StartupError
from core.types.adapters import AdapterList, AdapterLoad
from core.types.io import EmbedRequest, GenerateRequest, ModelInfo
from core.types.stats import EngineStats
from service.metrics.collector import KV_POOL
from service.replicas.dispatch import Dispatch
from service.replicas.open_requests import OpenRequests
from service.replicas.order import Order
from service.replicas.prompt_pieces import PIECE_TOKENS
from service.replicas.replica import LOOK_SECONDS, Replica
from service.replicas.replica_adapters import ReplicaAdapters
from service.replicas.replica_control import ReplicaControl
from service.replicas.replica_engine import ReplicaEngine
from service.replicas.replica_prefixes import ReplicaPrefixes
from service.replicas.replica_stream import ReplicaStream
from service.replicas.router import Router
from service.replicas.set_stats import SetStats
from service.replicas.shared_fate import SharedFate
from service.replicas.spawned import Spawn
from service.replicas.standing import Standing


class ReplicaSet:
    """READY once it was started. Event-loop thread only, except `state` and `stats`."""

    def __init__(
        self,
        orders: Sequence[Order],
        spawn: Spawn,
        make: Callable[[int], ReplicaEngine],
        requests: OpenRequests,
        router: Router | None = None,
    ) -> None:
        """One replica for each of `orders`. `spawn` and `make` are those of `Replica`."""
        self._fate = SharedFate(spawn, len(orders), lambda place: self._replicas[place].kill())
        self._shares = bool(orders[0].settings["expert_parallel"])
        """Whether no engine can do anything without all others."""
        fate = (self._fate.ended, self._all_work) if self._shares else ()
        spawn = self._fate.spawn if self._shares else spawn
        self._replicas = tuple(Replica(order, spawn, make, self.changed, *fate) for order in orders)
        self._router, self._requests = router or Router(len(orders)), requests
        self._standing = Standing()
        self._state = EngineState.STARTING
        self._changed = asyncio.Event()
        self._dead: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._tasks: list[asyncio.Task[None]] = []
        self._keeping: list[asyncio.Task[None]] = []
        self.control = ReplicaControl(self, self._standing, self._router.forget)
        self.prefixes = ReplicaPrefixes(self, len(orders), lambda: self._changed, self._router.forget)
        self._adapters = ReplicaAdapters(self, self._standing)
        self._stats = SetStats(self._replicas, self._router.books, self.control)
        self._dispatch = Dispatch(self._replicas, self._router, requests, orders[0].settings["seed"])

    async def start(self) -> ReplicaSet:
        """Start all replicas; returns itself once all serve. Raises StartupError, and then none is left."""
        # Also while they start: one that freezes then would be waited for without end.
        self._tasks = [asyncio.create_task(self._look())]
        try:
            async with asyncio.TaskGroup() as group:
                for replica in self._replicas:
                    group.create_task(self._begin(replica))
        except BaseExceptionGroup as errors:
            await self._end_all()
            failed = errors.split(StartupError)[0]
            raise failed.exceptions[0] if failed is not None else errors.exceptions[0] from None
        except BaseException:
            await self._end_all()
            raise
        self._state = EngineState.READY
        self._keeping = [asyncio.create_task(replica.keep(self._begin)) for replica in self._replicas]
        return self

    async def _begin(self, replica: Replica) -> None:
        """Start one replica, and make it as the others are. Raises StartupError, and what could not be done again."""
        await replica.start()

        async def join() -> None:
            peers = self.ready()
            await self._standing.repeat(replica.engine, next(iter(peers.values()), None))
            if not replica.alive:
                raise StartupError("it has ended again")
            replica.engine.control.follow(lambda _: self._heard())
            replica.serve()
            if all(each.serving for each in self._replicas):
                self._fate.all_serve()

        # Before it is sent requests, whose prompts are what it has seen.
        book = self._router.books[replica.place]
        book.seen.clear()
        for pool in replica.engine.stats.pools:
            if pool.name == KV_POOL:
                tokens = pool.capacity * replica.engine.stats.page_size
                book.seen.most = max(1, tokens // PIECE_TOKENS)
        await self._standing.alone(join())

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for replica in self._replicas:
                replica.look(time.monotonic())

    def changed(self) -> None:
        """A replica has come, gone or fallen silent, or is heard again."""
        self._changed.set()
        self._changed = asyncio.Event()
        self._heard()
        failed = self._fate.in_vain if self._shares else all(each.failed for each in self._replicas)
        if self._state is EngineState.READY and failed:
            self._state = EngineState.DEAD
            self._dead.set_result(EngineDead("no engine can be started"))

    def _all_work(self) -> bool:
        return all(each.serving and not each.silent for each in self._replicas)

    def _heard(self) -> None:
        self.control.heard(self.stats.activity)

    def ready(self) -> dict[int, ReplicaEngine]:
        """The engines that are sent requests, by place."""
        return {each.place: each.engine for each in self._replicas if each.ready}

    def silent(self) -> dict[int, ReplicaEngine]:
        """The engines that serve and are silent, by place."""
        return {each.place: each.engine for each in self._replicas if each.serving and each.silent}

    def restart(self, place: int, engine: ReplicaEngine) -> None:
        """End `engine` at `place` by force, if it is still there; another one starts."""
        if self._replicas[place].engine is engine:
            self._replicas[place].kill()

    @property
    def state(self) -> EngineState:
        """READY while there is a replica that serves, or will be one."""
        return self._state

    @property
    def stats(self) -> EngineStats:
        """The newest snapshots of all together."""
        return self._stats.now()

    @property
    def lanes(self) -> None:
        """None: steps run in other processes."""
        return None

    @property
    def open_streams(self) -> OpenRequests:
        """The requests that have not ended."""
        return self._requests

    @property
    def model_info(self) -> ModelInfo:
        """Facts of the model, which all have."""
        return self._replicas[0].model_info

    @property
    def live_requests(self) -> int:
        """Requests opened and not yet ended."""
        return len(self._requests)

    def full(self, tenant: str) -> bool:
        """False: an engine refuses by itself, and then the next one is asked."""
        return False

    async def generate(self, request: GenerateRequest) -> ReplicaStream:
        """Have the cheapest engine take the request. Raises what `Engine.generate` does, and NotReady."""
        self._refuse_unless_ready()
        return await self._dispatch.generate(request)

    async def embed(self, request: EmbedRequest) -> EmbedCall:
        """As `generate`, for vectors."""
        self._refuse_unless_ready()
        return await self._dispatch.embed(request)

    def _refuse_unless_ready(self) -> None:
        if self._state is EngineState.DEAD:
            raise EngineDead("the engine failed; this server is going away")
        if self._state is not EngineState.READY:
            raise Draining("the server is draining and takes no new requests")

    async def abort(self, request_id: str) -> bool:
        """End the request as CANCELLED if it is live. Returns whether it was. Idempotent. Raises EngineSilent."""
        return await self._dispatch.abort(request_id)

    async def tokenize(self, text: str, add_special_tokens: bool = True, caller: str = "") -> list[int]:
        """As `Engine.tokenize`, in any of them."""
        self._refuse_unless_ready()
        return await self._dispatch.in_one(lambda engine: engine.tokenize(text, add_special_tokens, caller))

    async def detokenize(self, ids: Sequence[int], skip_special_tokens: bool = True, caller: str = "") -> str:
        """As `Engine.detokenize`, in any of them."""
        self._refuse_unless_ready()
        return await self._dispatch.in_one(lambda engine: engine.detokenize(ids, skip_special_tokens, caller))

    async def load_adapter(self, name: str, path: str, *, pinned: bool = False) -> AdapterLoad:
        """As `Engine.load_adapter`, in all."""
        return await self._adapters.load(name, path, pinned=pinned)

    async def unload_adapter(self, name: str) -> int:
        """As `Engine.unload_adapter`, in all."""
        return await self._adapters.unload(name)

    async def list_adapters(self) -> AdapterList:
        """As `Engine.list_adapters`."""
        return await self._adapters.listed()

    async def drain(self, timeout: float) -> int:
        """Refuse new requests, give live ones `timeout` seconds; returns how many were cut."""
        if self._state is EngineState.READY:
            self._state = EngineState.DRAINING
        # One that ends now is not started again.
        await _cancelled(self._keeping)
        found = await asyncio.gather(*(each.drain(timeout) for each in self.ready().values()), return_exceptions=True)
        return sum(each for each in found if not isinstance(each, BaseException))

    async def stop(self) -> None:
        """Have all replicas stop; what does not is ended. Idempotent."""
        if self._state is EngineState.STOPPED:
            return
        self._state = EngineState.STOPPED
        await _cancelled(self._keeping)
        try:
            await asyncio.gather(*(each.leave() for each in self._replicas))
        finally:
            await self._end_all()

    async def wait_dead(self) -> BaseException:
        """Return the cause once no replica can be started any more; never returns otherwise."""
        return await asyncio.shield(self._dead)

    async def _end_all(self) -> None:
        await _cancelled(self._keeping + self._tasks)
        await asyncio.gather(*(each.end() for each in self._replicas))
        self._fate.close()


async def _cancelled(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
