"""One output of a Generate call on its way to a gateway: each piece when it is new, and all of it again at the end.

The token that ended an output is among the ids, as in SGLang and vLLM, whose dialects these are. Gateways hide its text
and count the ids that they get.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from core.types.io import Delta, Finished, FinishReason
from core.types.logprobs import TokenLogprobs
from service.gateway.dialect import Piece, Whole

REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.CANCELLED: "abort"}


class OutputSoFar:
    """Collects the events of output `index`. All ids are kept, because gateways want them again at the end.

    `chosen_ids`: those whose log probabilities come with each token. `prompt`: what is told of the prompt, all of which
    is there before the first token; None if nothing is.
    """

    def __init__(self, index: int, prompt_tokens: int, chosen_ids: Sequence[int] = (), prompt: Any = None) -> None:
        self._index = index
        self._prompt_tokens = prompt_tokens
        self._chosen_ids, self._prompt = chosen_ids, prompt
        self._ids: list[int] = []
        self._logprobs = TokenLogprobs()

    def add(self, delta: Delta) -> Piece:
        """Keep `delta`, and return the piece to send now."""
        prompt = self._prompt if not self._ids else None
        self._ids += delta.token_ids
        self._logprobs.extend(delta.logprobs)
        count = len(self._ids)
        return Piece(self._index, delta.token_ids, delta.logprobs, self._prompt_tokens, count, self._chosen_ids, prompt)

    def finish(self, finished: Finished) -> Whole:
        """The whole output."""
        reason = REASONS[finished.reason]
        told = (reason, finished.usage, finished.matched_stop, self._chosen_ids, self._prompt, finished.handed)
        return Whole(self._index, self._ids, self._logprobs, *told)
