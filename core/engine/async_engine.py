"""The engine in this process: an asyncio shell around the scheduler and the forward thread."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from core.engine.api import EmbedCall, EngineState
from core.engine.control import EngineControl
from core.engine.embedding import EmbeddingCall, as_generation
from core.engine.engine_parts import EngineParts
from core.engine.labelling import TokenLabelCall
from core.engine.off_loop import in_daemon_thread
from core.engine.pending_admissions import Arrivals
from core.engine.prefixes import CachedPrefixes
from core.engine.ranks import stop_all
from core.engine.request_reader import RequestReader
from core.engine.streams.open_streams import LiveStreams
from core.engine.streams.output_processor import OutputProcessor
from core.engine.streams.pending_output import pending_outputs
from core.engine.streams.reader_turns import Turnstile
from core.engine.streams.token_stream import TokenStream
from core.engine.wakeup import Wakeup
from core.engine.watchdog import PERIOD, Watchdog
from core.errors import (
    DeadlinePassed,
    Draining,
    DuplicateRequest,
    EngineDead,
    Overloaded,
    Paused,
    SlipstreamError,
    Unsupported,
)
from core.scheduler.outputs import Ending
from core.text.answers.answer_reader import AnswerReader
from core.types.adapters import AdapterList, AdapterLoad
from core.types.control import Activity
from core.types.io import EmbedRequest, FinishReason, GenerateRequest, Started
from core.types.request import Req
from core.types.stats import EngineStats

log = logging.getLogger(__name__)

DRAIN_END_SECONDS = 5.0
"""Seconds that `drain` waits for the step which ends the requests that it cut."""


class AsyncEngine:
    """The `Engine` of `core.engine.api`, in this process. `BuiltEngine.start` makes it; it is READY at once."""

    def __init__(self, built: EngineParts) -> None:
        self._config, self._inputs, self._embeddings = built.config, built.inputs, built.embeddings
        self._adapters, self._grammars, self._disagg = built.adapters, built.grammars, built.disagg
        self.model_info, self.lanes, self._disk = built.model_info, built.lanes, built.disk
        self._live: dict[str, TokenStream] = {}
        self.open_streams = LiveStreams(self._live, built.adapters.table)
        self._arriving, self._turnstile, self._wakeup = Arrivals(), Turnstile(), Wakeup()
        self._dead: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._empty = asyncio.Event()
        self._empty.set()
        self._executor = executor = built.new_executor(self._wakeup.set_threadsafe)
        self._watchdog = Watchdog(built.config.executor.hang_timeout, time.monotonic(), built.ranks)
        self._scheduler = built.new_scheduler(self._executor, self._emit)
        self._reader = RequestReader(self._inputs, self._grammars, self._arriving, self._disagg, self._disk)
        self._outputs = OutputProcessor(
            self._scheduler.intake,
            self._wakeup.set,
            self._config.max_pending_tokens,
            self._stream_closed,
            self._inputs.failures,
            lambda: self.control.version,
            self._disagg.handed,
        )
        parts = built.config.model, self, self._scheduler, executor, built.renewal, built.adapters, self._wakeup.set
        self.control = EngineControl(*parts)
        self._disagg.attach(self._wakeup.set_threadsafe, self._scheduler, lambda: self.control.version)
        self._disk.attach(self._wakeup.set_threadsafe, self._scheduler)
        self._refusal: SlipstreamError | None = None
        """Why new requests are turned away, while the engine is READY and does."""
        self.prefixes = CachedPrefixes(self._scheduler, self._adapters.table, self.refuse_unless_ready)
        self._state = EngineState.READY
        self._tasks = [
            asyncio.create_task(self._run(), name="slipstream-scheduler"),
            asyncio.create_task(self._watch(), name="slipstream-watchdog"),
        ]
        for task in self._tasks:
            task.add_done_callback(self._task_ended)

    @property
    def state(self) -> EngineState:
        """Lifecycle state; readable from any thread."""
        return self._state

    @property
    def stats(self) -> EngineStats:
        """The newest snapshot; readable from any thread."""
        stats = self._grammars.add_stats(self._adapters.add_stats(self._scheduler.stats))
        stats = self._disagg.add_stats(self.control.add_stats(stats))
        return self._inputs.counted(stats)

    @property
    def live_requests(self) -> int:
        """Number of streams that the scheduler has not ended yet."""
        return len(self._live)

    def full(self, tenant: str) -> bool:
        """Whether the waiting queue has no room for one more sequence of `tenant`; False unless READY."""
        return self._state is EngineState.READY and not self._scheduler.has_room(tenant, 1)

    async def generate(self, request: GenerateRequest) -> TokenStream:
        """Validate, tokenise and queue `request`; returns its stream. Raises what `Engine.generate` lists."""
        self.refuse_unless_ready()
        if not self.model_info.generates:
            raise Unsupported("the served model puts out no text: it embeds or judges (see GetModelInfo)")
        # Before the room in the queue: a request that can never be served must not be told to come back later.
        self._reader.refuse_unservable(request)
        request_id, readers = request.request_id or uuid.uuid4().hex, list[AnswerReader]()

        async def sequences(now: float) -> list[Req]:
            return await self._reader.sequences(request, request_id, now, readers)

        return await self._open(request, request_id, sequences, readers)

    async def embed(self, request: EmbedRequest) -> EmbedCall:
        """Like `generate`, for one vector per input: returns once every input is queued, and raises the same."""
        self.refuse_unless_ready()
        self._embeddings.refuse_unservable(request)
        request_id = request.request_id or uuid.uuid4().hex

        async def sequences(now: float) -> list[Req]:
            return await self._embeddings.sequences(request, request_id, now)

        stream = await self._open(as_generation(request), request_id, sequences)
        if self._embeddings.by_tokens(request):
            return TokenLabelCall(stream)
        return EmbeddingCall(request, stream, *self._embeddings.sizes(request))

    async def _open(
        self,
        request: GenerateRequest,
        request_id: str,
        sequences: Callable[[float], Awaitable[list[Req]]],
        readers: Sequence[AnswerReader] = (),
    ) -> TokenStream:
        """Queue the sequences that `sequences(now)` makes of `request`; it may work a while, and fill `readers`."""
        if request_id in self._live or request_id in self._arriving:
            raise DuplicateRequest("a live request has this request_id")
        reqs = list[Req]()
        try:
            with self._arriving.entered(request_id):
                now = time.monotonic()
                self._refuse_if_late_or_full(request, now)
                reqs = await sequences(now)
            # Asked again: time has passed, so the engine may drain by now, or the queue may be full.
            self.refuse_unless_ready()
            self._refuse_if_late_or_full(request, time.monotonic())
            return self._enter(request, request_id, reqs, readers)
        except BaseException:
            self._disagg.drop(reqs)
            raise

    def abort(self, request_id: str) -> bool:
        """End the request as CANCELLED if it is live or on its way to the queue; returns whether it was."""
        stream = self._live.get(request_id)
        if stream is None:
            return self._arriving.abort(request_id)
        self._abort_stream(stream)
        return True

    async def tokenize(self, text: str, add_special_tokens: bool = True, caller: str = "") -> list[int]:
        """Token ids of `text`, made off the loop. Raises InvalidRequest, RequestFailed or Draining."""
        return await self._inputs.tokenize(text, add_special_tokens=add_special_tokens, caller=caller)

    async def detokenize(self, ids: Sequence[int], skip_special_tokens: bool = True, caller: str = "") -> str:
        """Text of `ids`, made off the loop. Raises InvalidRequest, RequestFailed or Draining."""
        return await self._inputs.detokenize(ids, skip_special_tokens, caller)

    async def load_adapter(self, name: str, path: str, *, pinned: bool = False) -> AdapterLoad:
        """Read the adapter at `path`, below the configured directory. Raises what `Engine.load_adapter` lists."""
        self.refuse_unless_ready()
        return await self._adapters.load(name, path, pinned=pinned, still_wanted=self.refuse_unless_ready)

    def unload_adapter(self, name: str) -> int:
        """Refuse new requests for the adapter; returns how many still use it. Raises AdapterNotFound."""
        return self._adapters.unload(name)

    def list_adapters(self) -> AdapterList:
        """Every adapter that holds memory, the bytes that they hold, and how many they may."""
        return self._adapters.table.listed()

    async def drain(self, timeout: float) -> int:
        """Refuse new requests, give live ones `timeout` seconds, end those left with Draining; returns their number."""
        if self._state is EngineState.READY:
            self._state = EngineState.DRAINING
            self._arriving.end_all(Draining("the server is shutting down"))
        with contextlib.suppress(TimeoutError):
            # What is paused or asleep ends nothing by itself.
            async with asyncio.timeout(timeout if self.control.activity is Activity.SERVING else 0):
                await self._empty.wait()
                await self._disagg.given()
        left = list(self._live.values())
        for stream in left:
            self._end_stream(stream, error=Draining("the server is shutting down"))
        if left:
            # One step is enough to end them. Behind a step that hangs, `stop` or the watchdog fails them.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DRAIN_END_SECONDS):
                    await self._empty.wait()
        return len(left)

    async def stop(self) -> None:
        """Stop threads and tasks, and end every open stream with Draining. Idempotent."""
        if self._state is EngineState.STOPPED:
            return
        was_dead, self._state = self._state is EngineState.DEAD, EngineState.STOPPED
        await self.control.close(Draining("the server is shutting down"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._fail_streams(Draining("the server is shutting down"))
        self._inputs.close()
        self._adapters.close()
        await self._grammars.close()
        stopping = partial(stop_all, self._executor, self._watchdog.ranks, self._disagg, self._disk, dead=was_dead)
        await in_daemon_thread(stopping, "slipstream-stop")
        if not was_dead:
            self._wakeup.close()

    async def wait_dead(self) -> BaseException:
        """Wait until the engine is DEAD; returns the cause."""
        return await asyncio.shield(self._dead)

    def refuse_unless_ready(self) -> None:
        """Raises EngineDead or Draining unless the engine is READY."""
        if self._state is EngineState.DEAD:
            raise EngineDead("the engine failed, and its streams are lost")
        if self._state is not EngineState.READY:
            raise Draining("the server is shutting down")

    def turn_away(self, *, ends: bool) -> None:
        """Refuse new requests from now on, and end all others, if `ends`; else take them again."""
        self._refusal = Paused("the engine was paused, which ends requests; try another replica") if ends else None
        if self._refusal is not None:
            self._arriving.end_all(self._refusal)
            for stream in list(self._live.values()):
                self._end_stream(stream, error=self._refusal)

    def _refuse_if_late_or_full(self, request: GenerateRequest, now: float) -> None:
        if self._refusal is not None:
            raise self._refusal
        if request.deadline is not None and request.deadline <= now:
            raise DeadlinePassed("the deadline had passed before the request could be queued")
        if not self._scheduler.has_room(request.tenant, request.sampling.n):
            raise Overloaded("the waiting queue is full", reason="QUEUE_FULL")

    def _enter(
        self, request: GenerateRequest, request_id: str, reqs: list[Req], readers: Sequence[AnswerReader]
    ) -> TokenStream:
        with self._inputs.failures.told():
            outputs = pending_outputs(reqs, readers, self._inputs.tokenizer, want_text=request.want_text)
        started = Started(request_id, reqs[0].input_len, weight_version=self.control.version)
        stream = self._outputs.stream(started, outputs, self._abort_stream, self._turnstile)
        stream.reqs = reqs
        self._live[request_id] = stream
        self._adapters.table.acquire(reqs[0].adapter_slot)
        self._empty.clear()
        default_wait = self._config.scheduler.default_queue_timeout
        for req in reqs:
            req.sink = stream
            req.trace_id = request.trace_id
            if req.queue_deadline is None and default_wait is not None:
                req.queue_deadline = req.arrived_at + default_wait
            self._scheduler.intake.add(req)
        self._wakeup.set()
        return stream

    def _emit(self, outputs: object, now: float) -> None:
        self._outputs.emit(outputs, now)  # type: ignore[arg-type]

    def _abort_stream(self, stream: TokenStream) -> None:
        self._end_stream(stream, reason=FinishReason.CANCELLED)

    def _end_stream(
        self, stream: TokenStream, *, reason: FinishReason | None = None, error: SlipstreamError | None = None
    ) -> None:
        for req, output in stream.sequences():
            if not output.done:
                self._scheduler.intake.end(Ending(req, reason=reason, error=error))
        self._wakeup.set()

    def _stream_closed(self, stream: TokenStream) -> None:
        del self._live[stream.request_id]
        self.open_streams.ended(stream)
        # The scheduler has ended its sequences, so no step that is planned from now on names their slot.
        self._adapters.table.release(stream.reqs[0].adapter_slot)
        if stream.reqs[0].pooling is None:
            # A stream that is kept for Attach outlives its requests by minutes, and needs nothing of their prompts.
            stream.reqs = []
        if not self._live:
            self._empty.set()

    async def _run(self) -> None:
        """The scheduler's loop: one call of `step` per wake-up."""
        while self._state is not EngineState.DEAD:
            self._scheduler.step(time.monotonic())
            self.control.still.look()
            await self._wakeup.wait(self._scheduler.next_expiry())

    async def _watch(self) -> None:
        """Every `PERIOD`: end the engine if a step hangs, and wake its loop, in case a wake-up got lost."""
        while self._state is not EngineState.DEAD:
            await asyncio.sleep(PERIOD)
            if self._executor.in_flight:
                self._wakeup.set()
            if self._watchdog.hangs(time.monotonic(), self._scheduler.stats.step, self._executor.in_flight):
                self.die(TimeoutError(f"no step finished for {self._watchdog.waited:.0f} s"))

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """End the engine when one of its tasks has ended, by a panic or otherwise: else every stream would hang."""
        if task.cancelled():
            self.die(RuntimeError(f"the task {task.get_name()} was cancelled"))
        else:
            self.die(task.exception() or RuntimeError(f"the task {task.get_name()} ended"))

    def die(self, cause: BaseException) -> None:
        """End everything: a step failed or hung, and nothing it touched can be trusted. The process should exit."""
        if self._state in (EngineState.DEAD, EngineState.STOPPED):
            return
        cause = self._watchdog.told(cause)
        self._state = EngineState.DEAD
        for end in (self._fail_streams, self.control.still.close, self._disagg.abandon):
            end(EngineDead("the engine failed, and its streams are lost"))
        if not self._dead.done():
            self._dead.set_result(cause)
        # A last snapshot for the metrics. It comes last, because what it reads may be what is broken.
        self._scheduler.publish()

    def _fail_streams(self, error: SlipstreamError) -> None:
        self._arriving.end_all(error)
        for stream in self._live.values():
            stream.fail(error)
        self._live.clear()
        self._empty.set()
