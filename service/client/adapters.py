"""The adapter service from a client's side, over the connection of a `SlipstreamClient`."""

from __future__ import annotations

from typing import Any

import grpc.aio

from service.client.client import SlipstreamClient
from service.client.errors import CallFailed
from service.pb.slipstream.v1 import adapters_pb2 as pb
from service.pb.slipstream.v1 import adapters_pb2_grpc

Adapter = pb.Adapter


def state_of(adapter: Adapter) -> str:
    """`loading`, `ready` and so on: the state's name without what all states have in common."""
    return pb.AdapterState.Name(adapter.state).removeprefix("ADAPTER_STATE_").lower()


class AdapterClient:
    """Loads, unloads and lists LoRA adapters. Every method raises CallFailed."""

    def __init__(self, client: SlipstreamClient) -> None:
        self._metadata = client.metadata
        self.stub: Any = adapters_pb2_grpc.AdapterServiceStub(client.channel)  # type: ignore[no-untyped-call]

    async def load(self, name: str, path: str = "", *, pinned: bool = False) -> pb.LoadAdapterResponse:
        """Load the directory `path` below the server's adapter directory; without `path` the one called `name`."""
        response: pb.LoadAdapterResponse = await self._call(
            self.stub.LoadAdapter, pb.LoadAdapterRequest(name=name, path=path, pinned=pinned)
        )
        return response

    async def unload(self, name: str) -> int:
        """Unload an adapter. Returns the number of requests that still use it."""
        return int((await self._call(self.stub.UnloadAdapter, pb.UnloadAdapterRequest(name=name))).live_requests)

    async def list(self) -> pb.ListAdaptersResponse:
        """Every adapter that holds memory, and the bytes used and allowed."""
        response: pb.ListAdaptersResponse = await self._call(self.stub.ListAdapters, pb.ListAdaptersRequest())
        return response

    async def _call(self, method: Any, request: Any) -> Any:
        try:
            return await method(request, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise CallFailed(error) from None
