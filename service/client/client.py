"""A small asynchronous client, used by the command line, the demo and the tests.

It knows the wire and nothing of core. Retries are gRPC's own, by the service config below: UNAVAILABLE, and
RESOURCE_EXHAUSTED where the server says when to come back. gRPC retries only before the first message: a stream that
has begun is never repeated.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Any, Unpack

import grpc
import grpc.aio

from service.access.tls_credentials import ClientTls
from service.client.errors import CallFailed
from service.client.events import Chunk, End, PromptChunk, told
from service.client.judging import (
    Classification,
    DocumentScore,
    Judged,
    classifications,
    classify_request,
    document_scores,
    score_request,
)
from service.client.requests import Prompt, chat_options, constraint_of, embed_input, set_input
from service.client.resumed_call import Received, ResumedCall, attach_request, responses
from service.client.sampling_options import SamplingOptions
from service.pb.slipstream.v1 import inference_pb2 as pb
from service.pb.slipstream.v1 import inference_pb2_grpc

SERVICE_CONFIG: dict[str, Any] = {
    "methodConfig": [
        {
            "name": [{"service": "slipstream.v1.InferenceService"}],
            "retryPolicy": {
                "maxAttempts": 2,
                "initialBackoff": "0.1s",
                "maxBackoff": "2s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE", "RESOURCE_EXHAUSTED"],
            },
        }
    ],
    "retryThrottling": {"maxTokens": 10, "tokenRatio": 0.1},
}
"""The service config that every client should use; `docs/reference/client.md` publishes the same.

