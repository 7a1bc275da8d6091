"""Translates adapters between the wire and the engine, as `service.wire.generate` does for generation."""

from __future__ import annotations

from core.types.adapters import AdapterInfo, AdapterList, AdapterLoad
from service.pb.slipstream.v1 import adapters_pb2 as pb
from service.wire.generate import duration


def adapter_message(info: AdapterInfo) -> pb.Adapter:
    """The message of one loaded adapter."""
    return pb.Adapter(
        name=info.name,
        state=pb.ADAPTER_STATE_UNLOADING if info.unloading else pb.ADAPTER_STATE_READY,
        load_id=info.load_id,
        rank=info.rank,
        bytes=info.nbytes,
        pinned=info.pinned,
        live_requests=info.live_requests,
        idle=None if info.idle_seconds is None else duration(info.idle_seconds),
    )


def load_response(load: AdapterLoad) -> pb.LoadAdapterResponse:
    """The adapter that was loaded, and the adapters that were evicted for it."""
    return pb.LoadAdapterResponse(adapter=adapter_message(load.adapter), evicted=load.evicted)


def list_response(listed: AdapterList) -> pb.ListAdaptersResponse:
    """Every adapter that holds memory, and the bytes used and allowed."""
    return pb.ListAdaptersResponse(
        adapters=map(adapter_message, listed.adapters), used_bytes=listed.used_bytes, max_bytes=listed.max_bytes
    )
