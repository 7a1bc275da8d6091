"""Translates generation between `slipstream.v1` and the engine's own types.

Embeddings, adapters, positions and facts have files of their own beside this one. Checked here is what only a message
can get wrong: which input is set, ids, durations, two spellings of one option. The engine checks the ranges of sampling
parameters, the vocabulary and the context.
"""

from __future__ import annotations

import dataclasses
import math
import re
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from google.protobuf.duration_pb2 import Duration

from core.config import ADAPTER_NAME
from core.errors import FieldViolation, InvalidRequest
from core.types.audio import DEAF, HEARS, Audio, AudioTask
from core.types.image import BLIND
from core.types.io import (
    Delta,
    Finished,
    FinishReason,
    GenerateRequest,
    ModelInfo,
    OutputEvent,
    Started,
    TokenLogprob,
)
from core.types.sampling_params import SamplingParams
from service.pb.slipstream.v1 import inference_pb2 as pb
from service.tenant_ids import public_id
from service.wire.chat import answer_part, chat_fields, chat_violations
from service.wire.constraint import constraint_violations, read_constraint
from service.wire.message_limits import refuse_oversized

MAX_REQUEST_ID_CHARS = 128
MAX_CACHE_SALT_CHARS = 256
MAX_QUEUE_TIMEOUT_SECONDS = 315_576_000_000
"""The range of google.protobuf.Duration: 10,000 years, in seconds."""

MAX_LOGPROB_ENTRIES_PER_MESSAGE = 16_384
"""Log probabilities per response, alternatives included: at about 12 bytes each far below a client's 4 MiB limit."""

WorkRequest = pb.GenerateRequest | pb.EmbedRequest | pb.ClassifyRequest | pb.ScoreRequest
"""Requests of calls that take rows of a batch."""

REQUEST_ID = re.compile(rf"[A-Za-z0-9._:-]{{1,{MAX_REQUEST_ID_CHARS}}}")

AUDIO_TASKS = {
    pb.AUDIO_TASK_UNSPECIFIED: AudioTask.TRANSCRIBE,
    pb.AUDIO_TASK_TRANSCRIBE: AudioTask.TRANSCRIBE,
    pb.AUDIO_TASK_TRANSLATE: AudioTask.TRANSLATE,
}
_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: pb.FINISH_REASON_CANCELLED,
}


def generate_request(message: pb.GenerateRequest, info: ModelInfo, deadline: float | None) -> GenerateRequest:
    """The request as the engine takes it. It gets a random id if the client gave none.

    `deadline` is a `time.monotonic()` instant. Raises InvalidRequest, which names every bad field at once.
    """
    # First, since everything after it copies or walks the collections of the message.
    refuse_oversized(message, info)
    violations = [
        *id_violations(message),
        *_input_violations(message, info),
        *queue_timeout_violations(message),
        *_option_violations(message),
        *constraint_violations(message),
    ]
    sampling = sampling_params(message, info.default_sampling)
    want_text = message.output_options.text if message.output_options.HasField("text") else True
    if violations:
        raise InvalidRequest(violations)
    kind = message.WhichOneof("input")
    return GenerateRequest(
        request_id=message.request_id or uuid.uuid4().hex,
        text=message.text if kind == "text" else None,
        token_ids=tuple(message.token_ids.ids) if kind == "token_ids" else None,
        **(chat_fields(message.chat) if kind == "chat" else {}),
        sampling=sampling,
        audio=_audio(message.audio) if kind == "audio" else None,
        images=tuple(image.data for image in message.images),
        want_text=want_text,
        priority=message.priority,
        queue_timeout=seconds(message.queue_timeout) if message.HasField("queue_timeout") else None,
        deadline=deadline,
        cache_salt=message.cache_salt,
        adapter=message.adapter,
        constraint=read_constraint(message),
        speculative=message.speculative if message.HasField("speculative") else True,
    )


def _audio(given: pb.Audio) -> Audio:
    return Audio(given.data, given.language, AUDIO_TASKS[given.task])


