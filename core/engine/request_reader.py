"""Makes sequences of a request: its prompt, what constrains its outputs, and keys that another engine has computed."""

from __future__ import annotations

import uuid

from core.engine.disagg import Disagg
from core.engine.disk_cache import DiskCache
from core.engine.grammar.compiler import GrammarCompiler
from core.engine.input_processor import InputProcessor
from core.engine.pending_admissions import Arrivals
from core.errors import AdapterNotFound, DeadlinePassed, QueueTimeout
from core.text.answers.answer_reader import AnswerReader
from core.types.io import GenerateRequest
from core.types.request import Req


class RequestReader:
    """What a request needs before it can be queued. Belongs to the engine's loop, and works off it."""

    def __init__(
        self,
        inputs: InputProcessor,
        grammars: GrammarCompiler,
        arriving: Arrivals,
        disagg: Disagg,
        disk: DiskCache,
    ) -> None:
        """`arriving`: requests whose work can be ended from outside. `disk`: what may have prefixes in files."""
        self._inputs, self._grammars, self._arriving = inputs, grammars, arriving
        self._disagg, self._disk = disagg, disk

    def refuse_unservable(self, request: GenerateRequest) -> None:
        """Raises what can be said without reading the prompt: InvalidRequest, AdapterNotFound."""
        self._inputs.refuse_out_of_range(request.sampling)
        self._inputs.refuse_unconstrainable(request)
        self._inputs.adapters.slot(request.adapter)
        self._disagg.refuse_unservable(request)

    async def sequences(
        self, request: GenerateRequest, request_id: str, now: float, readers: list[AnswerReader]
    ) -> list[Req]:
        """One `Req` per output of `request`; `readers` are filled where its answers are read.

        `now`: `time.monotonic` seconds. Raises what `Engine.generate` lists, and what the request is ended with.
        """
        inputs = self._inputs
        read = inputs.prompt(request)
        waits = request.has_media
        prompt, media = await (self._arriving.wait(request_id, read, request.deadline) if waits else read)
        grammar, constraint = None, await inputs.answering.constraint(request, prompt)
        if constraint is not None:
            compiling = self._grammars.grammar(constraint, request.tenant)
            grammar = await self._arriving.wait(request_id, compiling, request.deadline)
        readers.extend(await inputs.answering.readers(request, prompt))
        reqs = inputs.sequences(request, request_id, uuid.uuid4().hex, prompt, now, grammar, media)
        adapter = inputs.adapters.digest(reqs[0].adapter_slot)
        self._disagg.keep(request, reqs[0], adapter)
        if request.take_over is not None:
            await self._fetched(request, request_id, now, reqs, adapter)
        elif self._disk.is_used:
            await self._arriving.wait(request_id, self._disk.fetch(reqs[0]), request.deadline)
            self._refuse_if_unloaded(request, reqs[0])
        return reqs

    def _refuse_if_unloaded(self, request: GenerateRequest, req: Req) -> None:
        # It may have been loaded again under its name.
        if self._inputs.adapters.slot(request.adapter) != req.adapter_slot:
            raise AdapterNotFound("the adapter was unloaded while the request waited for its keys")

    async def _fetched(
        self, request: GenerateRequest, request_id: str, now: float, reqs: list[Req], adapter: str
    ) -> None:
        """Wait for the keys of `reqs`, for as long as the request may wait. Raises what it is ended with."""
        longest = self._disagg.longest_wait(request)
        ends = [request.deadline, None if longest is None else now + longest]
        until = min((each for each in ends if each is not None), default=None)
        try:
            await self._arriving.wait(request_id, self._disagg.take(request, reqs[0], adapter), until)
            self._refuse_if_unloaded(request, reqs[0])
        except BaseException as error:
            self._disagg.drop(reqs)
            if isinstance(error, DeadlinePassed) and until != request.deadline:
                raise QueueTimeout("waited longer than queue_timeout for the keys of its prompt") from None
            raise
