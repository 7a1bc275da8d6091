"""The control service: pauses, weight updates and sleep, as messages.

`service.access.permissions` lets admins alone call it. What they do is in the audit log.
"""

from __future__ import annotations

from typing import Any

import grpc.aio

from service.access import audit
from service.engine.handle import EngineHandle
from service.pb.slipstream.v1 import control_pb2 as pb
from service.pb.slipstream.v1 import control_pb2_grpc
from service.wire import control

Context = grpc.aio.ServicerContext[Any, Any]


class ControlServicer(control_pb2_grpc.ControlServiceServicer):
    """`slipstream.v1.ControlService` over the engine of `handle`. Every method raises what `Control` does."""

    def __init__(self, handle: EngineHandle) -> None:
        self._handle = handle

    async def Pause(self, request: pb.PauseRequest, context: Context) -> pb.PauseResponse:
        """Plan no further step; answer once none is in flight."""
        ends = control.ends_streams(request)
        return pb.PauseResponse(live_requests=await self._handle.require().control.pause(ends=ends))

    async def Resume(self, request: pb.ResumeRequest, context: Context) -> pb.ResumeResponse:
        """Plan steps again."""
        await self._handle.require().control.resume()
        return pb.ResumeResponse()

    async def UpdateWeights(self, request: pb.UpdateWeightsRequest, context: Context) -> pb.UpdateWeightsResponse:
        """Serve other weights of the same model from one step to the next."""
        audit.note(path=request.path or request.name, weights=request.weight_version)
        source = control.weight_source(request)
        update = await self._handle.require().control.update_weights(source, request.weight_version)
        return control.update_response(update)

    async def Sleep(self, request: pb.SleepRequest, context: Context) -> pb.SleepResponse:
        """Give device memory back until Wake."""
        return control.sleep_response(await self._handle.require().control.sleep())

    async def Wake(self, request: pb.WakeRequest, context: Context) -> pb.WakeResponse:
        """Take the memory again, and go on."""
        await self._handle.require().control.wake()
        return pb.WakeResponse()
