"""Has an engine take a request: the cheapest one first, another one where that refuses, none twice."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from core.errors import AdapterNotFound, DuplicateRequest, Overloaded, RequestAborted, SlipstreamError
from core.types.io import EmbedRequest, GenerateRequest
from service.errors import EngineSilent, NotReady
from service.replicas.open_requests import OpenRequests
from service.replicas.prompt_pieces import Prompt, inputs_of, prompt_of
from service.replicas.replica import Replica
from service.replicas.replica_embed import ReplicaEmbedCall
from service.replicas.replica_engine import ReplicaEngine
from service.replicas.replica_stream import ReplicaStream
from service.replicas.router import Router, Share

Answer = TypeVar("Answer")
ANOTHER_MAY = (Overloaded, AdapterNotFound, DuplicateRequest)
"""Errors of one replica after which the next one is asked: a request without a stream has put out nothing. An id that
is free here and taken there is of a request that its caller has just left.

EngineDead is none of them: the engine may have died of this request, which would end the next one too. For the same
reason only one other engine is asked after one that fell silent over a request.
"""


class Dispatch:
    """`seed`: of requests without one; None is a random one. Event-loop thread only."""

    def __init__(self, replicas: Sequence[Replica], router: Router, requests: OpenRequests, seed: int | None) -> None:
        self._replicas, self._router, self._requests = replicas, router, requests
        # Engines that drew seeds by themselves would draw the same ones.
        self._seeds = None if seed is None else random.Random(seed)

    async def generate(self, request: GenerateRequest) -> ReplicaStream:
        """See `Engine.generate`. Raises NotReady where there is no engine."""

        async def take(engine: ReplicaEngine, share: Share) -> ReplicaStream:
            stream = await engine.open_stream(request, share, lambda ended: self._requests.remove(ended.request_id))
            if not stream.over:
                self._requests.add(stream.request_id, stream, engine)
            return stream

        if self._seeds is not None and request.sampling.seed is None:
            request = replace(request, sampling=replace(request.sampling, seed=self._seeds.getrandbits(63)))
        return await self._taken(request.request_id, prompt_of(request), request.sampling.n, take)

    async def embed(self, request: EmbedRequest) -> ReplicaEmbedCall:
        """See `Engine.embed`."""

        async def take(engine: ReplicaEngine, share: Share) -> ReplicaEmbedCall:
            try:
                call = await engine.embed(request)
            except BaseException:
                share.end()
                raise
            taken = ReplicaEmbedCall(call, request.adapter, share, self._requests.remove)
            self._requests.add(taken.request_id, taken, engine)
            return taken

        return await self._taken(request.request_id, inputs_of(request), len(request.inputs), take)

    async def _taken(
        self, request_id: str, prompt: Prompt, rows: int, take: Callable[[ReplicaEngine, Share], Awaitable[Answer]]
    ) -> Answer:
        async def ask(replica: Replica) -> Answer:
            if arriving.aborted:
                raise RequestAborted("the request was aborted")
            arriving.engine = replica.engine
            share = self._router.take(replica.place, prompt, rows)
            answer = await take(replica.engine, share)
            share.taken()
            return answer

        with self._requests.arriving(request_id) as arriving:
            return await self._first(prompt, ask)

    async def in_one(self, call: Callable[[ReplicaEngine], Awaitable[Answer]]) -> Answer:
        """The answer of any engine."""
        return await self._first(Prompt((), 0), lambda replica: call(replica.engine))

    async def _first(self, prompt: Prompt, ask: Callable[[Replica], Awaitable[Answer]]) -> Answer:
        """The first answer of the engines in the order of their costs. Raises the error of the last one asked."""
        error: SlipstreamError = NotReady("no engine of this server is ready")
        silent = 0
        for place in self._router.order(prompt, [each.place for each in self._replicas if each.ready]):
            replica = self._replicas[place]
            # It may have gone while another one's answer was awaited.
            if not replica.ready or silent > 1:
                continue
            try:
                return await ask(replica)
            except ANOTHER_MAY as refused:
                error = refused
            except EngineSilent as gone:
                error, silent = gone, silent + 1
        raise error

    async def abort(self, request_id: str) -> bool:
        """See `Engine.abort`. Raises EngineSilent where the engine that has the request does not answer."""
        engine = self._requests.abort(request_id)
        return engine is not None and await engine.abort(request_id)
