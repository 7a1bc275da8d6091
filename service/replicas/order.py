"""What a replica's process is told on its standard input: the server's settings, and its own part of the machine."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from core.config import EngineConfig
from core.model_config import Peers
from service.config.server_config import ServerConfig


@dataclass(frozen=True, slots=True)
class Order:
    """`settings` are those of the server, by the names of their flags."""

    settings: dict[str, Any]
    place: int
    count: int
    cpus: tuple[int, ...] = ()
    """Processors that it runs on; empty: all that this process may use."""
    threads: int | None = None
    """Math threads where the settings give none; None: as many as its processors make fast."""
    from_hub: bool = False
    """Whether weights may be fetched by name: the model was."""
    port: int = 0
    """Where engines that share experts meet, on the loopback."""
    listener: int | None = None
    """File descriptor that listens there, for the first of them."""

    def write(self) -> bytes:
        """As `read` reads it."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def read(cls, text: str) -> Order:
        """What `write` wrote."""
        told = json.loads(text)
        return cls(**told | {"cpus": tuple(told["cpus"])})

    def server_config(self) -> ServerConfig:
        """The settings as the server has them."""
        adapters = tuple((name, folder) for name, folder in self.settings["adapter"])
        return ServerConfig.of(**self.settings | {"adapter": adapters})

    def engine_config(self) -> EngineConfig:
        """What the engine is built from: memory of the machine is shared out, that of a device is its own."""
        config = self.server_config().engine_config()
        folder = config.memory.disk_cache
        memory = replace(
            config.memory,
            machine_share=1 / self.count,
            host_cache_bytes=config.memory.host_cache_bytes // self.count,
            disk_cache=folder and f"{folder}/engine-{self.place}",
            disk_cache_bytes=max(1 << 20, config.memory.disk_cache_bytes // self.count),
        )
        executor = replace(config.executor, cpu_threads=config.executor.cpu_threads or self.threads)
        shared = self.settings["expert_parallel"]
        peers = Peers(self.place, self.count, self.port, self.listener) if shared else None
        return replace(config, model=replace(config.model, peers=peers), memory=memory, executor=executor)
