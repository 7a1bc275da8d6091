"""The inference service: opens streams on the engine and writes their events, one bounded write each.

Interceptors turn errors into statuses (`service.rpc.interceptors`). `service.wire` reads and makes the messages.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc.aio

from core.engine.api import EmbedCall, OutputStream
from core.errors import EngineDead, InvalidRequest, SlowConsumer
from core.types.io import Delta, EmbedRequest, EmbedResult, Finished, GenerateRequest, ModelInfo, Started
from service.access.caller import caller_of
from service.calls.open_calls import OpenCalls
from service.limits.hold import note_made, note_prompt
from service.limits.text_calls import TextCalls
from service.metrics.collector import kv_usage
from service.pb.slipstream.v1 import inference_pb2 as pb
from service.pb.slipstream.v1 import inference_pb2_grpc
from service.rpc.status import NO_RETRY, PUSHBACK_TRAILER, TOKENS_EMITTED_TRAILER
from service.rpc.write_timeout import WriteBound
from service.tracing.request_span import note_finished, traced
from service.wire import attach, embed, facts, generate, judge
from service.wire.message_limits import detokenize_ids
from service.wire.served_calls import labels_of

REQUEST_ID_METADATA = "slipstream-request-id"

Context = grpc.aio.ServicerContext[Any, Any]
Message = TypeVar("Message", pb.EmbedRequest, pb.ClassifyRequest, pb.ScoreRequest)
Reader = Callable[[Message, ModelInfo, int, float | None], EmbedRequest]
"""Makes the engine's request of a message, the facts of the model, the most inputs, and the deadline."""


