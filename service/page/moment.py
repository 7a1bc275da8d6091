"""The figures that the page shows of one moment, as plain data: counts and ids, and no prompts or outputs."""

from __future__ import annotations

import time
from typing import Any

from core.lanes import Recording
from core.types.stats import DraftStats, EngineStats
from service.config.server_config import ServerConfig
from service.engine.handle import EngineHandle
from service.page.streams import StreamsSeen
from service.page.timeline import timeline
from service.tenant_ids import public_id

ADAPTER_BYTES = "adapter_bytes"


def moment(
    handle: EngineHandle, config: ServerConfig, version: str, streams: StreamsSeen, recording: Recording | None
) -> dict[str, Any]:
    """One event for the page. All figures but streams and lanes are of one step. Times are in seconds."""
    stats, now = handle.stats, time.monotonic()
    return {
        "at": round(now, 4),
        "state": handle.state.value,
        "drain_seconds": round(handle.drain_seconds, 1),
        "served": _served(handle, config, version),
        "step": stats.step,
        "running": stats.running,
        "waiting": stats.waiting,
        "waiting_limit": config.max_queued,
        "generation_tokens": stats.generation_tokens,
        "prompt_tokens": stats.prompt_tokens,
        "cached_tokens": stats.cached_tokens,
        "preemptions": stats.preemptions,
        "drafts": _drafts(stats.drafts),
        "finished": stats.finished,
        "assert_failures": sum(stats.assert_failures.values()),
        "device_busy_seconds": round(stats.device_busy_seconds, 6),
        "device_idle_seconds": round(stats.device_idle_seconds, 6),
        "pools": _pools(stats, config),
        "streams": _streams(streams, now),
        "timeline": timeline(recording),
    }


def _served(handle: EngineHandle, config: ServerConfig, version: str) -> dict[str, Any]:
    info = None if handle.engine is None else handle.engine.model_info
    return {
        "version": version,
        "model": "" if info is None else info.name,
        "dtype": "" if info is None else info.dtype,
        "quantization": "" if info is None else info.quantization,
        "overlap": config.engine.executor.overlap,
    }


def _pools(stats: EngineStats, config: ServerConfig) -> list[dict[str, Any]]:
    """Every pool of the engine by its own name, and the memory of adapters if the server can have adapters."""
    pools: list[dict[str, Any]] = [
        {"name": pool.name, "capacity": pool.capacity, "used": pool.used, "cached": pool.cached} for pool in stats.pools
    ]
    if pools and config.engine.lora.enabled:
        pools.append(
            {"name": ADAPTER_BYTES, "capacity": config.engine.lora.max_bytes, "used": stats.adapter_bytes, "cached": 0}
        )
    return pools


def _drafts(stats: DraftStats | None) -> dict[str, Any] | None:
    """What became of drafts so far; None without speculation. `rows`: how often an output had drafts in a step."""
    return None if stats is None else {"rows": stats.rows, "tokens": stats.tokens, "accepted": stats.accepted}


def _streams(seen: StreamsSeen, now: float) -> dict[str, Any]:
    """Rows of the client's id, state, prompt tokens, output tokens, age (s) and adapter."""
    rows: list[list[Any]] = []
    for row in seen.rows:
        age = round(now - row.arrived_at, 1)
        rows.append([public_id(row.request_id), row.state, row.prompt_tokens, row.output_tokens, age, row.adapter])
    return {"age": round(now - seen.at, 2), "total": seen.total, "rows": rows}
