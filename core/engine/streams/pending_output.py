"""The output side of one sequence: ids and text that the client has not taken yet."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from core.engine.streams.unread import FREE_TOKENS, MORE_TOKENS, TOKEN_BYTES
from core.text.answers.answer_reader import AnswerReader
from core.text.detokenizer import MAX_CONTEXT, IncrementalDetokenizer
from core.text.stop import StopMatcher
from core.text.tokenizer import Tokenizer
from core.types.chat import AnswerPart
from core.types.io import Delta, Finished
from core.types.logprobs import ALTERNATIVE_BYTES, CHOSEN_BYTES, ENTRY_BYTES, TokenLogprobs
from core.types.request import Req


class PendingOutput:
    """Collects tokens between two reads and turns them into one `Delta`.

    Text is made when the client reads, so a reader that falls behind costs one call for many tokens; only stop strings
    need the text of every token at once. `push`, `finish` and `take` raise what the tokenizer raises; call `give_up`
    then.
    """

    __slots__ = (
        "_answer",
        "_decoded",
        "_detokenizer",
        "_given_up",
        "_most",
        "_position",
        "_stops",
        "_text",
        "_token_bytes",
        "accepted",
        "charged",
        "done",
        "finished",
        "ids",
        "in_line",
        "index",
        "logprobs",
        "looks_at_tokens",
        "room",
        "stop_match",
    )

    def __init__(
        self,
        index: int,
        detokenizer: IncrementalDetokenizer | None,
        stops: StopMatcher | None,
        *,
        most: int = sys.maxsize,
        token_bytes: int = TOKEN_BYTES,
        logprobs: bool = False,
        prompt: int = 0,
        answer: AnswerReader | None = None,
    ) -> None:
        """`most` tokens may be left unread. Each takes `token_bytes`, its log probabilities included.

        `logprobs`: whether log probabilities come with the tokens. `prompt`: tokens of the prompt that are told before
        its own, at places below 0. `answer` reads the text; deltas have what it finds instead.
        """
        self.index = index
        self.done = False
        """Whether the output has ended or is about to: tokens that still arrive for it are dropped."""
        self.in_line = False
        """Whether its stream has it among those that its reader looks at."""
        self.stop_match: str | None = None
        """The stop string that was found in the text; None until then."""
        self.finished: Finished | None = None
        self.accepted = 0
        """How many of the tokens that were pushed were drafts; counted by the caller of `push`."""
        self.ids: list[int] = []
        """Tokens not taken yet; always the same list. Where `looks_at_tokens` is off, a token may be appended here
        directly, which saves the call of `push`."""
        self.looks_at_tokens = logprobs or stops is not None
        """Whether each token brings log probabilities, or its text is needed at once."""
        self._detokenizer = detokenizer
        self._stops = stops
        self._answer = answer
        self._decoded = 0
        """How many of `ids`, from the first, are text already or must not become text."""
        self._text = ""
        self.logprobs = TokenLogprobs()
        """Those of `ids`, where the request wants them. The caller of `push` adds those of the token first."""
        self.room = min(most, FREE_TOKENS)
        """Tokens that may be held. For one more, the stream has to `charge`."""
        self.charged = 0
        """Bytes that are counted for this output."""
        self._most, self._token_bytes = most, token_bytes
        self._position = -prompt
        self._given_up = False

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def total(self) -> int:
        """All tokens so far, taken or not; those of the prompt do not count."""
        return max(0, self._position + len(self.ids))

    @property
    def readable(self) -> bool:
        """Whether `take` would return something."""
        return bool(self.ids or self._text or self.finished)

    def push(self, token: int, *, textless: bool, match_stops: bool) -> str | None:
        """Add one token; returns the stop string that its text completes, if any.

        `textless` tokens (a stop token that the client does not want to see) count as ids only. `match_stops` is off
        while the output is shorter than `min_tokens`.
        """
        if textless:
            self._decode_pending()
        self.ids.append(token)
        if self._detokenizer is None:
            return None
        if textless or self._stops is not None:
            self._decoded = len(self.ids)
        if textless or self._stops is None:
            return None
        text = self._detokenizer.feed([token])
        if not match_stops:
            self._text += text
            return None
        emitted, matched = self._stops.feed(text)
        self._text += emitted
        return matched

    def push_prompt(self, token: int) -> None:
        """Add one token of the prompt, which is no text. The caller adds its log probability first, as with `push`."""
        self.ids.append(token)
        self._decoded = len(self.ids)

    def finish(self, event: Finished) -> None:
        """End the output with `event`. Releases text that was held back, unless a stop string cut it off."""
        self._decode_pending()
        if self._detokenizer is not None and self.stop_match is None:
            rest = self._detokenizer.finish()
            if self._stops is None:
                self._text += rest
            else:
                # A stop string that only the last, incomplete character would complete can no longer be acted on.
                self._text += self._stops.feed(rest)[0] + self._stops.finish()
        if not self._given_up:
            self.finished = event

    def take(self) -> Delta | Finished | None:
        """What is new since the last call: first a delta, then the terminal, then None."""
        self._decode_pending()
        ids = self.ids
        if ids and self._position < 0:
            return self._take_prompt()
        parts = () if self._answer is None else self._read(self._answer)
        if not (ids or self._text or parts):
            event, self.finished = self.finished, None
            return event
        logprobs = self.logprobs.moved() if self.logprobs else ()
        delta = Delta(self.index, self._position, tuple(ids), self._text, logprobs, parts)
        self._position += len(ids)
        # Emptied in place: else a reader that keeps up would cost a new list with every token.
        ids.clear()
        self._decoded, self._text = 0, ""
        return delta

    def _read(self, answer: AnswerReader) -> tuple[AnswerPart, ...]:
        """What is new in the answer, in place of the text; with the end of the output also what was held back."""
        parts = answer.feed(self._text, last=self.finished is not None)
        self._text = ""
        if self.finished is not None:
            self._answer = None
        return parts

    def _take_prompt(self) -> Delta:
        """The tokens of the prompt that are there, and none of the output."""
        count = min(len(self.ids), -self._position)
        delta = Delta(self.index, self._position, tuple(self.ids[:count]), "", self.logprobs[:count])
        self._position += count
        self.logprobs = self.logprobs[count:]
        del self.ids[:count]
        self._decoded -= count
        return delta

    def bound(self, most: int) -> None:
        """Let at most `most` tokens of the output be left unread."""
        self._most = most + max(0, -self._position)
        self.room = min(self._most, self.room)

    @property
    def overfull(self) -> bool:
        """Whether more tokens are left unread than may be."""
        return len(self.ids) > self._most

    def charge(self) -> int:
        """Make room for MORE_TOKENS more; returns how many bytes are now to be counted beyond those counted before."""
        held = len(self.ids)
        self.room = min(self._most, held + MORE_TOKENS)
        needed = self.room * TOKEN_BYTES + sys.getsizeof(self._text)
        if self._token_bytes > TOKEN_BYTES:
            needed += self.logprobs.held_bytes + (self.room - held) * (self._token_bytes - TOKEN_BYTES)
        more, self.charged = needed - self.charged, needed
        return more

    def discharge(self) -> int:
        """Make the room as small as at first, after what was held is gone; returns how many bytes were counted."""
        self.room = min(self._most, FREE_TOKENS)
        charged, self.charged = self.charged, 0
        return charged

    def discard(self) -> None:
        """Forget what was not taken: the reader is gone, or an error tells it of the gap."""
        self._position += len(self.ids)
        self.ids.clear()
        if self.logprobs:
            self.logprobs = TokenLogprobs()
        self._decoded, self._text, self.finished = 0, "", None

    def give_up(self) -> None:
        """The rest of the text cannot be made: keep what is text already for `take`, and drop everything after it."""
        del self.ids[self._decoded :]
        self.logprobs.cut(min(self._decoded, len(self.logprobs)))
        self.finished = self._detokenizer = None
        self._given_up = True

    def _decode_pending(self) -> None:
        if self._detokenizer is not None and self._decoded < len(self.ids):
            self._text += self._detokenizer.feed(self.ids[self._decoded :])
            self._decoded = len(self.ids)


def pending_outputs(
    reqs: Sequence[Req], readers: Sequence[AnswerReader], tokenizer: Tokenizer, *, want_text: bool
) -> list[PendingOutput]:
    """The empty outputs of a request that enters, each read by one of `readers`, if there are any.

    Raises what the tokenizer raises.
    """
    pairs = zip_longest(reqs, readers)
    return [pending_output(req, tokenizer, want_text=want_text, answer=reader) for req, reader in pairs]


def pending_output(
    req: Req, tokenizer: Tokenizer, *, want_text: bool, answer: AnswerReader | None = None
) -> PendingOutput:
    """The empty output of a request that enters, read by `answer`, if any. Raises what the tokenizer raises."""
    params = req.params
    token_bytes, prompt = TOKEN_BYTES, req.prompt_len - 1 if req.scores else 0
    alternatives = max(params.top_logprobs, params.prompt_logprobs or 0)
    if params.logprobs or prompt:
        # An eighth more, because arrays that grow take as much ahead.
        told = ENTRY_BYTES + alternatives * ALTERNATIVE_BYTES + len(params.logprob_token_ids) * CHOSEN_BYTES
        token_bytes += told * 9 // 8
    told_of: dict[str, Any] = {"token_bytes": token_bytes, "logprobs": params.logprobs, "prompt": prompt}
    if not (want_text or params.stop):
        return PendingOutput(req.index, None, None, **told_of)
    # Its end alone: this is done on the event loop for each output, and a prompt may be long.
    context = req.prompt[-MAX_CONTEXT:].tolist()
    # The marks of an answer may be special tokens.
    detokenizer = IncrementalDetokenizer(tokenizer, context, params.skip_special_tokens and answer is None)
    stops = StopMatcher(params.stop, params.include_stop_in_output) if params.stop else None
    return PendingOutput(req.index, detokenizer, stops, answer=answer, **told_of)
