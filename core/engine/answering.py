"""What a request asks of its answer: that it be read, that it call tools. Made off the loop, behind the prompt."""

from __future__ import annotations

import json

from core.engine.workers import Workers
from core.errors import InvalidRequest
from core.text.answers.answer_form import AnswerForm
from core.text.answers.answer_reader import PROMPT_TOKENS, AnswerReader
from core.text.answers.call_grammar import forced_calls
from core.text.failures import TextFailures
from core.text.tokenizer import Tokenizer
from core.types.arrays import Ints
from core.types.chat import UNKNOWN_FORM, ToolMode
from core.types.constraint import Constraint
from core.types.io import GenerateRequest

LONG_CHARS = 32_768
"""More characters of tools keep a thread busy for milliseconds. They never take all threads at once."""


class Answering:
    """Reads and requires what the model writes in `form`; None if that is not known."""

    def __init__(self, form: AnswerForm | None, tokenizer: Tokenizer, workers: Workers, failures: TextFailures) -> None:
        self._form = form
        self._tokenizer = tokenizer
        self._workers = workers
        self._failures = failures

    @property
    def name(self) -> str:
        """The name of the form; empty if it is not known."""
        return "" if self._form is None else self._form.name

    async def readers(self, request: GenerateRequest, prompt: Ints) -> list[AnswerReader]:
        """One reader for each output of `prompt`, int64[n]; none if its answer is not to be read.

        Raises InvalidRequest, field `chat.parse_answer`, if it is not known how the model writes.
        """
        form, texts = self._form, request.offered_tools
        if not request.parse_answer:
            return []
        if form is None:
            raise InvalidRequest.of("chat.parse_answer", UNKNOWN_FORM)

        def made() -> list[AnswerReader]:
            tools, begun = [json.loads(text) for text in texts], self._end_of(prompt)
            return [AnswerReader(form, begun, tools) for _ in range(request.sampling.n)]

        with self._failures.told():
            return await self._workers.run(made, caller=request.tenant, long=sum(map(len, texts)) > LONG_CHARS)

    async def constraint(self, request: GenerateRequest, prompt: Ints) -> Constraint | None:
        """What outputs for `prompt`, int64[n], must match: the request's own constraint, or the calls that it requires.

        Raises InvalidRequest, field `chat.tool_choice` or `chat.tools`, where calls cannot be required.
        """
        if request.tool_mode is not ToolMode.REQUIRED:
            return request.constraint
        form, texts = self._form, request.chat_tools
        if form is None:
            raise InvalidRequest.of("chat.tool_choice", UNKNOWN_FORM)

        def made() -> Constraint:
            tools = [json.loads(text) for text in texts]
            return forced_calls(form.name, tools, request.tool_name, self._end_of(prompt))

        with self._failures.told():
            return await self._workers.run(made, caller=request.tenant, long=sum(map(len, texts)) > LONG_CHARS)

    def _end_of(self, prompt: Ints) -> str:
        return self._tokenizer.decode(prompt[-PROMPT_TOKENS:].tolist(), skip_special_tokens=False)
