"""Writes the events of one Generate call in a dialect: a chunk per delta if the call streams, and each output whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc.aio

from core.engine.api import OutputStream
from core.errors import SlowConsumer
from core.types.io import Delta, Finished, OutputEvent, Started
from service.gateway.dialect import Asked, Dialect, Whole
from service.gateway.outputs import OutputSoFar
from service.limits.hold import note_made, note_prompt
from service.metrics.rpc import RpcMetrics
from service.rpc.status import TOKENS_EMITTED_TRAILER
from service.rpc.write_timeout import WriteBound
from service.tracing.request_span import note_finished
from service.wire.generate import split

Context = grpc.aio.ServicerContext[Any, Any]


class Generation:
    """The responses to one call.

    Headers go out with the first response. So gRPC can retry a call that is refused before it, and a client that leaves
    before it resets the call.
    """

    def __init__(self, dialect: Dialect, asked: Asked) -> None:
        self._dialect = dialect
        self._asked = asked
        self._outputs: dict[int, OutputSoFar] = {}
        self._wholes: dict[int, Whole] = {}
        self._prompt: Any = None
        """What is told of the prompt. It grows as that comes, since all of it at once would hold up other calls."""
        self._skipped = 0
        """Tokens of the prompt that are still to come, and that nothing is told of."""
        self._emitted = 0
        self._made = 0

    async def write(self, stream: OutputStream, context: Context, metrics: RpcMetrics, write_timeout: float) -> None:
        """Write every event of `stream`, each within `write_timeout` seconds. Raises SlowConsumer and stream errors.

        On failure a trailer holds the number of tokens written.
        """
        try:
            async with WriteBound(write_timeout) as bound:
                async for event in stream:
                    for response in self._responses(event):
                        bound.begin()
                        await context.write(response)
                        bound.end()
            if len(self._wholes) != self._asked.request.sampling.n:
                raise RuntimeError(
                    f"stream ended after {len(self._wholes)} of {self._asked.request.sampling.n} terminals"
                )
        except BaseException as error:  # a revoked token cancels from outside, and its client wants the count too
            if self._emitted:
                context.set_trailing_metadata(((TOKENS_EMITTED_TRAILER, str(self._emitted)),))
            if isinstance(error, SlowConsumer):
                metrics.slow_consumer()
            raise
        finally:
            note_made(self._made)

    def _responses(self, event: OutputEvent) -> Iterator[Any]:
        if isinstance(event, Started):
            note_prompt(event.prompt_tokens)
            self._begin(event)
        elif isinstance(event, Finished):
            note_finished(event)
            yield from self._ended(self._outputs[event.index].finish(event))
        else:
            yield from self._deltas(event)

    def _begin(self, started: Started) -> None:
        request, since = self._asked.request, self._asked.prompt_from
        sampling = request.sampling
        if sampling.prompt_logprobs is not None:
            assert request.token_ids is not None, "asked for with ids"
            self._prompt = self._dialect.prompt(request.token_ids[0] if since == 0 else None)
        for index in range(sampling.n):
            self._outputs[index] = OutputSoFar(index, started.prompt_tokens, sampling.logprob_token_ids, self._prompt)
        self._skipped = max(0, since - 1)

    def _ended(self, whole: Whole) -> Iterator[Any]:
        """The responses that are due when one output has ended.

        A call that streams gets the output at once. Other calls get all outputs by index when the last has ended,
        because gateways number choices in the order in which they come.
        """
        self._wholes[whole.index] = whole
        if self._asked.stream:
            due = [whole]
        elif len(self._wholes) == self._asked.request.sampling.n:
            due = [self._wholes[index] for index in sorted(self._wholes)]
        else:
            due = []
        for each in due:
            yield self._dialect.complete(self._asked.request.request_id, each)

    def _deltas(self, delta: Delta) -> Iterator[Any]:
        if delta.position < 0:
            # Sent with the first piece: gateways look for all of it there.
            self._dialect.add_to_prompt(self._prompt, delta.logprobs[self._skipped :])
            self._skipped = max(0, self._skipped - len(delta.logprobs))
            return
        self._made += len(delta.token_ids)
        for each in split(delta):
            assert isinstance(each, Delta), "of a delta"
            piece = self._outputs[delta.index].add(each)
            # A delta with text alone is not sent: gateways make text from ids themselves.
            if self._asked.stream and piece.token_ids:
                self._emitted += len(piece.token_ids)
                yield self._dialect.chunk(self._asked.request.request_id, piece)