def sampling_params(message: pb.GenerateRequest, defaults: SamplingParams) -> SamplingParams:
    """`defaults` with every field that the client set, in either spelling. Fields have the same names on both sides."""
    given: dict[str, Any] = {field.name: _plain(value) for field, value in message.sampling_params.ListFields()}
    options = message.output_options
    if options.HasField("logprobs"):
        given["logprobs"] = options.logprobs
    if options.HasField("top_logprobs"):
        given["top_logprobs"] = options.top_logprobs
    return dataclasses.replace(defaults, **given) if given else defaults


def _plain(value: Any) -> Any:
    """A scalar as it is, a repeated field as a tuple, a map as a dict."""
    if isinstance(value, bool | int | float | str):
        return value
    return dict(value) if hasattr(value, "items") else tuple(value)


def id_violations(message: WorkRequest) -> Iterator[FieldViolation]:
    """The violations of the request id, the cache salt and the adapter's name."""
    if message.request_id and not REQUEST_ID.fullmatch(message.request_id):
        yield FieldViolation("request_id", f"must be 1 to {MAX_REQUEST_ID_CHARS} characters of A-Z a-z 0-9 . _ : -")
    if len(message.cache_salt) > MAX_CACHE_SALT_CHARS:
        yield FieldViolation("cache_salt", f"must have at most {MAX_CACHE_SALT_CHARS} characters")
    if message.adapter and not ADAPTER_NAME.fullmatch(message.adapter):
        yield FieldViolation("adapter", "must be 1 to 128 characters of A-Z a-z 0-9 . _ : / -")


def _input_violations(message: pb.GenerateRequest, info: ModelInfo) -> Iterator[FieldViolation]:
    kind = message.WhichOneof("input")
    if kind is None:
        yield FieldViolation("input", "one of text, token_ids, chat or audio must be set")
    elif kind == "text" and not message.text:
        yield FieldViolation("text", "must not be empty")
    elif kind == "token_ids" and not message.token_ids.ids:
        yield FieldViolation("token_ids.ids", "must not be empty")
    elif kind == "chat":
        yield from chat_violations(message.chat, info)
    if kind is not None and info.takes_audio is not (kind == "audio"):
        yield FieldViolation(kind, HEARS if info.takes_audio else DEAF)
    elif kind == "audio" and message.audio.task not in AUDIO_TASKS:
        yield FieldViolation("audio.task", "is none of the tasks of this server")
    if message.images and kind in ("chat", "audio"):
        yield FieldViolation("images", "are for text and token_ids; those of a chat are in its messages")
    elif message.images and not info.takes_images:
        yield FieldViolation("images", BLIND)


def queue_timeout_violations(message: WorkRequest) -> Iterator[FieldViolation]:
    """The violation of the queue timeout, if there is one."""
    if not message.HasField("queue_timeout"):
        return
    seconds, nanos = message.queue_timeout.seconds, message.queue_timeout.nanos
    if not (0 <= nanos <= 999_999_999 and 0 <= seconds <= MAX_QUEUE_TIMEOUT_SECONDS and seconds + nanos > 0):
        yield FieldViolation("queue_timeout", "must be a valid duration above zero")


def _option_violations(message: pb.GenerateRequest) -> Iterator[FieldViolation]:
    """One option in two places is fine; two different values are not. Two options that cannot be combined are not."""
    options, sampling = message.output_options, message.sampling_params
    for name in ("logprobs", "top_logprobs"):
        if options.HasField(name) and sampling.HasField(name) and getattr(options, name) != getattr(sampling, name):
            yield FieldViolation(f"output_options.{name}", f"differs from sampling_params.{name}; set one of them")
    if message.resumable and sampling.HasField("prompt_logprobs"):
        yield FieldViolation("sampling_params.prompt_logprobs", "cannot be combined with resumable")
    if message.chat.parse_answer and message.resumable:
        yield FieldViolation("chat.parse_answer", "cannot be combined with resumable")
    if message.chat.parse_answer and message.output_options.HasField("text") and not message.output_options.text:
        yield FieldViolation("chat.parse_answer", "needs the text that output_options.text leaves out")


def seconds(duration: Duration) -> float:
    """A protobuf duration in seconds."""
    return duration.seconds + duration.nanos / 1e9


