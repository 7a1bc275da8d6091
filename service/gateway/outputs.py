"""One output of a Generate call on its way to a gateway: what is sent now, and all of it once more at the end.

The token that ended an output is among the ids, as it is in the engines whose dialects these are: gateways hide its
text, and count what they get.
"""

from __future__ import annotations

from core.types.io import Delta, Finished, FinishReason
from core.types.logprobs import TokenLogprobs
from service.gateway.dialect import Piece, Whole

REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.CANCELLED: "abort"}


class OutputSoFar:
    """Collects the events of output `index`; everything is kept, for gateways want all ids again at the end."""

    def __init__(self, index: int, prompt_tokens: int) -> None:
        self._index = index
        self._prompt_tokens = prompt_tokens
        self._ids: list[int] = []
        self._logprobs = TokenLogprobs()

    def add(self, delta: Delta) -> Piece:
        """What to send of `delta`."""
        self._ids += delta.token_ids
        self._logprobs.extend(delta.logprobs)
        return Piece(self._index, delta.token_ids, delta.logprobs, self._prompt_tokens, len(self._ids))

    def finish(self, finished: Finished) -> Whole:
        """The whole output."""
        reason = REASONS[finished.reason]
        return Whole(self._index, self._ids, self._logprobs, reason, finished.usage, finished.matched_stop)
