"""The metrics port of one engine, put together."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry

from core.types.lanes import LaneRecorder
from service.config import ServerConfig
from service.engine_slot import EngineSlot
from service.metrics.http import MetricsServer
from service.metrics.trace import TraceDoor


def metrics_server(config: ServerConfig, registry: CollectorRegistry, slot: EngineSlot, version: str) -> MetricsServer:
    """Serves the metrics of `registry` and traces of the engine in `slot`. Raises StartupError for a taken port."""

    def lanes() -> LaneRecorder | None:
        return None if slot.engine is None else slot.engine.lanes

    def about() -> dict[str, Any]:
        model = "" if slot.engine is None else slot.engine.model_info.name
        return {"version": version, "model": model, "overlap": config.overlap}

    trace = TraceDoor(config.trace_endpoint, lanes, about)
    return MetricsServer(config.metrics_host, config.metrics_port, registry, trace)
