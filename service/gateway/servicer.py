"""The methods that a gateway may call, in any dialect: the behaviour is here, a dialect's codec makes the messages."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from datetime import UTC, datetime
from typing import Any

import grpc.aio
from smg_grpc_proto.generated import common_pb2

from core.engine.api import EngineState
from core.errors import InvalidRequest
from service.access import audit
from service.calls.open_calls import OpenCalls
from service.engine.handle import answered
from service.gateway.dialect import Dialect
from service.gateway.generation import Generation
from service.gateway.reading import renamed
from service.gateway.tokenizer_zip import chunks
from service.gateway.worker import Worker
from service.limits.hold import note_prompt
from service.rpc.write_timeout import WriteBound
from service.tracing.request_span import traced

MAX_FLUSH_WAIT = 60.0
FLUSH_POLL_SECONDS = 0.02

Context = grpc.aio.ServicerContext[Any, Any]


class GatewayServicer:
    """One dialect over the server's open calls. Methods of its service that are not here answer UNIMPLEMENTED."""

    def __init__(self, dialect: Dialect, calls: OpenCalls, worker: Worker) -> None:
        self.dialect = dialect
        self._calls = calls
        self._worker = worker

    async def Generate(self, request: Any, context: Context) -> None:
        """Admit, then write. Leaving by any path closes the engine's stream, which aborts outputs that still run."""
        async with AsyncExitStack() as held:
            with self._calls.counting_refusals(), self._own_names():
                info = self._calls.writing_model()
                asked = self.dialect.generate_request(request, info, self._calls.deadline(context))
                if asked.request.take_over is not None and not asked.request.take_over.engine_id:
                    # It may wait for keys of a prompt that was refused: the gateway aborts it once it has headers.
                    await context.send_initial_metadata(())
                stream = await self._calls.generate(traced(asked.request, context), held)
            held.push_async_callback(stream.aclose)
            writing = Generation(self.dialect, asked)
            await writing.write(stream, context, self._calls.metrics, self._calls.config.write_timeout)

    async def Embed(self, request: Any, context: Context) -> Any:
        """The vector of one input: that of its last token, scaled to length 1."""
        async with AsyncExitStack() as held:
            with self._calls.counting_refusals(), self._own_names():
                info = self._calls.engine.model_info
                embedded = self.dialect.embed_request(request, info, self._calls.deadline(context))
                call = await self._calls.embed(embedded, held)
            held.push_async_callback(call.aclose)
            result = await call.result()
            note_prompt(sum(each.prompt_tokens for each in result.embeddings))
            return self.dialect.embed_response(result)

    async def Abort(self, request: Any, context: Context) -> Any:
        """End live requests as cancelled, which wakes their streams; idempotent."""
        found = [await self._calls.abort(each) for each in self.dialect.abort_ids(request)]
        return self.dialect.abort_response(any(found))

    async def HealthCheck(self, request: Any, context: Context) -> Any:
        """Whether the server is ready; answers in every state."""
        handle = self._calls.handle
        if handle.silent:
            return self.dialect.health(False, "silent")
        return self.dialect.health(handle.state is EngineState.READY, handle.state.value)

    async def GetModelInfo(self, request: Any, context: Context) -> Any:
        """Facts of the model."""
        return self.dialect.model_info(self._worker.model(self._calls.engine.model_info))

    async def GetServerInfo(self, request: Any, context: Context) -> Any:
        """Facts of the process."""
        return self.dialect.server_info(await self._worker.server(self._calls.engine))

    async def GetLoads(self, request: Any, context: Context) -> Any:
        """Load as of the last step. There is one rank, rank 0. Raises InvalidRequest for another."""
        if request.dp_rank:
            raise InvalidRequest.of("dp_rank", "this server has rank 0 only")
        timestamp = datetime.now(UTC).isoformat()
        return self.dialect.loads(self._worker.version, timestamp, await self._worker.load())

    async def GetTokenizer(self, request: Any, context: Context) -> None:
        """Write the tokenizer's zip in chunks, and its digest with the last. Raises Unsupported, SlowConsumer."""
        data, digest = await self._worker.tokenizer.packed()
        async with WriteBound(self._calls.config.write_timeout) as bound:
            for piece, last in chunks(data):
                bound.begin()
                await context.write(common_pb2.GetTokenizerChunk(data=piece, sha256=digest if last else ""))
                bound.end()

    async def SubscribeKvEvents(self, request: Any, context: Context) -> None:
        """Write the cached prefixes that this caller's requests can find, and then every change."""
        audit.begun()
        await self._worker.subscriptions.serve(request.start_sequence_number, context)

    async def FlushCache(self, request: Any, context: Context) -> Any:
        """Evict cached pages that no request holds, after waiting up to `timeout_s` seconds until no request is live.

        For an admin these are the pages and requests of all tenants, else the caller's own. Raises InvalidRequest.
        """
        if not (0 <= request.timeout_s <= MAX_FLUSH_WAIT and math.isfinite(request.timeout_s)):
            raise InvalidRequest.of("timeout_s", f"must be between 0 and {MAX_FLUSH_WAIT:g}")
        engine, ends = self._calls.engine, asyncio.get_running_loop().time() + request.timeout_s
        # Polled: the engine has no event for it, and a front end's count of live requests is renewed every 0.1 s.
        live = self._worker.live_requests
        while await live() and asyncio.get_running_loop().time() < ends:  # noqa: ASYNC110
            await asyncio.sleep(FLUSH_POLL_SECONDS)
        flushed = await answered(engine.prefixes.flush(self._calls.tenant))
        left = await live()
        told = f"{flushed} pages evicted" + (f"; what {left} live requests hold stays" if left else "")
        return common_pb2.FlushCacheResponse(success=True, message=told)

    @contextmanager
    def _own_names(self) -> Iterator[None]:
        """Rename the fields in an InvalidRequest of the engine to the dialect's names."""
        try:
            yield
        except InvalidRequest as error:
            raise renamed(error, self.dialect.fields) from None
