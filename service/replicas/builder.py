"""How a server gets several engines in place of one: it starts a process for each, and loads nothing itself."""

from __future__ import annotations

from dataclasses import dataclass, replace

from core.config import EngineConfig
from core.engine.api import EngineState
from service.checkpoints.model_name import hub_model
from service.config.server_config import ServerConfig
from service.config.sources import values_of
from service.engine.builder import BuiltEngine, EngineBuilder, Progress
from service.replicas.cores import own_cores, threads_of_each
from service.replicas.open_requests import OpenRequests
from service.replicas.order import Order
from service.replicas.replica_engine import ReplicaEngine
from service.replicas.replica_set import ReplicaSet
from service.replicas.spawned import Spawn, spawn


def replicated(config: ServerConfig, start: Spawn = spawn) -> EngineBuilder:
    """A builder of `config.data_parallel` engines, each in a process that `start` starts."""

    def build(engine: EngineConfig, progress: Progress | None) -> BuiltEngine:
        return BuiltReplicas(replace(config, engine=engine), from_hub(config), progress, start)

    return build


def from_hub(config: ServerConfig) -> bool:
    """Whether the model is one of the hub: then other revisions of it may be fetched by name."""
    return hub_model(config.engine_config().model.path) is not None


@dataclass(frozen=True)
class BuiltReplicas:
    """`core.engine.built_engine.BuiltEngine`, of which `start` does all."""

    config: ServerConfig
    from_hub: bool
    progress: Progress | None
    spawn: Spawn

    async def start(self) -> ReplicaSet:
        """The engines, READY, on the running loop. Raises StartupError, and then no process is left."""
        requests = OpenRequests()

        def make(place: int) -> ReplicaEngine:
            return ReplicaEngine(
                self.config.engine.max_pending_tokens, loading if place == 0 else _untold, requests.ended
            )

        def loading(stage: str, part: float) -> None:
            # Of the first start: later ones happen behind the backs of a server that serves.
            if self.progress is not None and engines.state is EngineState.STARTING:
                self.progress(stage, part)

        engines = ReplicaSet(self.orders(), self.spawn, make, requests)
        return await engines.start()

    def orders(self) -> list[Order]:
        """What each process is told."""
        count, settings = self.config.data_parallel, values_of(self.config)
        cores = own_cores(count)
        threads = None if cores else threads_of_each(count)
        return [
            Order(settings, place, count, cores[place] if cores else (), threads, self.from_hub)
            for place in range(count)
        ]


def _untold(_stage: str, _part: float) -> None:
    pass
