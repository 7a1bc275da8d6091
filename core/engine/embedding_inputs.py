"""Turns the inputs of an `EmbedRequest` into sequences for the scheduler. Every refusal names its field."""

from __future__ import annotations

from typing import Any

import numpy as np

from core.engine.encodings import Encoding, Outcome, attempted
from core.engine.input_processor import InputProcessor
from core.engine.labelling import Labelling, next_tokens
from core.errors import FieldViolation, InvalidRequest
from core.memory.request_memory import RequestMemory
from core.types.arrays import Ints
from core.types.io import EmbedRequest, Input, Pooling, TextPair
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
        prompts = await self._prompts(request)
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

    async def _prompts(self, request: EmbedRequest) -> list[Ints]:
        """Ids of every input, int64[n] with n >= 1. Raises InvalidRequest naming every one that cannot be served."""
        found: list[Encoding | Outcome] = [attempted(self._begun, given, request) for given in request.inputs]
        places = [place for place, each in enumerate(found) if isinstance(each, Encoding)]
        encodings = [each for each in found if isinstance(each, Encoding)]
        done = await self._inputs.encodings.done(encodings, request.tenant)
        for place, outcome in zip(places, done, strict=True):
            found[place] = outcome
        prompts: list[Outcome] = [
            attempted(self._held, given, each, request) for given, each in zip(request.inputs, found, strict=True)
        ]
        violations = [
            FieldViolation(f"inputs[{place}].{_field_of(given, violation)}", violation.description)
            for place, (given, each) in enumerate(zip(request.inputs, prompts, strict=True))
            if isinstance(each, InvalidRequest)
            for violation in each.violations
        ]
        if violations:
            raise InvalidRequest(violations)
        return [each for each in prompts if not isinstance(each, InvalidRequest)]

    def _begun(self, given: Input, request: EmbedRequest) -> Encoding | Ints:
        """What makes the ids of a text, and those of ids. Raises InvalidRequest."""
        if isinstance(given, TextPair):
            return self._pair(given, request)
        if isinstance(given, str):
            texts = self._inputs.encodings
            return texts.cut(given) if request.truncate else texts.whole(given)
        bounds = self._inputs.bounds
        ids = np.asarray(given, np.int64)
        # Those that are cut off too: a fault of the client must not depend on a length.
        bounds.refuse_foreign_ids("token_ids.ids", ids)
        ids = ids[: bounds.max_input] if request.truncate else ids
        bounds.refuse_unservable("token_ids.ids", ids)
        return ids

    def _pair(self, pair: TextPair, request: EmbedRequest) -> Encoding:
        assert self.labelling is not None, "refuse_unservable() comes first"
        texts = self._inputs.encodings
        if not self.labelling.template:
            return texts.pair(pair, self._token_types, cut=request.truncate)
        text, part = self.labelling.filled(pair)
        return texts.cut(text, part) if request.truncate else texts.whole(text, part)

    def _held(self, given: Input, found: Outcome, request: EmbedRequest) -> Ints:
        """The ids of an input as they are computed. Raises InvalidRequest, also the one that `found` is."""
        field = "text" if isinstance(given, str) else "token_ids.ids"
        if isinstance(found, InvalidRequest):
            raise found
        if request.pooling is Pooling.LABELS:
            found = self._without_padding(found)
        if not self._memory.fits_alone(len(found)):
            raise InvalidRequest.of(field, f"has {len(found)} tokens, more than the server can hold")
        return found

    def _without_padding(self, prompt: Ints) -> Ints:
        pad = None if self.labelling is None else self.labelling.pad_token_id
        if pad is None:
            return prompt
        others = np.flatnonzero(prompt != pad)
        return prompt[: int(others[-1]) + 1] if len(others) else prompt[:1]


def _field_of(given: Input, violation: FieldViolation) -> str:
    """Where the client sent what is wrong with `given`: a pair that a template fills is read as one text."""
    return "pair" if isinstance(given, TextPair) and not violation.field.startswith("pair") else violation.field
