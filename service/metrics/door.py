"""The metrics port of one engine, put together."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from prometheus_client import CollectorRegistry

from core.lanes import LaneRecorder
from service.config.server_config import ServerConfig
from service.engine.handle import EngineHandle
from service.metrics.http import MetricsServer
from service.metrics.trace import TraceDoor
from service.page.door import PATH, PageDoor
from service.page.feed import Feed

log = logging.getLogger(__name__)


def names_of(config: ServerConfig) -> frozenset[str]:
    """The names that a request to the metrics port may have in `Host`, in lower case."""
    given = (config.metrics_names or "").split(",")
    return frozenset(name.strip().lower() for name in (*given, config.metrics_host) if name.strip())


def metrics_server(
    config: ServerConfig, registry: CollectorRegistry, handle: EngineHandle, version: str
) -> MetricsServer:
    """Start serving the metrics of `registry`, traces of the engine of `handle` and, if it is on, the page.

    Call it on the engine's event loop, which the page asks for streams. Raises StartupError for a taken port.
    """

    def lanes() -> LaneRecorder | None:
        return None if handle.engine is None else handle.engine.lanes

    def about() -> dict[str, Any]:
        model = "" if handle.engine is None else handle.engine.model_info.name
        return {"version": version, "model": model, "overlap": config.engine.executor.overlap}

    trace = TraceDoor(config.trace_endpoint, lanes, about)
    page = PageDoor(Feed(handle, config, version, asyncio.get_running_loop())) if config.ui else None
    server = MetricsServer(config.metrics_host, config.metrics_port, registry, trace, page, names_of(config))
    if page is not None:
        log.info("a page to look at is on http://%s:%d%s", config.metrics_host, server.port, PATH)
    return server