@dataclass(frozen=True, slots=True)
class _Told:
    """What a call writes: the number of outputs, whether with text, and the type of its messages."""

    outputs: int
    want_text: bool
    response: Any


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """`slipstream.v1.InferenceService` over the open calls of the server."""

    def __init__(self, calls: OpenCalls, version: str) -> None:
        self._calls = calls
        self._handle = calls.handle
        self._config = calls.config
        self._texts = TextCalls(self._config.max_text_calls, self._config.admission_wait)
        self._metrics = calls.metrics
        self._version = version
        self._started_at = time.monotonic()

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        """Admit, then stream. Leaving by any path closes the engine's stream, which aborts outputs that still run.

        From a resumable stream the call only detaches.
        """
        async with AsyncExitStack() as held:
            with self._calls.counting_refusals():
                asked, stream = await self._open(request, context, held)
            await self._pump(stream, context, _Told(asked.sampling.n, asked.want_text, pb.GenerateResponse))

    async def Attach(self, request: pb.AttachRequest, context: Context) -> None:
        """Go on with a kept stream. Leaving by any path detaches from it."""
        async with AsyncExitStack() as held:
            with self._calls.counting_attaches():
                places, named = attach.positions(request), request.incarnation
                stream = await self._calls.attach(request.request_id, places, held, incarnation=named)
            await self._pump(stream, context, _Told(stream.expected, stream.want_text, pb.AttachResponse))

    async def _open(
        self, request: pb.GenerateRequest, context: Context, held: AsyncExitStack
    ) -> tuple[GenerateRequest, OutputStream]:
        info, deadline = self._calls.writing_model(), self._calls.deadline(context)
        asked = traced(generate.generate_request(request, info, deadline), context)
        if request.resumable:
            return asked, await self._calls.keep(asked, held)
        stream = await self._calls.generate(asked, held)
        held.push_async_callback(stream.aclose)
        return asked, stream

    async def _pump(self, stream: OutputStream, context: Context, told: _Told) -> None:
        """Write every event, each within the write timeout. Raises SlowConsumer and the stream's own error.

        On failure the trailers hold the number of tokens written, those of a write that was cut off included.
        """
        emitted = finished = 0
        encoder = generate.ResponseEncoder(stream.request_id, told.want_text, told.response)
        try:
            async with WriteBound(self._config.write_timeout) as bound:
                async for event in stream:
                    if type(event) is Delta:
                        emitted += len(event.token_ids) if event.position >= 0 else 0
                    elif isinstance(event, Finished):
                        finished += 1
                        note_finished(event)
                    elif isinstance(event, Started):
                        note_prompt(event.prompt_tokens)
                        # No earlier than this: gRPC does not retry a call that fails after its headers. The device
                        # computes the first token meanwhile, which therefore waits for no operation but its own.
                        await context.send_initial_metadata(((REQUEST_ID_METADATA, encoder.request_id),))
                    for piece in generate.split(event):
                        bound.begin()
                        await context.write(encoder.encode(piece))
                        bound.end()
            if finished != told.outputs:
                raise RuntimeError(f"stream ended after {finished} of {told.outputs} terminals")
        except BaseException as error:  # a revoked token cancels from outside, and its client wants the count too
            if emitted:
                context.set_trailing_metadata(((TOKENS_EMITTED_TRAILER, str(emitted)),))
            else:
                _keep_from_others(error, context)
            if isinstance(error, SlowConsumer):
                self._metrics.slow_consumer()
            raise
        finally:
            note_made(emitted)

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """End a live request as cancelled. The response says whether there was one."""
        return pb.AbortResponse(found=await self._calls.abort(request.request_id))

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        """Admit, then wait for every vector. Leaving by any path closes the engine's call, as with Generate."""
        return embed.embed_response(await self._result(embed.embed_request, request, context))

    async def Classify(self, request: pb.ClassifyRequest, context: Context) -> pb.ClassifyResponse:
        """As Embed, for the scores of every label."""
        result = await self._result(judge.classify_request, request, context)
        return judge.classify_response(result, request, labels_of(self._calls.engine.model_info))

    async def Score(self, request: pb.ScoreRequest, context: Context) -> pb.ScoreResponse:
        """As Embed, for the score of every document."""
        try:
            result = await self._result(judge.score_request, request, context)
        except InvalidRequest as error:
            raise judge.of_documents(error) from None
        return judge.score_response(result, request, labels_of(self._calls.engine.model_info))

    async def _result(self, read: Reader[Message], request: Message, context: Context) -> EmbedResult:
        """What the engine makes of the inputs of `request`, which `read` turns into a request for it."""
        async with AsyncExitStack() as held:
            with self._calls.counting_refusals():
                call = await self._open_embed(read, request, context, held)
            held.push_async_callback(call.aclose)
            try:
                result = await call.result()
            except EngineDead as error:
                _keep_from_others(error, context)
                raise
            note_prompt(sum(each.prompt_tokens for each in result.embeddings))
            return result

    async def _open_embed(
        self, read: Reader[Message], request: Message, context: Context, held: AsyncExitStack
    ) -> EmbedCall:
        info, deadline = self._calls.engine.model_info, self._calls.deadline(context)
        max_queued = self._config.engine.scheduler.max_queued_requests
        return await self._calls.embed(read(request, info, max_queued, deadline), held)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        """Ids of a text."""
        special = request.add_special_tokens if request.HasField("add_special_tokens") else True
        engine, caller = self._handle.require(), caller_of(context)
        async with self._texts.slot(caller, self._calls.deadline(context)):
            return pb.TokenizeResponse(token_ids=await engine.tokenize(request.text, special, caller))

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        """Text of ids."""
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        engine, caller = self._handle.require(), caller_of(context)
        async with self._texts.slot(caller, self._calls.deadline(context)):
            ids = detokenize_ids(request, engine.model_info)
            return pb.DetokenizeResponse(text=await engine.detokenize(ids, skip, caller))

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Context) -> pb.GetModelInfoResponse:
        """Facts of the model."""
        return facts.model_info_response(self._handle.require().model_info)

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Context) -> pb.GetServerInfoResponse:
        """Facts of the process; answers in every state."""
        uptime = time.monotonic() - self._started_at
        engine = self._handle.engine
        stats = None if engine is None else engine.stats
        return facts.server_info_response(self._config, self._version, self._handle.state, uptime, stats)

    async def GetLoad(self, request: pb.GetLoadRequest, context: Context) -> pb.GetLoadResponse:
        """Load as of the last step. A caller that may not see the load of all gets that of its own requests."""
        engine, own = self._handle.require(), await self._calls.own_load()
        if own is not None:
            return facts.own_load_response(own.running, own.waiting)
        stats = engine.stats
        return facts.load_response(stats, engine.live_requests, kv_usage(stats))


def _keep_from_others(error: BaseException, context: Context) -> None:
    """Forbid a retry after EngineDead: the engine may have died of this request, which would end the next one too."""
    if isinstance(error, EngineDead):
        context.set_trailing_metadata(((PUSHBACK_TRAILER, NO_RETRY),))
