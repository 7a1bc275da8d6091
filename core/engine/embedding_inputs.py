"""Turns the inputs of an `EmbedRequest` into sequences for the scheduler. Every refusal names its field."""

from __future__ import annotations

from typing import Any

import numpy as np

from core.engine.input_processor import InputProcessor
from core.engine.labelling import Labelling, next_tokens
from core.errors import FieldViolation, InvalidRequest
from core.memory.request_memory import RequestMemory
from core.types.arrays import Ints
from core.types.io import EmbedRequest, GenerateRequest, Input, Pooling, TextPair
from core.types.request import Req
from core.types.sampling_params import SamplingParams


class EmbeddingInputs:
    """Checks requests for vectors and labels, and makes their sequences. Event-loop thread only."""

    def __init__(
        self,
        inputs: InputProcessor,
        memory: RequestMemory,
        hidden_size: int,
        labelling: Labelling | None = None,
        token_types: int = 1,
        whole_prompts: bool = False,
    ) -> None:
        """`hidden_size`: 0 if the model has no hidden states to embed with. `labelling`: None if it judges nothing.

        `token_types`, `whole_prompts`: of `ModelSpec`.
        """
        self._inputs, self._memory = inputs, memory
        self._hidden_size, self._token_types, self._whole = hidden_size, token_types, whole_prompts
        self.labelling = labelling

    def by_tokens(self, request: EmbedRequest) -> bool:
        """Whether the inputs are judged by the token that comes next, which is a generation."""
        return request.pooling is Pooling.LABELS and self.labelling is not None and self.labelling.head is None

    def refuse_unservable(self, request: EmbedRequest) -> None:
        """Raises InvalidRequest naming a field that cannot be served whatever the inputs are, and AdapterNotFound."""
        if not request.inputs:
            raise InvalidRequest.of("inputs", "must not be empty")
        if request.pooling is Pooling.LABELS:
            if self.labelling is None:
                raise InvalidRequest.of("pooling", "the served model has no labels to judge by")
        elif not self._hidden_size:
            raise InvalidRequest.of("pooling", "the served model gives no hidden states to embed with")
        elif any(isinstance(given, TextPair) for given in request.inputs):
            raise InvalidRequest.of("inputs", "pairs are judged, not embedded")
        if request.dimensions is not None and not 1 <= request.dimensions <= self._hidden_size:
            raise InvalidRequest.of("dimensions", f"must be between 1 and {self._hidden_size}")
        self._inputs.adapters.slot(request.adapter)

    def sizes(self, request: EmbedRequest) -> tuple[int, int | None]:
        """(size of the hidden states, how many labels the inputs are judged by; None for embeddings)."""
        judged = request.pooling is Pooling.LABELS and self.labelling is not None
        return self._hidden_size, len(self.labelling.labels.names) if judged and self.labelling else None

    async def sequences(self, request: EmbedRequest, request_id: str, now: float) -> list[Req]:
        """One `Req` per input. Raises AdapterNotFound, and InvalidRequest naming every input that cannot be served.

        `now`: `time.monotonic` seconds.
        """
        prompts: list[Ints] = []
        violations: list[FieldViolation] = []
        for index, given in enumerate(request.inputs):
            try:
                prompts.append(await self._ids(given, request))
            except InvalidRequest as refused:
                violations += [FieldViolation(f"inputs[{index}].{v.field}", v.description) for v in refused.violations]
        if violations:
            raise InvalidRequest(violations)
        adapters = self._inputs.adapters
        slot = adapters.slot(request.adapter)
        own = adapters.salt(slot, request.cache_salt)
        ways = self._ways(request)
        return [
            Req(
                request_id=request_id,
                index=index,
                prompt=prompt,
                seed=0,
                salt=self._memory.cache.namespace(own, None),
                adapter_slot=slot,
                tenant=request.tenant,
                weight=request.weight,
                priority=request.priority,
                deadline=request.deadline,
                queue_deadline=None if request.queue_timeout is None else now + request.queue_timeout,
                arrived_at=now,
                **ways,
            )
            for index, prompt in enumerate(prompts)
        ]

    def _ways(self, request: EmbedRequest) -> dict[str, Any]:
        """Fields of a `Req` that say what becomes of its prompt."""
        if self.by_tokens(request):
            assert self.labelling is not None, "there are tokens"
            return {"params": next_tokens(self.labelling), "max_new_tokens": 1, "speculative": False}
        greedy = SamplingParams(temperature=0.0)
        return {"params": greedy, "max_new_tokens": 0, "pooling": request.pooling, "whole": self._whole}

    async def _ids(self, given: Input, request: EmbedRequest) -> Ints:
        """Ids of one input, int64[n] with n >= 1. Raises InvalidRequest naming `text`, `token_ids.ids` or `pair`."""
        if isinstance(given, TextPair):
            field, prompt = "pair", await self._pair_ids(given, request)
        else:
            field = "text" if isinstance(given, str) else "token_ids.ids"
            prompt = await self._text_ids(given, request)
        if request.pooling is Pooling.LABELS:
            prompt = self._without_padding(prompt)
        if not self._memory.fits_alone(len(prompt)):
            raise InvalidRequest.of(field, f"has {len(prompt)} tokens, more than the server can hold")
        return prompt

    async def _text_ids(self, given: str | tuple[int, ...], request: EmbedRequest) -> Ints:
        caller = request.tenant
        if isinstance(given, str):
            if request.truncate:
                return await self._inputs.cut_ids(given, caller=caller)
            return await self._inputs.prompt_ids(GenerateRequest(text=given, tenant=caller))
        listed = given[: self._inputs.max_input] if request.truncate else given
        return await self._inputs.prompt_ids(GenerateRequest(token_ids=listed, tenant=caller))

    async def _pair_ids(self, pair: TextPair, request: EmbedRequest) -> Ints:
        assert self.labelling is not None, "refuse_unservable() comes first"
        caller = request.tenant
        try:
            if not self.labelling.template:
                return await self._inputs.pair_ids(pair, self._token_types, caller, cut=request.truncate)
            text, part = self.labelling.filled(pair)
            if request.truncate:
                return await self._inputs.cut_ids(text, part, caller)
            return await self._inputs.prompt_ids(GenerateRequest(text=text, tenant=caller))
        except InvalidRequest as refused:
            raise InvalidRequest([FieldViolation("pair", v.description) for v in refused.violations]) from None

    def _without_padding(self, prompt: Ints) -> Ints:
        pad = None if self.labelling is None else self.labelling.pad_token_id
        if pad is None:
            return prompt
        others = np.flatnonzero(prompt != pad)
        return prompt[: int(others[-1]) + 1] if len(others) else prompt[:1]