One retry: a request that kills the process which serves it then costs two servers and not the fleet. The server's
`grpc-retry-pushback-ms` decides about RESOURCE_EXHAUSTED: a retry after so many milliseconds, or with -1 none."""

FLEET_CONFIG: dict[str, Any] = SERVICE_CONFIG | {
    "loadBalancingConfig": [{"round_robin": {}}],
    "healthCheckConfig": {"serviceName": "slipstream.v1.InferenceService"},
}
"""For a target that is several servers. Readiness is watched on every connection, so a server that drains or loads gets
no new calls. From refusals alone a client would learn of it too late, since its retries can meet the same server again.
"""

MAX_REQUEST_BYTES = 4 * 1024 * 1024
"""gRPC keeps a request for its retries up to this size; its default is a quarter of a megabyte."""


@dataclass(frozen=True, slots=True)
class Vector:
    """The embedding of one input."""

    values: tuple[float, ...]
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Completion:
    """One whole output. `prompt_logprobs`: as in `PromptChunk`, of all prompt tokens behind the first."""

    token_ids: tuple[int, ...]
    text: str
    end: End
    prompt_logprobs: tuple[tuple[int, float, tuple[tuple[int, float], ...]], ...] = ()


class SlipstreamClient:
    """A client of one server, `target` being `host:port`. Use it as an async context manager, or `close` it.

    `token` goes with every call; without `tls` the network can read it. With `fleet`, `target` stands for several
    servers (`dns:///…`, `ipv4:1.2.3.4:50051,…`), and calls go in turn to the servers that are ready.
    """

    def __init__(
        self,
        target: str,
        options: Sequence[tuple[str, Any]] = (),
        *,
        tls: ClientTls | None = None,
        token: str | None = None,
        fleet: bool = False,
    ) -> None:
        self.fleet = fleet
        config = json.dumps(FLEET_CONFIG if fleet else SERVICE_CONFIG)
        buffer = ("grpc.per_rpc_retry_buffer_size", MAX_REQUEST_BYTES)
        arguments = (("grpc.service_config", config), buffer, *options)
        if tls is None:
            self.channel = grpc.aio.insecure_channel(target, options=arguments)
        else:
            self.channel = grpc.aio.secure_channel(target, tls.credentials(), options=arguments)
        self.metadata: tuple[tuple[str, str], ...] = () if token is None else (("authorization", f"Bearer {token}"),)
        self.stub: Any = inference_pb2_grpc.InferenceServiceStub(self.channel)  # type: ignore[no-untyped-call]

    async def __aenter__(self) -> SlipstreamClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; live calls are cancelled."""
        await self.channel.close()

    async def generate(
        self,
        /,
        prompt: Prompt,
        *,
        request_id: str = "",
        timeout: float | None = None,
        want_text: bool = True,
        priority: int = 0,
        cache_salt: str = "",
        adapter: str = "",
        constraint: Mapping[str, Any] | None = None,
        resumable: bool = False,
        speculative: bool | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        template_arguments: Mapping[str, Any] = MappingProxyType({}),
        special_tokens: bool = False,
        parse_answer: bool = False,
        tool_choice: str = "",
        images: Sequence[bytes] = (),
        on_started: Callable[[str], None] | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> AsyncGenerator[Chunk | End | PromptChunk, None]:
        """Stream the outputs for `prompt`, and PromptChunks before them where `prompt_logprobs` is given.

        `sampling` are SamplingOptions; `constraint` is one of {"json_schema": text or dict}, {"regex": text},
        {"ebnf": text}, {"choice": [texts]}, {"structural_tags": the fields of StructuralTags, schemas as text or dict}.
        `timeout` is the call's deadline in seconds. Raises CallFailed.
        With `speculative=False` no tokens are guessed. `tools`, `template_arguments`, `special_tokens`, `parse_answer`
        are for chats, as Chat of the API has them; so is `tool_choice`: "auto", "none", "required" or the name of a
        tool. `images`: encoded, of a text or token ids, and not of a chat. Leaving the loop early cancels the call.

        A `resumable` stream goes on by itself after a broken connection. It gets a random id if it has none. Leaving
        its loop early aborts the request. `on_started` is called with the incarnation of a resumable stream, by which
        `attach` finds it and no other of its id; again after each broken connection.
        """
        if resumable:
            request_id = request_id or uuid.uuid4().hex
        request = pb.GenerateRequest(
            request_id=request_id,
            sampling_params=pb.SamplingParams(**sampling),
            output_options=pb.OutputOptions(text=want_text),
            priority=priority,
            cache_salt=cache_salt,
            adapter=adapter,
            constraint=None if constraint is None else constraint_of(constraint),
            resumable=resumable,
            speculative=speculative,
        )
        chat = chat_options(tools, template_arguments, special_tokens, parse_answer, tool_choice)
        set_input(request, prompt, chat, images)
        if resumable:
            events = ResumedCall(self, request, timeout).events()
        else:
            events = responses(self.stub.Generate(request, timeout=timeout, metadata=self.metadata))
        async with aclosing(told(events, on_started)) as shown:
            async for event in shown:
                yield event

    async def attach(
        self,
        request_id: str,
        received: Mapping[int, Received] | None = None,
        *,
        timeout: float | None = None,
        incarnation: str = "",
        on_started: Callable[[str], None] | None = None,
    ) -> AsyncGenerator[Chunk | End, None]:
        """Go on with a resumable stream, which another process may have begun, after the part `received` by output.

        `timeout` is the call's deadline in seconds. `incarnation` is what `on_started` of the call that began the
        stream was given; without it the id must have had one stream only. Raises CallFailed. Leaving the loop early
        only detaches from the stream, which the server keeps for a while.
        """
        request = attach_request(request_id, received or {}, incarnation)
        events = responses(self.stub.Attach(request, timeout=timeout, metadata=self.metadata))
        async with aclosing(told(events, on_started)) as shown:
            async for event in shown:
                assert not isinstance(event, PromptChunk), "of a kept stream"
                yield event

    async def complete(self, /, prompt: Prompt, **options: Any) -> list[Completion]:
        """All outputs of one request, by index; same arguments as `generate`. Raises CallFailed."""
        ids: dict[int, list[int]] = {}
        texts: dict[int, list[str]] = {}
        ends: dict[int, End] = {}
        of_prompt: list[tuple[int, float, tuple[tuple[int, float], ...]]] = []
        async for event in self.generate(prompt, **options):
            if isinstance(event, End):
                ends[event.index] = event
            elif isinstance(event, PromptChunk):
                of_prompt += event.logprobs
            else:
                ids.setdefault(event.index, []).extend(event.token_ids)
                texts.setdefault(event.index, []).append(event.text)
        return [
            Completion(tuple(ids.get(index, ())), "".join(texts.get(index, ())), end, tuple(of_prompt))
            for index, end in sorted(ends.items())
        ]

    async def embed(
        self,
        /,
        *inputs: str | Sequence[int],
        pooling: str | None = None,
        normalize: bool = True,
        timeout: float | None = None,
        **fields: Any,
    ) -> list[Vector]:
        """The vector of each input, a text or its token ids, in their order. Raises CallFailed.

        `pooling` is "last", "mean" or "cls"; None is the served model's own. `fields` are further fields of
        EmbedRequest. `timeout` is the call's deadline in seconds. Cancelling the task cancels the call.
        """
        request = pb.EmbedRequest(
            inputs=[embed_input(each) for each in inputs],
            pooling=f"POOLING_{pooling.upper()}" if pooling else None,
            normalize=normalize,
            **fields,
        )
        response = await self._unary(self.stub.Embed, request, timeout)
        return [
            Vector(tuple(each.values), each.usage.prompt_tokens, each.usage.cached_tokens)
            for each in response.embeddings
        ]

    async def classify(
        self, /, *inputs: Judged, raw_scores: bool = False, timeout: float | None = None, **fields: Any
    ) -> list[Classification]:
        """The scores of every label for each input: a text, its token ids, or a tuple of two texts, which is a pair.

        Raises CallFailed, and TypeError for a list of texts. `raw_scores`: the model's numbers as they are. `fields`
        are further fields of ClassifyRequest; otherwise as `embed`.
        """
        request = classify_request(inputs, raw_scores=raw_scores, **fields)
        return classifications(await self._unary(self.stub.Classify, request, timeout))

    async def score(
        self,
        /,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        raw_scores: bool = False,
        timeout: float | None = None,
        **fields: Any,
    ) -> list[DocumentScore]:
        """How well each document answers `query`: in their order, or with `top_n` the best so many, best first.

        `fields` are further fields of ScoreRequest; otherwise as `classify`. Raises CallFailed, and TypeError for one
        text instead of a list of documents.
        """
        request = score_request(query, documents, top_n=top_n, raw_scores=raw_scores, **fields)
        return document_scores(await self._unary(self.stub.Score, request, timeout))

    async def abort(self, request_id: str) -> bool:
        """End a live request. Returns whether there was one. Raises CallFailed."""
        response = await self._unary(self.stub.Abort, pb.AbortRequest(request_id=request_id))
        return bool(response.found)

    async def tokenize(self, text: str) -> list[int]:
        """Ids of `text`, as Generate would use them. Raises CallFailed."""
        return list((await self._unary(self.stub.Tokenize, pb.TokenizeRequest(text=text))).token_ids)

    async def detokenize(self, ids: Sequence[int]) -> str:
        """Text of `ids`. Raises CallFailed."""
        return str((await self._unary(self.stub.Detokenize, pb.DetokenizeRequest(token_ids=ids))).text)

    async def load(self) -> pb.GetLoadResponse:
        """Load as of the last step. Raises CallFailed."""
        response: pb.GetLoadResponse = await self._unary(self.stub.GetLoad, pb.GetLoadRequest())
        return response

    async def model_info(self) -> pb.GetModelInfoResponse:
        """Facts of the model. Raises CallFailed."""
        response: pb.GetModelInfoResponse = await self._unary(self.stub.GetModelInfo, pb.GetModelInfoRequest())
        return response

    async def server_info(self, timeout: float | None = None) -> pb.GetServerInfoResponse:
        """Facts of the process, its state among them; answered while the model is loading too.

        `timeout` is the call's deadline in seconds; without one the call waits for a server that hangs. Raises
        CallFailed.
        """
        request = pb.GetServerInfoRequest()
        response: pb.GetServerInfoResponse = await self._unary(self.stub.GetServerInfo, request, timeout)
        return response

    async def is_loading(self, timeout: float | None = None) -> bool:
        """Whether the server answers and its model still loads. `timeout` and errors as for `server_info`."""
        return (await self.server_info(timeout)).state == pb.SERVER_STATE_STARTING

    async def _unary(self, method: Any, request: Any, timeout: float | None = None) -> Any:
        try:
            return await method(request, timeout=timeout, metadata=self.metadata)
        except grpc.aio.AioRpcError as error:
            raise CallFailed(error) from None
