"""One output of a Generate call on its way to a gateway: what is sent now, and all of it at the end.

Gateways make text of every id they get, so the token that ended an output is told as what matched and kept out of the
ids. Only a token that could be such a one is held back, and only until it is known whether the output goes on.
"""

from __future__ import annotations

from core.types.io import Delta, Finished, FinishReason, ModelInfo, TokenLogprob
from core.types.sampling_params import SamplingParams
from service.gateway.dialect import Piece, Whole

REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.CANCELLED: "abort"}


def hidden_stops(params: SamplingParams, info: ModelInfo) -> frozenset[int]:
    """Ids that may end an output and are not for the client to see."""
    if params.include_stop_in_output:
        return frozenset()
    ends = () if params.ignore_eos else info.eos_token_ids
    return frozenset((*ends, *params.stop_token_ids))


class OutputSoFar:
    """Collects the events of output `index`; everything is kept, for gateways want all ids again at the end."""

    def __init__(self, index: int, prompt_tokens: int, stops: frozenset[int]) -> None:
        self._index = index
        self._prompt_tokens = prompt_tokens
        self._stops = stops
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._sent = 0

    def add(self, delta: Delta) -> Piece | None:
        """What to send of `delta`, and of a token that was held back before it; None if that is nothing yet."""
        self._ids += delta.token_ids
        self._logprobs += delta.logprobs
        held = bool(self._ids) and self._ids[-1] in self._stops
        return self._piece(len(self._ids) - held)

    def finish(self, finished: Finished) -> tuple[Piece | None, Whole]:
        """What is still to be sent, and the whole output."""
        hidden = self._sent < len(self._ids) and self._ids[-1] == finished.matched_stop
        if hidden:
            self._ids.pop()
            # Without log probabilities there are none to drop.
            del self._logprobs[len(self._ids) :]
        last = self._piece(len(self._ids))
        if hidden:
            # Of vLLM's streams the gateway takes the count from the last chunk, so there is one that counts it.
            last = Piece(self._index, (), (), self._prompt_tokens, len(self._ids) + 1)
        reason = REASONS[finished.reason]
        whole = Whole(self._index, self._ids, self._logprobs, reason, finished.usage, finished.matched_stop)
        return last, whole

    def _piece(self, end: int) -> Piece | None:
        start, self._sent = self._sent, max(self._sent, end)
        if start >= end:
            return None
        return Piece(self._index, self._ids[start:end], self._logprobs[start:end], self._prompt_tokens, end)
