"""Turns a client's request into sequences for the scheduler: ids, limits, seeds. Every refusal names its field."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from core.engine.adapters.table import AdapterTable
from core.engine.answering import Answering
from core.engine.audio_inputs import AudioInputs
from core.engine.encoder_input import EncoderInput
from core.engine.image_inputs import ImageInputs
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
from core.types.io import GenerateRequest, TextPair
from core.types.media import NO_MEDIA, PromptMedia
from core.types.request import Req
from core.types.sampling_params import SamplingParams

LONG_CHARS, LONG_IDS = 32_768, 16_384
"""Longer texts, and more ids, keep a thread busy for 10 ms and more. They never take all threads at once."""

CHARS_PER_TOKEN = 64
"""No tokenizer packs more characters into one token on average. Longer prompts are refused before tokenising."""


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
        self._memory = memory
        self._vocab_size = vocab_size
        self._context_length = context_length
        self.adapters = AdapterTable() if adapters is None else adapters
        self._encoder = encoder
        self._max_input = max_input or (context_length - 1 if encoder is None else encoder.max_tokens)
        self._random = random.Random(seed)
        self.images = ImageInputs() if images is None else images
        self.audio = AudioInputs() if audio is None else audio
        self._workers = Workers(2, "slipstream-text")
        self.answering = Answering(answers, tokenizer, self._workers, self.failures)
        # Chats have threads of their own: a template that takes long must not hold up texts.
        self._chats = Workers(PROCESSES, "slipstream-chat")

    def refuse_out_of_range(self, params: SamplingParams) -> None:
        """Raises InvalidRequest naming every field of `sampling_params` that no prompt could make servable."""
        violations = params.violations(self._vocab_size)
        if violations:
            raise InvalidRequest(violations)

    @property
    def max_input(self) -> int:
        """Tokens of the longest prompt."""
        return self._max_input

    async def prompt(self, request: GenerateRequest) -> tuple[Ints, PromptMedia]:
        """What `prompt_ids` returns, and what comes with it. Of a sound the ids are those of the decoder.

        Raises the same, and what `ImageInputs.read` and `AudioInputs` do.
        """
        self.audio.refuse_others(request, _prompt_field(request))
        if request.audio is not None:
            prompt, features = await self.audio.heard(request.audio, request.tenant)
            if not self._memory.fits_alone(len(prompt), self._max_input):
                raise InvalidRequest.of("audio", "takes more memory than the server has for the encoder")
            return prompt, PromptMedia(features=features)
        images = await self.images.read(request)
        ids = await self.prompt_ids(request, images)
        return ids, PromptMedia(self.images.placed(ids, images, _image_field(request)))

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
            self._refuse_long(said + len(request.chat_arguments), field)
            ids = await self._chat_ids(request, request.chat, images)
        else:
            ids = await self.tokenize(self.images.expanded(request.text or "", images, "images"), caller=request.tenant)
        prompt = np.asarray(ids, np.int64)
        if request.token_ids is not None:
            self._refuse_foreign_ids(field, prompt)
        self._refuse_unservable(field, prompt)
        if self._encoder is not None and not self._memory.fits_alone(1, len(prompt)):
            raise InvalidRequest.of(field, f"has {len(prompt)} tokens, more than the server can hold for the encoder")
        return prompt

    async def cut_ids(self, text: str, part: tuple[int, int] | None = None, caller: str = "") -> Ints:
        """As `prompt_ids` of a text, but without what is too long at the end of it, or of characters `part`."""
        if part is None:
            text = text[: self._most_chars]
        else:
            start, end = part[0], min(part[1], part[0] + self._most_chars)
            self._refuse_long(len(text) - (part[1] - part[0]), "text")
            text, part = text[:end] + text[part[1] :], (start, end)
        encode, long = self.tokenizer.encode_within, len(text) > LONG_CHARS
        with self.failures.told():
            ids = await self._workers.run(encode, text, self._max_input, part, caller=caller, long=long)
        prompt = np.asarray(ids, np.int64)
        self._refuse_unservable("text", prompt)
        return prompt

    async def pair_ids(self, pair: TextPair, types: int, caller: str = "", *, cut: bool = False) -> Ints:
        """Ids of the two texts as the tokenizer joins them, int64[n] with n >= 1, made off the loop.

        `types`: of tokens that the model tells apart. Those of type t are told as id + t * vocabulary. `cut`: the
        second text loses what is too long. Raises as `prompt_ids`, naming `pair`.
        """
        if cut:
            self._refuse_long(len(pair.first), "pair")
            pair = TextPair(pair.first, pair.second[: self._most_chars])
        chars = len(pair.first) + len(pair.second)
        if not cut:
            self._refuse_long(chars, "pair")
        encode, limit = self.tokenizer.encode_pair, self._max_input if cut else None
        with self.failures.told():
            ids, kinds = await self._workers.run(
                encode, pair.first, pair.second, limit, caller=caller, long=chars > LONG_CHARS
            )
        prompt = np.asarray(ids, np.int64)
        self._refuse_unservable("pair", prompt)
        return prompt if types == 1 else prompt + np.minimum(kinds, types - 1) * self._vocab_size

    async def tokenize(self, text: str, *, add_special_tokens: bool = True, caller: str = "") -> list[int]:
        """Ids of `text`, made off the loop.

        Raises InvalidRequest when it is longer than any context could hold or cannot be encoded, and TextFailed when
        the tokenizer fails.
        """
        self._refuse_long(len(text), "text")
        return await self._encode(text, add_special_tokens, caller)

    async def detokenize(self, ids: Sequence[int], skip_special_tokens: bool, caller: str = "") -> str:
        """Text of `ids`, made off the loop.

        Raises InvalidRequest for ids outside the vocabulary, and TextFailed when the tokenizer fails.
        """
        self._refuse_foreign_ids("token_ids", np.asarray(ids, np.int64))
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
        violations = params.violations(self._vocab_size)
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

    def _refuse_foreign_ids(self, field: str, ids: Ints) -> None:
        bad = self._foreign(ids)
        if len(bad):
            raise InvalidRequest.of(f"{field}[{bad[0]}]", f"must be between 0 and {self._vocab_size - 1}")

    def _refuse_foreign_tokenisation(self, field: str, ids: Ints) -> None:
        """Raises InvalidRequest for an id without a logit: a tokenizer may know more tokens than the model has."""
        bad = self._foreign(ids)
        if bad.size:
            text = f"its tokenisation has token {ids[bad[0]]}, for which the model has no logits"
            raise InvalidRequest.of(field, f"{text}: they are for tokens 0 to {self._vocab_size - 1}")

    def _refuse_unservable(self, field: str, prompt: Ints) -> None:
        if len(prompt) == 0:
            raise InvalidRequest.of(field, "must not be empty")
        self._refuse_foreign_tokenisation(field, prompt)
        if len(prompt) > self._max_input:
            raise InvalidRequest.of(field, f"has {len(prompt)} tokens, but the model takes at most {self._max_input}")

    def _foreign(self, ids: Ints) -> Ints:
        """int64[m]: the places in `ids` of ids that have no logit."""
        return np.flatnonzero((ids < 0) | (ids >= self._vocab_size))

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

    @property
    def _most_chars(self) -> int:
        return (self._max_input + 1) * CHARS_PER_TOKEN

    async def _chat_ids(
        self, request: GenerateRequest, chat: Sequence[ChatMessage], images: Sequence[ReadImage]
    ) -> list[int]:
        caller, given = request.tenant, (chat, request.offered_tools, request.chat_arguments)
        render = self._as_they_are if request.special_tokens else self.tokenizer.render_literally
        with self.failures.told():
            rendered, mark = await self._chats.run(render, *given, caller=caller)
        rendered = self.images.expanded(rendered, images, "chat.messages")
        # A mark may double what was written.
        self._refuse_long(len(rendered) - rendered.count(mark) if mark else len(rendered), "chat.messages")
        with self.failures.told():
            encode, long = self.tokenizer.encode_rendered, len(rendered) > LONG_CHARS
            return await self._workers.run(encode, rendered, mark, caller=caller, long=long)

    def _as_they_are(self, *given: Any) -> tuple[str, str]:
        return self.tokenizer.render_chat(*given), ""

    def _refuse_long(self, chars: int, field: str) -> None:
        if chars > self._most_chars:
            raise InvalidRequest.of(field, f"must have at most {self._most_chars} characters")

    async def _encode(self, text: str, add_special_tokens: bool, caller: str) -> list[int]:
        long = len(text) > LONG_CHARS
        with self.failures.told():
            return await self._workers.run(self.tokenizer.encode, text, add_special_tokens, caller=caller, long=long)
