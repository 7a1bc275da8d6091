"""What the process that runs the engine shows of itself: its metrics, and the port that serves them."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, ProcessCollector

from service.access.access_files import AccessFiles
from service.access.file_metrics import FilesCollector
from service.config.server_config import ServerConfig
from service.engine.handle import EngineHandle
from service.metrics.collector import EngineCollector, engine_view
from service.metrics.door import metrics_server
from service.metrics.http import MetricsServer
from service.metrics.names import PREFIX
from service.metrics.rpc import RpcMetrics
from service.process.version import installed_version


class MetricsPort:
    """Metrics of the engine, the callers' files, the process and its calls. `port` is the port in use, after `listen`.

    `connected()` is the number of front ends; it may be called from any thread.
    """

    def __init__(
        self, config: ServerConfig, handle: EngineHandle, files: AccessFiles, connected: Callable[[], int] = lambda: 0
    ) -> None:
        self.port = 0
        self.registry = CollectorRegistry()
        self.calls = RpcMetrics(self.registry)
        self._config, self._handle = config, handle
        self._version = version = installed_version()
        self.registry.register(EngineCollector(lambda: engine_view(handle, config, version, connected())))
        self.registry.register(FilesCollector(files))
        ProcessCollector(PREFIX, registry=self.registry)
        self._server: MetricsServer | None = None

    def listen(self) -> None:
        """Bind the port and answer from now on. Raises StartupError for a taken port."""
        self._server = metrics_server(self._config, self.registry, self._handle, self._version)
        self.port = self._server.port

    def close(self) -> None:
        """Stop serving. Idempotent; blocks for up to the poll interval of the server's thread, which it joins."""
        if self._server is not None:
            self._server.close()
            self._server = None