def duration(seconds: float) -> Duration | None:
    """`seconds` as a protobuf duration; None for a time that is not finite: the first token of an empty output."""
    if not math.isfinite(seconds):
        return None
    nanos = max(0, round(seconds * 1e9))
    return Duration(seconds=nanos // 1_000_000_000, nanos=nanos % 1_000_000_000)


class ResponseEncoder:
    """Turns the events of one request into responses, messages of the type `response`; `request_id` is the engine's.

    All deltas use one message, refilled: that takes 0.6 µs instead of 1.7 µs for a new one, once per token. So a
    response is valid only until the next call, which is enough for a writer that serialises before it awaits.
    """

    def __init__(self, request_id: str, want_text: bool = True, response: Any = pb.GenerateResponse) -> None:
        self.request_id = public_id(request_id)
        self._response = response
        # For stop strings the engine makes text also for a request without text, so it is left out here.
        self._want_text = want_text
        self._prompt_tokens = 0
        self._message = response(request_id=self.request_id)
        self._delta = self._message.delta
        self._delta.SetInParent()

    def encode(self, event: OutputEvent) -> Any:
        """The response for `event`; valid until the next call."""
        if type(event) is Delta:
            return self._refill(event) if event.position >= 0 else self._of_prompt(event)
        if isinstance(event, Finished):
            return self._response(request_id=self.request_id, finished=_finished(event))
        assert isinstance(event, Started)
        self._prompt_tokens = event.prompt_tokens
        started = pb.Started(
            prompt_tokens=event.prompt_tokens, incarnation=event.incarnation, weight_version=event.weight_version
        )
        return self._response(request_id=self.request_id, started=started)

    def _of_prompt(self, event: Delta) -> Any:
        told = pb.PromptLogprobs(
            position=self._prompt_tokens + event.position, logprobs=map(_token_logprob, event.logprobs)
        )
        return self._response(request_id=self.request_id, prompt_logprobs=told)

    def _refill(self, event: Delta) -> Any:
        delta = self._delta
        delta.index = event.index
        delta.position = event.position
        delta.text = event.text if self._want_text else ""
        ids = delta.token_ids
        del ids[:]
        ids.extend(event.token_ids)
        if event.logprobs or delta.logprobs:
            del delta.logprobs[:]
            delta.logprobs.extend(_token_logprob(entry) for entry in event.logprobs)
        if event.parts or delta.parts:
            del delta.parts[:]
            delta.parts.extend(map(answer_part, event.parts))
        return self._message


def split(event: OutputEvent) -> Sequence[OutputEvent]:
    """`event` in pieces that each fit a message. Only deltas with many log probabilities need more than one piece.

    The text goes with the last piece, so that it never runs ahead of its ids.
    """
    if type(event) is not Delta or len(event.logprobs) <= 1:
        return (event,)
    width = max(1 + len(entry.top) + len(entry.chosen) for entry in event.logprobs)
    size = max(1, MAX_LOGPROB_ENTRIES_PER_MESSAGE // width)
    if len(event.token_ids) <= size:
        return (event,)
    pieces = [
        Delta(event.index, event.position + at, event.token_ids[at : at + size], "", event.logprobs[at : at + size])
        for at in range(0, len(event.token_ids), size)
    ]
    return [*pieces[:-1], dataclasses.replace(pieces[-1], text=event.text, parts=event.parts)]


def _token_logprob(entry: TokenLogprob) -> pb.TokenLogprob:
    top = [pb.TopLogprob(token_id=token, logprob=value) for token, value in entry.top]
    return pb.TokenLogprob(
        token_id=entry.token_id, logprob=entry.logprob, top_logprobs=top, chosen_logprobs=entry.chosen
    )


def _finished(event: Finished) -> pb.Finished:
    usage, timing = event.usage, event.timing
    return pb.Finished(
        index=event.index,
        reason=_REASONS[event.reason],
        matched_stop=_matched_stop(event.matched_stop),
        usage=pb.Usage(
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            draft_tokens=usage.draft_tokens,
            accepted_draft_tokens=usage.accepted_draft_tokens,
        ),
        timing=pb.Timing(
            queue=duration(timing.queue),
            first_token=duration(timing.first_token),
            total=duration(timing.total),
        ),
        weight_version=event.weight_version,
    )


def _matched_stop(stop: str | int | None) -> pb.MatchedStop | None:
    if stop is None:
        return None
    return pb.MatchedStop(text=stop) if isinstance(stop, str) else pb.MatchedStop(token_id=stop)
