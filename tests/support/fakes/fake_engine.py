"""An engine without a model: it plays a script per request, can be held at any step, drained and killed.

It keeps the door's promises (one terminal per index, aborts, duplicate ids, deadlines, drain), so that the service can
be tested over real sockets with every timing under the test's control.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Self

from core.engine.api import EngineState
from core.errors import (
    DeadlinePassed,
    Draining,
    DuplicateRequest,
    EngineDead,
    FieldViolation,
    InvalidRequest,
    RequestAborted,
)
from core.lanes import LaneRecorder
from core.types.io import (
    Delta,
    EmbedRequest,
    EmbedResult,
    Finished,
    FinishReason,
    GenerateRequest,
    ModelInfo,
    OutputEvent,
    Pooling,
    Started,
    Timing,
    Usage,
)
from core.types.sampling_params import SamplingParams
from core.types.stats import EngineStats, PoolStats
from tests.support.fakes.adapter_shelf import AdapterShelf
from tests.support.fakes.fake_control import FakeControl
from tests.support.fakes.fake_prefixes import FakePrefixes
from tests.support.fakes.figures import FIGURES
from tests.support.fakes.vectors import vectors_of

Step = OutputEvent | BaseException | asyncio.Event
"""An event to emit, an error to raise, or something to wait for first."""

Script = Callable[[GenerateRequest], Iterable[Step]]

VOCAB = 1000

INFO = ModelInfo(
    name="fake",
    architecture="FakeForCausalLM",
    dtype="float32",
    vocab_size=VOCAB,
    context_length=4096,
    max_input_length=4095,
    bos_token_id=1,
    eos_token_ids=(2,),
    default_sampling=SamplingParams(temperature=0.5, max_tokens=8),
    has_chat_template=True,
    embedding_dimension=4,
)


def token_at(position: int) -> int:
    """The token that `count_up` emits at `position`."""
    return 10 + position % (VOCAB - 10)


def finished(index: int, tokens: int, reason: FinishReason = FinishReason.LENGTH) -> Finished:
    """A terminal with plausible figures."""
    return Finished(index, reason, Usage(3, 1, tokens, 5, 2), Timing(0.001, 0.002, 0.003))


def count_up(request: GenerateRequest) -> Iterator[Step]:
    """One token per delta up to `max_tokens`, then the terminal; output after output."""
    total = request.sampling.max_tokens or 8
    for index in range(request.sampling.n):
        for position in range(total):
            text = f"{position} " if request.want_text else ""
            yield Delta(index, position, (token_at(position),), text)
        yield finished(index, total)


def held(gate: asyncio.Event, after: int = 1) -> Script:
    """`count_up` that waits for `gate` after `after` tokens."""

    def script(request: GenerateRequest) -> Iterator[Step]:
        for at, step in enumerate(count_up(request)):
            if at == after:
                yield gate
            yield step

    return script


class FakeStream:
    """The stream of one request; see `core.engine.api.OutputStream`."""

    def __init__(self, engine: FakeEngine, request: GenerateRequest, steps: Iterator[Step]) -> None:
        self.request = request
        self.request_id = request.request_id
        self.closed = asyncio.Event()
        self._engine = engine
        self._steps = steps
        self._cut: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
        self._left = list(range(request.sampling.n))
        self._started = False
        self._behind: OutputEvent | None = None
        """The first event, while `Started` is told."""

    def __aiter__(self) -> AsyncIterator[OutputEvent]:
        return self

    async def __anext__(self) -> OutputEvent:
        event, self._behind = self._behind, None
        try:
            event = event or await self._next()
        except BaseException:
            self._engine.forget(self)
            raise
        if isinstance(event, Started):
            self._started = True
        elif not self._started:
            # As the engine: a stream that fails before its first token has no event. Scripts may tell it themselves.
            self._started, self._behind = True, event
            prompt_tokens = len(self.request.token_ids or (1, 2, 3))
            return Started(self.request_id, prompt_tokens, weight_version=self._engine.control.version)
        if isinstance(event, Finished):
            self._left.remove(event.index)
            if not self._left:
                self._engine.forget(self)
        return event

    async def _next(self) -> OutputEvent:
        if not self._left:
            raise StopAsyncIteration
        while not self._cut.done():
            step = next(self._steps, None)
            if step is None:
                raise StopAsyncIteration
            if isinstance(step, BaseException):
                raise step
            if not isinstance(step, asyncio.Event):
                return step
            await self._wait(step)
        error = self._cut.result()
        if error is not None:
            raise error
        return finished(self._left[0], 0, FinishReason.CANCELLED)

    async def _wait(self, event: asyncio.Event) -> None:
        """Until the event is set, the stream is cut, or the deadline passes."""
        waiter = asyncio.create_task(event.wait())
        deadline = self.request.deadline
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            done, _ = await asyncio.wait({waiter, self._cut}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiter.cancel()
        if not done:
            raise DeadlinePassed("the request's deadline passed")

    def cut(self, error: BaseException | None) -> None:
        """End the stream: with `error`, or as cancelled if it is None."""
        if not self._cut.done():
            self._cut.set_result(error)

    async def aclose(self) -> None:
        """Abort what still runs."""
        self._engine.forget(self)
        self.closed.set()


class FakeEmbedCall:
    """The call of one embedding request; see `core.engine.api.EmbedCall`. Its stream plays the script."""

    def __init__(self, request: EmbedRequest, stream: FakeStream, dimension: int) -> None:
        self.request = request
        self._dimension = dimension
        self.request_id = stream.request_id
        self._stream = stream

    async def result(self) -> EmbedResult:
        """The vectors, once the script has ended. Raises RequestAborted."""
        async for event in self._stream:
            if isinstance(event, Finished) and event.reason is FinishReason.CANCELLED:
                raise RequestAborted("the request was aborted")
        return EmbedResult(self.request_id, vectors_of(self.request, self._dimension))

    async def aclose(self) -> None:
        """Abort what still runs."""
        await self._stream.aclose()


class FakeEngine(AdapterShelf):
    """`core.engine.api.Engine` over scripts. `streams` keeps every stream ever opened, oldest first."""

    def __init__(self, script: Script = count_up, info: ModelInfo = INFO) -> None:
        self.script = script
        self.model_info, self.lanes, self.open_streams = info, LaneRecorder(), None
        self.state, self.stopped = EngineState.STARTING, 0
        self.streams: list[FakeStream] = []
        self.embedded: list[EmbedRequest] = []
        self.prefixes, self.control = FakePrefixes(), FakeControl()
        self.opened = asyncio.Condition()
        self._live: dict[str, FakeStream] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._died = asyncio.Event()
        self._cause: BaseException | None = None

    async def start(self) -> Self:
        """Become READY: the engine is also what it is started from."""
        self.state = EngineState.READY
        return self

    @property
    def stats(self) -> EngineStats:
        """`FIGURES`, and how many streams are live."""
        live, control = len(self._live), self.control
        told = {"activity": control.activity, "weight_version": control.version}
        return replace(FIGURES, pools=(PoolStats("req", 64, live), *FIGURES.pools), running=live, **told)

    @property
    def live_requests(self) -> int:
        """Streams opened and not yet ended."""
        return len(self._live)

    def full(self, tenant: str) -> bool:
        """Never: `refuse_with` says what it refuses."""
        return False

    async def embed(self, request: EmbedRequest) -> FakeEmbedCall:
        """Play the script for a request of as many outputs as there are inputs."""
        params = SamplingParams(n=len(request.inputs), max_tokens=1)
        shown = GenerateRequest(request.request_id, sampling=params, want_text=False, deadline=request.deadline)
        stream = await self._open(shown)
        self.embedded.append(request)
        info = self.model_info
        labels = info.labels if request.pooling is Pooling.LABELS else None
        return FakeEmbedCall(request, stream, len(labels.names) if labels else info.embedding_dimension)

    async def generate(self, request: GenerateRequest) -> FakeStream:
        """Play the script for `request`."""
        return await self._open(request, request.sampling.violations(self.model_info.vocab_size))

    async def _open(self, request: GenerateRequest, violations: Sequence[FieldViolation] = ()) -> FakeStream:
        if self.refuse_with is not None:
            raise self.refuse_with
        if self.state is EngineState.DEAD:
            raise EngineDead("the engine has failed")
        if self.state is not EngineState.READY:
            raise Draining("the server is shutting down")
        if request.request_id in self._live:
            raise DuplicateRequest("a live request has this id")
        if violations:
            raise InvalidRequest(list(violations))
        stream = FakeStream(self, request, iter(self.script(request)))
        self._live[request.request_id] = stream
        self._idle.clear()
        async with self.opened:
            self.streams.append(stream)
            self.opened.notify_all()
        return stream

    async def stream_number(self, count: int) -> FakeStream:
        """The `count`-th stream ever opened, once it is."""
        async with self.opened:
            await self.opened.wait_for(lambda: len(self.streams) >= count)
        return self.streams[count - 1]

    def forget(self, stream: FakeStream) -> None:
        """The stream holds nothing any more."""
        if self._live.get(stream.request_id) is stream:
            del self._live[stream.request_id]
        if not self._live:
            self._idle.set()

    def abort(self, request_id: str) -> bool:
        """End a live request as cancelled."""
        stream = self._live.get(request_id)
        if stream is not None:
            stream.cut(None)
        return stream is not None

    async def tokenize(self, text: str, add_special_tokens: bool = True, caller: str = "") -> list[int]:
        """One id per character."""
        ids = [min(ord(char), VOCAB - 1) for char in text]
        return [1, *ids] if add_special_tokens else ids

    async def detokenize(self, ids: Sequence[int], skip_special_tokens: bool = True, caller: str = "") -> str:
        """One character per id."""
        if any(not 0 <= token < VOCAB for token in ids):
            raise InvalidRequest.of("token_ids", f"must be between 0 and {VOCAB - 1}")
        return "".join(chr(token) for token in ids if token > 2 or not skip_special_tokens)

    async def drain(self, timeout: float) -> int:
        """Refuse, wait, cut."""
        self.state = EngineState.DRAINING
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        except TimeoutError:
            left = list(self._live.values())
            for stream in left:
                stream.cut(Draining("the server is shutting down"))
            return len(left)
        return 0

    async def stop(self) -> None:
        """End every stream."""
        self.stopped += 1
        if self.state is not EngineState.DEAD:
            self.state = EngineState.STOPPED
        for stream in list(self._live.values()):
            stream.cut(Draining("the server is shutting down"))

    def kill(self, cause: BaseException) -> None:
        """Die as after a failed forward pass."""
        self.state = EngineState.DEAD
        for stream in list(self._live.values()):
            stream.cut(EngineDead("the engine has failed"))
        self._cause = cause
        self._died.set()

    async def wait_dead(self) -> BaseException:
        """The cause, once dead."""
        await self._died.wait()
        assert self._cause is not None, "set before the event"
        return self._cause


def info_with(**changes: object) -> ModelInfo:
    """`INFO` with some fields changed."""
    return replace(INFO, **changes)  # type: ignore[arg-type]
