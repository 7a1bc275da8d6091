"""The output side of one sequence: ids and text that the client has not taken yet."""

from __future__ import annotations

from core.text.detokenizer import IncrementalDetokenizer
from core.text.stop import StopMatcher
from core.types.io import Delta, Finished, TokenLogprob


class PendingOutput:
    """Collects tokens between two reads and turns them into one `Delta`.

    Text is made when the client reads, so a reader that falls behind costs one call for many tokens; only stop strings
    need the text of every token at once.
    """

    def __init__(self, index: int, detokenizer: IncrementalDetokenizer | None, stops: StopMatcher | None) -> None:
        self.index = index
        self.finished: Finished | None = None
        self._detokenizer = detokenizer
        self._stops = stops
        self._ids: list[int] = []
        self._undecoded: list[int] = []
        self._text = ""
        self._logprobs: list[TokenLogprob] = []
        self._position = 0

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def readable(self) -> bool:
        """Whether `take` would return something."""
        return bool(self._ids or self._text or self.finished)

    def push(self, token: int, logprob: TokenLogprob | None, *, textless: bool, match_stops: bool) -> str | None:
        """Add one token; returns the stop string that its text completes, if any.

        `textless` tokens (a stop token that the client does not want to see) count as ids only. `match_stops` is off
        while the output is shorter than `min_tokens`.
        """
        self._ids.append(token)
        if logprob is not None:
            self._logprobs.append(logprob)
        if self._detokenizer is None or textless:
            return None
        if self._stops is None:
            self._undecoded.append(token)
            return None
        text = self._detokenizer.feed([token])
        if not match_stops:
            self._text += text
            return None
        emitted, matched = self._stops.feed(text)
        self._text += emitted
        return matched

    def finish(self, event: Finished, *, stopped_by_text: bool) -> None:
        """No more tokens; releases text that was held back, unless a stop string cut it off."""
        self._decode_pending()
        if self._detokenizer is not None and not stopped_by_text:
            rest = self._detokenizer.finish()
            if self._stops is None:
                self._text += rest
            else:
                # A stop string that only the last, incomplete character would complete can no longer be acted on.
                self._text += self._stops.feed(rest)[0] + self._stops.finish()
        self.finished = event

    def take(self) -> Delta | Finished | None:
        """What is new since the last call: first a delta, then the terminal, then None."""
        self._decode_pending()
        if not (self._ids or self._text):
            event, self.finished = self.finished, None
            return event
        delta = Delta(self.index, self._position, tuple(self._ids), self._text, tuple(self._logprobs))
        self._position += len(self._ids)
        self._ids, self._text, self._logprobs = [], "", []
        return delta

    def _decode_pending(self) -> None:
        if self._undecoded and self._detokenizer is not None:
            self._text += self._detokenizer.feed(self._undecoded)
            self._undecoded = []
