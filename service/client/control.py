"""The control service from a client's side, over the connection of a client; with and without asyncio."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import grpc.aio

from service.client.blocking import SyncSlipstreamClient
from service.client.client import SlipstreamClient
from service.client.errors import CallFailed
from service.pb.slipstream.v1 import control_pb2 as pb
from service.pb.slipstream.v1 import control_pb2_grpc

P = ParamSpec("P")
T = TypeVar("T")


class ControlClient:
    """Pauses a server, changes its weights, has it sleep. For callers that it lists; every method raises CallFailed."""

    def __init__(self, client: SlipstreamClient) -> None:
        self._metadata = client.metadata
        self.stub: Any = control_pb2_grpc.ControlServiceStub(client.channel)  # type: ignore[no-untyped-call]

    async def pause(self, *, end: bool = False) -> int:
        """Have no further step planned; returns how many streams there are.

        They wait, and so do new requests. With `end`, streams end and requests are refused, for other replicas.
        """
        mode = pb.PAUSE_MODE_END if end else pb.PAUSE_MODE_WAIT
        return int((await self._call(self.stub.Pause, pb.PauseRequest(mode=mode))).live_requests)

    async def resume(self) -> None:
        """Go on."""
        await self._call(self.stub.Resume, pb.ResumeRequest())

    async def update_weights(self, weight_version: str, *, path: str = "", name: str = "") -> pb.UpdateWeightsResponse:
        """Serve other weights as `weight_version`, from one step to the next; returns when they are served.

        `path`: a directory below the server's directory of weights; the one of that name, unless it is given. `name`:
        instead, a model of the hub.
        """
        request = pb.UpdateWeightsRequest(weight_version=weight_version)
        if name:
            request.name = name
        else:
            request.path = path or weight_version
        response: pb.UpdateWeightsResponse = await self._call(self.stub.UpdateWeights, request)
        return response

    async def sleep(self) -> pb.SleepResponse:
        """Have the server give its device memory back until `wake`."""
        response: pb.SleepResponse = await self._call(self.stub.Sleep, pb.SleepRequest())
        return response

    async def wake(self) -> None:
        """Have it take the memory again and go on."""
        await self._call(self.stub.Wake, pb.WakeRequest())

    async def _call(self, method: Any, request: Any) -> Any:
        try:
            return await method(request, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise CallFailed(error) from None


def _blocking(
    method: Callable[Concatenate[ControlClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[SyncControlClient, P], T]:
    @wraps(method)
    def call(self: SyncControlClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._client.run(lambda client: method(ControlClient(client), *args, **kwargs))

    return call


class SyncControlClient:
    """The same over a `SyncSlipstreamClient`, for training loops: each call blocks until it has its answer."""

    def __init__(self, client: SyncSlipstreamClient) -> None:
        self._client = client

    pause = _blocking(ControlClient.pause)
    resume = _blocking(ControlClient.resume)
    update_weights = _blocking(ControlClient.update_weights)
    sleep = _blocking(ControlClient.sleep)
    wake = _blocking(ControlClient.wake)
