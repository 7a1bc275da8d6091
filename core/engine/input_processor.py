"""Turns a client's request into sequences for the scheduler: ids, limits, seeds. Every refusal names its field."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from core.engine.adapters.table import AdapterTable
from core.engine.answering import Answering
from core.engine.audio_inputs import AudioInputs
from core.engine.encoder_input import EncoderInput
from core.engine.encodings import LONG_CHARS, Encodings
from core.engine.image_inputs import ImageInputs
from core.engine.off_loop import guarded
from core.engine.prompt_bounds import PromptBounds
from core.engine.workers import Workers
from core.errors import FieldViolation, InvalidRequest
from core.memory.request_memory import RequestMemory
from core.sampling.uniform import derive_seed
from core.text.answers.answer_form import AnswerForm
from core.text.chat_renderer import PROCESSES
from core.text.failures import TextFailures
from core.text.tokenizer import Tokenizer
from core.types.arrays import Ints
from core.types.chat import ChatMessage, ToolMode
from core.types.constraint import conflicts
from core.types.grammar import Grammar
from core.types.image import ReadImage
from core.types.io import GenerateRequest
from core.types.media import NO_MEDIA, PromptMedia
from core.types.request import Req
from core.types.sampling_params import SamplingParams
from core.types.stats import EngineStats

LONG_IDS: Final = 16_384
"""More ids keep a thread busy for 10 ms and more. They never take all threads at once."""


def _prompt_field(request: GenerateRequest) -> str:
    """The field in which the client sent its prompt."""
    if request.audio is not None:
        return "audio"
    if request.token_ids is not None:
        return "token_ids.ids"
    return "text" if request.chat is None else "chat.messages"


def _image_field(request: GenerateRequest) -> str:
    """What is named where images do not fit their prompt."""
    return "images" if request.chat is None else "chat.messages"


@dataclass(slots=True)
class InputCounts:
    """What became of inputs so far, under the names that `EngineStats` has for it."""

    chats: int = 0
    chat_refusals: int = 0
    images: int = 0
    image_tokens: int = 0
    sounds: int = 0


class InputProcessor:
    """Tokenises off the loop, and checks everything that could reach a batch. Event-loop thread only."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        memory: RequestMemory,
        vocab_size: int,
        context_length: int,
        seed: int | None,
        adapters: AdapterTable | None = None,
        encoder: EncoderInput | None = None,
        max_input: int | None = None,
        answers: AnswerForm | None = None,
        images: ImageInputs | None = None,
        audio: AudioInputs | None = None,
    ) -> None:
        """`context_length`: tokens. `max_input`: of a prompt; None leaves room for one token of output.

        `answers`: how the model writes them, if that is known. `images`, `audio`: None for a model that
        takes none.

        `seed`: of the generator that seeds requests without a seed of their own; None is a random one.
        """
        self.tokenizer = tokenizer
        self.failures = TextFailures()
        self._counts = InputCounts()
        self._memory = memory
        self._context_length = context_length
        self.adapters = AdapterTable() if adapters is None else adapters
        self._encoder = encoder
        longest = max_input or (context_length - 1 if encoder is None else encoder.max_tokens)
        self.bounds = PromptBounds(vocab_size, longest)
        self._random = random.Random(seed)
        self.images = ImageInputs() if images is None else images
        self.audio = AudioInputs() if audio is None else audio
        self._workers = Workers(2, "slipstream-text")
        self.encodings = Encodings(tokenizer, self.bounds, self._workers, self.failures)
        self.answering = Answering(answers, tokenizer, self._workers, self.failures)
        # Chats have threads of their own: a template that takes long must not hold up texts.
        self._chats = Workers(PROCESSES, "slipstream-chat")

    def counted(self, stats: EngineStats) -> EngineStats:
        """`stats` with what became of inputs."""
        return dataclasses.replace(stats, text_failures=self.failures.count, **dataclasses.asdict(self._counts))

    def refuse_out_of_range(self, params: SamplingParams) -> None:
        """Raises InvalidRequest naming every field of `sampling_params` that no prompt could make servable."""
        violations = params.violations(self.bounds.vocab_size)
        if violations:
            raise InvalidRequest(violations)

    async def prompt(self, request: GenerateRequest) -> tuple[Ints, PromptMedia]:
        """What `prompt_ids` returns, and what comes with it. Of a sound the ids are those of the decoder.

        Raises the same, and what `ImageInputs.read` and `AudioInputs` do.
        """
        self.audio.refuse_others(request, _prompt_field(request))
        if request.audio is not None:
            prompt, features = await self.audio.heard(request.audio, request.tenant)
            if not self._memory.fits_alone(len(prompt), self.bounds.max_input):
                raise InvalidRequest.of("audio", "takes more memory than the server has for the encoder")
            self._counts.sounds += 1
            return prompt, PromptMedia(features=features)
        images = await self.images.read(request)
        ids = await self.prompt_ids(request, images)
        placed = self.images.placed(ids, images, _image_field(request))
        self._counts.images += len(images)
        self._counts.image_tokens += sum(image.pieces for image in images)
        return ids, PromptMedia(placed)

    async def prompt_ids(self, request: GenerateRequest, images: Sequence[ReadImage] = ()) -> Ints:
        """Ids of the prompt, int64[n] with n >= 1, made off the loop. `images`: those of the request.

        Raises InvalidRequest naming `text`, `token_ids.ids`, `chat` or `chat.messages`; TextFailed when the tokenizer
        fails; for a chat also Overloaded and RequestFailed, when there is no core or no process to render it.
        """
        ids: Sequence[int]
        field = _prompt_field(request)
        if request.token_ids is not None:
            ids = request.token_ids
        elif request.chat is not None:
            said = sum(turn.chars for turn in request.chat) + sum(map(len, request.chat_tools))
            self.bounds.refuse_long(said + len(request.chat_arguments), field)
            ids = await self._chat_ids(request, request.chat, images)
        else:
            ids = await self.tokenize(self.images.expanded(request.text or "", images, "images"), caller=request.tenant)
        prompt = np.asarray(ids, np.int64)
        if request.token_ids is not None:
            self.bounds.refuse_foreign_ids(field, prompt)
        self.bounds.refuse_unservable(field, prompt)
        if self._encoder is not None and not self._memory.fits_alone(1, len(prompt)):
            raise InvalidRequest.of(field, f"has {len(prompt)} tokens, more than the server can hold for the encoder")
        return prompt

    async def tokenize(self, text: str, *, add_special_tokens: bool = True, caller: str = "") -> list[int]:
        """Ids of `text`, made off the loop unless that would take longer.

        Raises InvalidRequest when it is longer than any context could hold or cannot be encoded, and TextFailed when
        the tokenizer fails.
        """
        self.bounds.refuse_long(len(text), "text")
        return await self._encode(text, add_special_tokens, caller)

    async def detokenize(self, ids: Sequence[int], skip_special_tokens: bool, caller: str = "") -> str:
        """Text of `ids`, made off the loop.

        Raises InvalidRequest for ids outside the vocabulary, and TextFailed when the tokenizer fails.
        """
        self.bounds.refuse_foreign_ids("token_ids", np.asarray(ids, np.int64))
        long = len(ids) > LONG_IDS
        with self.failures.told():
            return await self._workers.run(
                self.tokenizer.decode, list(ids), skip_special_tokens, caller=caller, long=long
            )

    def refuse_unconstrainable(self, request: GenerateRequest) -> None:
        """Raises InvalidRequest naming what is wrong with the constraint, if there is one, and what contradicts it."""
        if request.constraint is None and request.tool_mode is not ToolMode.REQUIRED:
            return
        own = [] if request.constraint is None else request.constraint.violations()
        violations = [*own, *conflicts(request.sampling)]
        if self._encoder is not None and (self._encoder.spec.forced_first or self._encoder.spec.forced_last):
            violations.append(FieldViolation("constraint", "the served model forces tokens of its own"))
        if violations:
            raise InvalidRequest(violations)

    def sequences(
        self,
        request: GenerateRequest,
        request_id: str,
        group: str,
        prompt: Ints,
        now: float,
        grammar: Grammar | None = None,
        media: PromptMedia = NO_MEDIA,
    ) -> list[Req]:
        """One `Req` per output of `prompt`, int64[n], which `media` came with.

        `group`: an id for all outputs of the request, which share their prompt. `now`: `time.monotonic` seconds. Raises
        AdapterNotFound, and InvalidRequest naming every field of `sampling_params` that cannot be served.
        """
        params = request.sampling
        sides = {"prompt": prompt} if self._encoder is None else self._encoder.sides(prompt, media.features)
        violations = params.violations(self.bounds.vocab_size)
        if params.prompt_logprobs is not None and self._encoder is not None:
            told = "the prompt of an encoder-decoder is read by its encoder, which predicts nothing"
            violations.append(FieldViolation("sampling_params.prompt_logprobs", told))
        max_new = self._max_new_tokens(request, len(sides["prompt"]), violations)
        if violations:
            raise InvalidRequest(violations)
        seed = params.seed if params.seed is not None else self._random.getrandbits(63)
        slot = self.adapters.slot(request.adapter)
        own = self.adapters.salt(slot, request.cache_salt)
        salt = self._memory.cache.namespace(own, group if params.n > 1 else None)
        return [
            Req(
                request_id=request_id,
                index=index,
                params=params,
                seed=derive_seed(seed, index),
                max_new_tokens=max_new,
                salt=salt,
                adapter_slot=slot,
                grammar=grammar,
                tenant=request.tenant,
                weight=request.weight,
                priority=request.priority,
                deadline=request.deadline,
                queue_deadline=None if request.queue_timeout is None else now + request.queue_timeout,
                arrived_at=now,
                speculative=request.speculative,
                images=media.images,
                **sides,
            )
            for index in range(params.n)
        ]

    def close(self) -> None:
        """End the worker threads without waiting for queued work, and end chat templates that are still at work."""
        self._workers.close()
        self._chats.close()
        self.images.close()
        self.audio.close()
        if self.tokenizer.chats is not None:
            self.tokenizer.chats.close()

    def _max_new_tokens(self, request: GenerateRequest, prompt_len: int, violations: list[FieldViolation]) -> int:
        """The output's limit in tokens. One that the client asks for must fit, else it is added to `violations`.

        Without one the output may take what fits.
        """
        pool_tokens = self._memory.allocator.num_pages * self._memory.page_size
        # The last token is sampled but never stored, hence the + 1.
        room = min(self._context_length - prompt_len, pool_tokens - prompt_len + 1)
        if room < 1:
            violations.append(
                FieldViolation(_prompt_field(request), f"has {prompt_len} tokens, more than the server can hold")
            )
            return 1
        asked = request.sampling.max_tokens
        if asked is None:
            return room
        if asked > room:
            text = f"prompt ({prompt_len}) plus max_tokens ({asked}) exceeds the limit of {prompt_len + room} tokens"
            violations.append(FieldViolation("sampling_params.max_tokens", text))
        elif not self._memory.fits_alone(prompt_len + asked - 1):
            violations.append(FieldViolation("sampling_params.max_tokens", "more than the server can hold"))
        return asked

    async def _chat_ids(
        self, request: GenerateRequest, chat: Sequence[ChatMessage], images: Sequence[ReadImage]
    ) -> list[int]:
        caller, given = request.tenant, (chat, request.offered_tools, request.chat_arguments)
        render = self._as_they_are if request.special_tokens else self.tokenizer.render_literally
        with self.failures.told(), self._counting_chats():
            rendered, mark = await self._chats.run(render, *given, caller=caller)
        rendered = self.images.expanded(rendered, images, "chat.messages")
        # A mark may double what was written.
        self.bounds.refuse_long(len(rendered) - rendered.count(mark) if mark else len(rendered), "chat.messages")
        with self.failures.told():
            encode, long = self.tokenizer.encode_rendered, len(rendered) > LONG_CHARS
            return await self._workers.run(encode, rendered, mark, caller=caller, long=long)

    @contextmanager
    def _counting_chats(self) -> Iterator[None]:
        try:
            yield
        except InvalidRequest:
            self._counts.chat_refusals += 1
            raise
        self._counts.chats += 1

    def _as_they_are(self, *given: Any) -> tuple[str, str]:
        return self.tokenizer.render_chat(*given), ""

    async def _encode(self, text: str, add_special_tokens: bool, caller: str) -> list[int]:
        long = len(text) > LONG_CHARS
        with self.failures.told():
            if self.tokenizer.is_quick(len(text)):
                return guarded(self.tokenizer.encode, text, add_special_tokens)
            return await self._workers.run(self.tokenizer.encode, text, add_special_tokens, caller=caller, long=long)
