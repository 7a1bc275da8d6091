"""What a stream brings, as callers of the client see it: its start, new tokens and text, and the end of each output."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from service.client.answers import Part, parts_of
from service.pb.slipstream.v1 import inference_pb2 as pb


@dataclass(frozen=True, slots=True)
class Chunk:
    """New tokens and text of one output; `logprobs` holds (id, logprob, alternatives) per token if asked for.

    `chosen_logprobs` has, per token, those of the ids in `logprob_token_ids`, if there are any.
    """

    request_id: str
    index: int
    position: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[tuple[int, float, tuple[tuple[int, float], ...]], ...] = ()
    chosen_logprobs: tuple[tuple[float, ...], ...] = ()
    parts: tuple[Part, ...] = ()
    """What is new in an answer that the server reads (`parse_answer`); there is no text then."""


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Log probabilities of prompt tokens, (id, logprob, alternatives) each, where `prompt_logprobs` asked for them.

    `position`: the place of the first of them in the prompt, from 1; nothing comes before the first token.
    """

    request_id: str
    position: int
    logprobs: tuple[tuple[int, float, tuple[tuple[int, float], ...]], ...]


@dataclass(frozen=True, slots=True)
class End:
    """The end of one output; `reason` is "stop", "length" or "cancelled".

    `draft_tokens` were guessed and checked; `accepted_draft_tokens` of the `completion_tokens` were guessed.
    `started_version` names the weights that served when the stream began, `weight_version` those of the last token.
    """

    request_id: str
    index: int
    reason: str
    matched_stop: str | int | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    started_version: str = ""
    weight_version: str = ""


async def told(
    responses: AsyncGenerator[Any, None], on_started: Callable[[str], None] | None
) -> AsyncGenerator[Chunk | End | PromptChunk, None]:
    """The events of `responses`, which are closed at the end. `on_started` is called with each start's incarnation."""
    version = ""
    async with aclosing(responses):
        async for response in responses:
            event = _event(response, version)
            if event is not None:
                yield event
                continue
            version = response.started.weight_version
            if on_started is not None:
                on_started(response.started.incarnation)


def _event(response: pb.GenerateResponse | pb.AttachResponse, started_version: str) -> Chunk | End | PromptChunk | None:
    kind = response.WhichOneof("event")
    if kind == "delta":
        delta = response.delta
        logprobs = _told(delta.logprobs)
        chosen = tuple(tuple(entry.chosen_logprobs) for entry in delta.logprobs)
        told_of = (tuple(delta.token_ids), delta.text, logprobs, chosen if any(chosen) else (), parts_of(delta.parts))
        return Chunk(response.request_id, delta.index, delta.position, *told_of)
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
            end.usage.draft_tokens,
            end.usage.accepted_draft_tokens,
            started_version,
            end.weight_version,
        )
    if kind == "prompt_logprobs":
        of_prompt = response.prompt_logprobs  # type: ignore[union-attr]  # of GenerateResponse alone
        return PromptChunk(response.request_id, of_prompt.position, _told(of_prompt.logprobs))
    return None


def _told(entries: Iterable[pb.TokenLogprob]) -> tuple[tuple[int, float, tuple[tuple[int, float], ...]], ...]:
    return tuple(
        (entry.token_id, entry.logprob, tuple((top.token_id, top.logprob) for top in entry.top_logprobs))
        for entry in entries
    )
