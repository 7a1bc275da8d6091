"""The adapter service: the engine's answers as messages.

`service.access.permissions` says which callers may change what is loaded.
"""

from __future__ import annotations

from typing import Any

import grpc.aio

from service.access import audit
from service.engine.handle import EngineHandle, answered
from service.pb.slipstream.v1 import adapters_pb2 as pb
from service.pb.slipstream.v1 import adapters_pb2_grpc
from service.wire import adapters

Context = grpc.aio.ServicerContext[Any, Any]


class AdapterServicer(adapters_pb2_grpc.AdapterServiceServicer):
    """`slipstream.v1.AdapterService` over the engine of `handle`."""

    def __init__(self, handle: EngineHandle) -> None:
        self._handle = handle

    async def LoadAdapter(self, request: pb.LoadAdapterRequest, context: Context) -> pb.LoadAdapterResponse:
        """Read an adapter below the configured directory and serve it. Raises what `Engine.load_adapter` does."""
        audit.note(adapter=request.name, path=request.path)
        load = await self._handle.require().load_adapter(request.name, request.path, pinned=request.pinned)
        return adapters.load_response(load)

    async def UnloadAdapter(self, request: pb.UnloadAdapterRequest, context: Context) -> pb.UnloadAdapterResponse:
        """Refuse new requests for an adapter, and free it when its last request ends. Raises AdapterNotFound."""
        audit.note(adapter=request.name)
        live = await answered(self._handle.require().unload_adapter(request.name))
        return pb.UnloadAdapterResponse(live_requests=live)

    async def ListAdapters(self, request: pb.ListAdaptersRequest, context: Context) -> pb.ListAdaptersResponse:
        """Every adapter that holds memory."""
        return adapters.list_response(await answered(self._handle.require().list_adapters()))
