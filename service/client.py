"""A small asynchronous client: what the command line, the demo and the tests speak to a server with.

It knows the wire and nothing of core. Retries are gRPC's own, by the service config below: only UNAVAILABLE, and only
before the first message, since a stream that has begun is never repeated.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import grpc
import grpc.aio
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo  # type: ignore[import-untyped]
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]

from service.pb.slipstream.v1 import inference_pb2 as pb
from service.pb.slipstream.v1 import inference_pb2_grpc
from service.status import DETAILS_TRAILER, TOKENS_EMITTED_TRAILER
from service.tls_credentials import ClientTls

SERVICE_CONFIG: dict[str, Any] = {
    "methodConfig": [
        {
            "name": [{"service": "slipstream.v1.InferenceService"}],
            "retryPolicy": {
                "maxAttempts": 3,
                "initialBackoff": "0.1s",
                "maxBackoff": "2s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ],
    "retryThrottling": {"maxTokens": 10, "tokenRatio": 0.1},
}
"""The service config that every client should use; `service/README.md` publishes the same."""


Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Text, token ids, or chat messages with `role` and `content`."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """New tokens and text of one output; `logprobs` holds (id, logprob, alternatives) per token if asked for."""

    request_id: str
    index: int
    position: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[tuple[int, float, tuple[tuple[int, float], ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class End:
    """The end of one output; `reason` is "stop", "length" or "cancelled"."""

    request_id: str
    index: int
    reason: str
    matched_stop: str | int | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Vector:
    """The embedding of one input."""

    values: tuple[float, ...]
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Completion:
    """One whole output."""

    token_ids: tuple[int, ...]
    text: str
    end: End


class CallFailed(Exception):
    """A call ended with a status. `reason` is the server's stable word, `fields` the bad ones with what is wrong."""

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        self.code = error.code()
        self.message = error.details() or ""
        self.reason = ""
        self.fields: dict[str, str] = {}
        self.retry_after: float | None = None
        self.tokens_emitted = 0
        self._read(dict(error.trailing_metadata() or ()))
        super().__init__(f"{self.code.name}: {self.message}")

    def _read(self, trailers: Mapping[str, Any]) -> None:
        self.tokens_emitted = int(trailers.get(TOKENS_EMITTED_TRAILER, 0))
        for packed in Status.FromString(trailers.get(DETAILS_TRAILER, b"")).details:
            info, bad, retry = ErrorInfo(), BadRequest(), RetryInfo()
            if packed.Unpack(info):
                self.reason = info.reason
            elif packed.Unpack(bad):
                self.fields = {each.field: each.description for each in bad.field_violations}
            elif packed.Unpack(retry):
                self.retry_after = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9


class SlipstreamClient:
    """A client of one server, `target` being `host:port`. Use it as an async context manager, or `close` it.

    `token` goes with every call; without `tls` anyone on the way can read it.
    """

    def __init__(
        self,
        target: str,
        options: Sequence[tuple[str, Any]] = (),
        *,
        tls: ClientTls | None = None,
        token: str | None = None,
    ) -> None:
        arguments = (("grpc.service_config", json.dumps(SERVICE_CONFIG)), *options)
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
        prompt: Prompt,
        *,
        request_id: str = "",
        timeout: float | None = None,
        want_text: bool = True,
        priority: int = 0,
        cache_salt: str = "",
        adapter: str = "",
        **sampling: Any,
    ) -> AsyncGenerator[Chunk | End, None]:
        """Stream the outputs for `prompt`.

        `sampling` are fields of SamplingParams. `timeout` is the call's deadline in seconds. Raises CallFailed.
        Leaving the loop early cancels the call.
        """
        request = pb.GenerateRequest(
            request_id=request_id,
            sampling_params=pb.SamplingParams(**sampling),
            output_options=pb.OutputOptions(text=want_text),
            priority=priority,
            cache_salt=cache_salt,
            adapter=adapter,
        )
        _set_input(request, prompt)
        call = self.stub.Generate(request, timeout=timeout, metadata=self.metadata)
        try:
            async for response in call:
                event = _event(response)
                if event is not None:
                    yield event
        except grpc.aio.AioRpcError as error:
            raise CallFailed(error) from None
        finally:
            call.cancel()

    async def complete(self, prompt: Prompt, **options: Any) -> list[Completion]:
        """All outputs of one request, by index; same arguments as `generate`."""
        ids: dict[int, list[int]] = {}
        texts: dict[int, list[str]] = {}
        ends: dict[int, End] = {}
        async for event in self.generate(prompt, **options):
            if isinstance(event, End):
                ends[event.index] = event
            else:
                ids.setdefault(event.index, []).extend(event.token_ids)
                texts.setdefault(event.index, []).append(event.text)
        return [
            Completion(tuple(ids.get(index, ())), "".join(texts.get(index, ())), end)
            for index, end in sorted(ends.items())
        ]

    async def embed(
        self,
        *inputs: str | Sequence[int],
        pooling: str = "last",
        normalize: bool = True,
        timeout: float | None = None,
        **fields: Any,
    ) -> list[Vector]:
        """The vector of each input, a text or its token ids, in their order. Raises CallFailed.

        `pooling` is "last", "mean" or "cls"; `fields` are others of EmbedRequest. Cancelling the task cancels the call.
        """
        request = pb.EmbedRequest(
            inputs=[_embed_input(each) for each in inputs],
            pooling=f"POOLING_{pooling.upper()}",
            normalize=normalize,
            **fields,
        )
        response = await self._unary(self.stub.Embed, request, timeout)
        return [
            Vector(tuple(each.values), each.usage.prompt_tokens, each.usage.cached_tokens)
            for each in response.embeddings
        ]

    async def abort(self, request_id: str) -> bool:
        """End a live request; whether there was one. Raises CallFailed."""
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

    async def _unary(self, method: Any, request: Any, timeout: float | None = None) -> Any:
        try:
            return await method(request, timeout=timeout, metadata=self.metadata)
        except grpc.aio.AioRpcError as error:
            raise CallFailed(error) from None


def _set_input(request: pb.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        request.text = prompt
        return
    if prompt and isinstance(prompt[0], Mapping):
        turns = [pb.ChatMessage(role=turn["role"], content=turn["content"]) for turn in prompt]  # type: ignore[index]
        request.chat.CopyFrom(pb.Chat(messages=turns))
        return
    request.token_ids.CopyFrom(pb.TokenIds(ids=prompt))  # type: ignore[arg-type]


def _embed_input(given: str | Sequence[int]) -> pb.EmbedInput:
    return pb.EmbedInput(text=given) if isinstance(given, str) else pb.EmbedInput(token_ids=pb.TokenIds(ids=given))


def _event(response: pb.GenerateResponse) -> Chunk | End | None:
    """The event of a response; None for `started`."""
    kind = response.WhichOneof("event")
    if kind == "delta":
        delta = response.delta
        logprobs = tuple(
            (entry.token_id, entry.logprob, tuple((top.token_id, top.logprob) for top in entry.top_logprobs))
            for entry in delta.logprobs
        )
        return Chunk(response.request_id, delta.index, delta.position, tuple(delta.token_ids), delta.text, logprobs)
    if kind == "finished":
        end = response.finished
        stop = end.matched_stop.WhichOneof("stop") if end.HasField("matched_stop") else None
        return End(
            response.request_id,
            end.index,
            pb.FinishReason.Name(end.reason).removeprefix("FINISH_REASON_").lower(),
            None if stop is None else getattr(end.matched_stop, stop),
            end.usage.prompt_tokens,
            end.usage.cached_tokens,
            end.usage.completion_tokens,
        )
    return None
