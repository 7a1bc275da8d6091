"""Output ids to text as they arrive, never a part of a character, and in sum exactly what decoding all at once gives.

The fast way is `DecodeStream` of the `tokenizers` library. It has three habits that a server cannot live with: given a
prompt that ends inside a character it repeats the prompt's text; it raises "Invalid prefix" when a run of byte tokens
turns out to be no UTF-8 after its beginning was already text (sentencepiece decoders give up the whole run); and while
text ends in U+FFFD it keeps all ids and decodes them again at each step, so endless invalid bytes cost quadratic time.
In those cases, and for tokenizers without a Rust backend, `_Window` takes over: the same idea in the open, as the
prefix and read offsets of Hugging Face's text-generation-inference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from typing import Final

from tokenizers.decoders import DecodeStream

from core.text.tokenizer import Tokenizer

MAX_PENDING: Final = 8
"""Most ids held without complete text. A character has at most four bytes, so valid text never needs as many."""
MAX_OPEN: Final = 3
"""Ids that may be the beginning of one character."""
_CONTEXTS: Final = (8, 32, 128)
"""How many prompt ids are looked at: the first of these sizes with complete text at the end."""
MAX_CONTEXT: Final = _CONTEXTS[-1]
"""Prompt ids that an `IncrementalDetokenizer` looks at, at most: the last ones."""
_CUT_CONTEXT: Final = 4
_REPLACEMENT: Final = "\ufffd"

Decode = Callable[[Sequence[int]], str]


class IncrementalDetokenizer:
    """Text of one output. `feed` ids in order, then `finish` once; not for use from two threads at a time."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool) -> None:
        """`prompt_ids` precede the output and decide about its leading space; the last MAX_CONTEXT of them do."""
        decode: Decode = partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        context = _context_of(prompt_ids, self._skipped, decode)
        self._window = _Window(decode, context)
        self._stream: Callable[[int], str | None] | None = None
        """The fast way, for as long as it can be trusted; then None for good."""
        if tokenizer.backend is not None and not self._window.prefix.endswith(_REPLACEMENT):
            stream = DecodeStream(ids=context, skip_special_tokens=skip_special_tokens)
            self._stream = partial(stream.step, tokenizer.backend)

    def feed(self, ids: Sequence[int]) -> str:
        """The text that became complete with `ids`; empty while the newest character lacks bytes."""
        return "".join([self._step(token) for token in ids if token not in self._skipped])

    def finish(self) -> str:
        """What is still held back: bytes that no character will complete, as U+FFFD."""
        self._stream = None
        return self._window.flush()

    def _step(self, token: int) -> str:
        if self._stream is None:
            return self._window.push(token)
        try:
            text = self._stream(token)
        except Exception:  # the binding raises a bare Exception: "Invalid prefix encountered"
            self._stream = None
            return self._window.push(token)
        self._window.pending.append(token)
        if text is not None:
            self._window.accept()
            return text
        if len(self._window.pending) >= MAX_PENDING:
            self._stream = None
            return self._window.settle()
        return ""


class _Window:
    """The last ids that became text (`context`) and those after them (`pending`); decoded together, never more.

    Text is what decoding context and pending gives beyond what context alone gives, so that decoders which treat the
    first token of a text differently see the same neighbours as when all is decoded at once.
    """

    def __init__(self, decode: Decode, context: list[int]) -> None:
        self._decode = decode
        self.context = context
        self.pending: list[int] = []

    @property
    def prefix(self) -> str:
        """Text of the context alone."""
        return self._decode(self.context)

    def push(self, token: int) -> str:
        """Take one more id; the text that is now complete."""
        self.pending.append(token)
        return self.settle()

    def settle(self) -> str:
        """The text of the pending ids as far as it is complete. Unfinished text is cut after `MAX_PENDING` ids."""
        text = self._decode(self.context + self.pending)
        too_long = len(self.pending) >= MAX_PENDING
        if text.endswith(_REPLACEMENT):
            return self._cut(text) if too_long else ""
        new = self._beyond_context(text)
        if new:
            self.accept()
        elif too_long:
            self.pending = self.pending[-MAX_OPEN:]
        return new

    def accept(self) -> None:
        """All that was pending is text now."""
        self.context, self.pending = self.pending, []

    def flush(self) -> str:
        """The text of all that is pending, complete or not."""
        text = self._beyond_context(self._decode(self.context + self.pending))
        self.accept()
        return text

    def _beyond_context(self, text: str) -> str:
        prefix = self.prefix
        if text.startswith(prefix):
            return text[len(prefix) :]
        if prefix.endswith(_REPLACEMENT):
            # The prompt ended inside a character that the output completed.
            return text[_common_length(prefix, text) :]
        # A run of byte tokens that was text has become no text. What was sent stays; only the rest follows.
        return self._decode(self.pending)

    def _cut(self, text: str) -> str:
        """Let go of all but the last few pending ids, which may be the beginning of a character."""
        for keep in range(1, len(self.pending)):
            head, tail = self.pending[:-keep], self.pending[-keep:]
            before = self._decode(self.context + head)
            # Bytes that belong together decode differently when they are apart. Equal means a border between them.
            if before + self._decode(tail) == text:
                self.pending = head
                new = self._beyond_context(before)
                self.context, self.pending = head[-_CUT_CONTEXT:], tail
                return new
        return self.flush()


def _context_of(prompt_ids: Sequence[int], skipped: frozenset[int], decode: Decode) -> list[int]:
    """The last ids of a prompt: enough of them that their text is not empty and ends in a complete character."""
    for size in _CONTEXTS:
        context = [int(token) for token in prompt_ids[-size:] if token not in skipped]
        text = decode(context)
        if size >= len(prompt_ids) or (text and not text.endswith(_REPLACEMENT)):
            break
    return context


def _common_length(a: str, b: str) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b)))
