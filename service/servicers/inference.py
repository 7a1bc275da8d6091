"""The inference service: opens streams on the engine and writes their events, one bounded write each.

It knows neither how errors become statuses (the interceptors do) nor what is inside a message (`convert` does).
"""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from typing import Any

import grpc.aio

from core.engine.door import EmbedCall, OutputStream
from core.errors import InvalidRequest, SlipstreamError, SlowConsumer
from core.types.io import Delta, Finished, GenerateRequest
from service import convert, convert_embed
from service.admission import Admission
from service.auth import caller_name
from service.bounds import detokenize_ids
from service.config import ServerConfig
from service.engine_slot import EngineSlot, answered
from service.metrics.collector import kv_usage
from service.metrics.rpc import RpcMetrics
from service.pb.slipstream.v1 import inference_pb2 as pb
from service.pb.slipstream.v1 import inference_pb2_grpc
from service.status import TOKENS_EMITTED_TRAILER
from service.tracing.request_span import note_finished, traced
from service.write_bound import WriteBound

REQUEST_ID_METADATA = "slipstream-request-id"

Context = grpc.aio.ServicerContext[Any, Any]


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """`slipstream.v1.InferenceService` over whatever engine `slot` holds."""

    def __init__(
        self, slot: EngineSlot, config: ServerConfig, admission: Admission, metrics: RpcMetrics, version: str
    ) -> None:
        self._slot = slot
        self._config = config
        self._admission = admission
        self._text_admission = Admission(config.max_text_calls, max_wait=config.admission_wait)
        self._metrics = metrics
        self._version = version
        self._started_at = time.monotonic()
        # Who started each live request: only they may abort it.
        self._callers: dict[str, str | None] = {}

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        """Admit, then stream. Leaving by any path closes the engine's stream, which aborts what still runs."""
        async with AsyncExitStack() as held:
            try:
                asked, stream = await self._open(request, context, held)
            except SlipstreamError as error:
                self._metrics.rejected(error.reason)
                raise
            held.push_async_callback(stream.aclose)
            await self._pump(stream, context, asked)

    async def _open(
        self, request: pb.GenerateRequest, context: Context, held: AsyncExitStack
    ) -> tuple[GenerateRequest, OutputStream]:
        engine = self._slot.require()
        caller = caller_name.get()
        asked = convert.generate_request(request, engine.model_info, self._deadline(context), caller)
        await held.enter_async_context(self._admission.slot(asked.deadline))
        # Before it is queued, since it can be aborted while it waits for its constraint. An id that is taken stays with
        # its owner: the engine refuses this request.
        if asked.request_id not in self._callers:
            self._callers[asked.request_id] = caller
            held.callback(self._callers.pop, asked.request_id)
        stream = await engine.generate(traced(asked, context))
        return asked, stream

    async def _pump(self, stream: OutputStream, context: Context, asked: GenerateRequest) -> None:
        """Write every event. On failure the trailers say how many tokens went out, the cut-off write included."""
        emitted = finished = 0
        encoder = convert.ResponseEncoder(stream.request_id, asked.want_text)
        try:
            async with WriteBound(self._config.write_timeout) as bound:
                # Only now that the request is admitted: headers before a refusal would forbid the client to retry.
                await context.send_initial_metadata(((REQUEST_ID_METADATA, stream.request_id),))
                async for event in stream:
                    if type(event) is Delta:
                        emitted += len(event.token_ids)
                    elif isinstance(event, Finished):
                        finished += 1
                        note_finished(event)
                    for piece in convert.split(event):
                        bound.begin()
                        await context.write(encoder.encode(piece))
                        bound.end()
            if finished != asked.sampling.n:
                raise RuntimeError(f"stream ended after {finished} of {asked.sampling.n} terminals")
        except BaseException as error:  # a revoked token cancels from outside, and its client wants the count too
            if emitted:
                context.set_trailing_metadata(((TOKENS_EMITTED_TRAILER, str(emitted)),))
            if isinstance(error, SlowConsumer):
                self._metrics.slow_consumer()
            raise

    def _deadline(self, context: Context) -> float | None:
        """The earlier of the client's deadline and the server's own limit, as a `time.monotonic()` instant."""
        limits = [limit for limit in (context.time_remaining(), self._config.max_request_seconds) if limit is not None]
        return time.monotonic() + min(limits) if limits else None

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """End a live request as cancelled; whether there was one."""
        if not request.request_id:
            raise InvalidRequest.of("request_id", "must not be empty")
        engine = self._slot.require()
        # Somebody else's request is answered like one that is not there. One that came through another front end is not
        # known here; the engine's process asks there whose it is.
        caller = caller_name.get()
        if self._callers.get(request.request_id, caller) != caller:
            return pb.AbortResponse(found=False)
        return pb.AbortResponse(found=await answered(engine.abort(request.request_id)))

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        """Admit, then wait for every vector. Leaving by any path closes the engine's call, as with Generate."""
        async with AsyncExitStack() as held:
            try:
                call = await self._open_embed(request, context, held)
            except SlipstreamError as error:
                self._metrics.rejected(error.reason)
                raise
            held.push_async_callback(call.aclose)
            return convert_embed.embed_response(await call.result())

    async def _open_embed(self, request: pb.EmbedRequest, context: Context, held: AsyncExitStack) -> EmbedCall:
        engine = self._slot.require()
        caller, deadline = caller_name.get(), self._deadline(context)
        max_queued = self._config.max_queued_requests
        asked = convert_embed.embed_request(request, engine.model_info, max_queued, deadline, caller)
        await held.enter_async_context(self._admission.slot(asked.deadline))
        call = await engine.embed(asked)
        self._callers[call.request_id] = caller
        held.callback(self._callers.pop, call.request_id)
        return call

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        """Ids of a text."""
        special = request.add_special_tokens if request.HasField("add_special_tokens") else True
        engine = self._slot.require()
        async with self._text_admission.slot(self._deadline(context)):
            return pb.TokenizeResponse(token_ids=await engine.tokenize(request.text, special))

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        """Text of ids."""
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        engine = self._slot.require()
        async with self._text_admission.slot(self._deadline(context)):
            ids = detokenize_ids(request, engine.model_info)
            return pb.DetokenizeResponse(text=await engine.detokenize(ids, skip))

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Context) -> pb.GetModelInfoResponse:
        """Facts of the model."""
        return convert.model_info_response(self._slot.require().model_info)

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Context) -> pb.GetServerInfoResponse:
        """Facts of the process; answers in every state."""
        uptime = time.monotonic() - self._started_at
        return convert.server_info_response(self._config, self._version, self._slot.state, uptime)

    async def GetLoad(self, request: pb.GetLoadRequest, context: Context) -> pb.GetLoadResponse:
        """Load as of the last step."""
        engine = self._slot.require()
        stats = engine.stats
        return convert.load_response(stats, engine.live_requests, kv_usage(stats))
