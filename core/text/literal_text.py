"""Keeps what clients write in a conversation from becoming special tokens: `<|im_end|>` in a message is ten characters.

A chat template writes special tokens around what was said, and the tokenizer looks for them in the whole of it. So
those that a message has are marked before it is rendered: every character of theirs is preceded by a character that
stands nowhere in the conversation. Where there are any, the prompt is encoded by a second tokenizer, which knows every
special token under another name, and those that the template wrote are renamed.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable
from itertools import groupby, takewhile
from typing import Any, Final

import tokenizers

from core.errors import InvalidRequest
from core.text.conversation import Conversation

MARKS: Final = range(0xE000, 0xF8FF)
"""Characters for private use, of which one that the conversation does not have is taken."""
OPEN, CLOSE = "\ufdd0", "\ufdd1"
"""Around the other names of special tokens: characters that no text has, since Unicode sets them apart."""
NO_MARK: Final = "uses up the characters for private use beside special tokens; set special_tokens if those are meant"
NOT_TEXT: Final = "has text that the tokenizer takes for special tokens; set special_tokens if they are meant"

_Renamed = tuple[tokenizers.Tokenizer, dict[int, int], frozenset[int]]
"""A tokenizer that knows special tokens by other names; ids of added tokens there and here; which are special."""


class LiteralText:
    """The special tokens of one tokenizer as text. All methods may be called from any thread."""

    def __init__(self, backend: tokenizers.Tokenizer, unknown: int | None = None) -> None:
        """`unknown`: id of what stands for characters that the vocabulary lacks; it is special, and ends nothing."""
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        special = {number: token.content for number, token in added.items() if token.special and token.content}
        self._numbers = frozenset(special) - {unknown}
        self._any = re.compile(longest_of(special.values())) if special else None
        self._written = frozenset("".join(special.values()))
        self._lock = threading.Lock()
        self._renamed: _Renamed | None = None

    def marked(self, conversation: Conversation) -> tuple[Conversation, str]:
        """(the conversation with its special tokens marked, the mark; empty where there is nothing to mark).

        Raises InvalidRequest, field `chat.messages`, where no character is left for a mark.
        """
        texts, pattern = list(conversation.texts()), self._any
        if pattern is None or not any(map(pattern.search, texts)):
            return conversation, ""
        known = self._written.union(*texts)
        mark = next((chr(number) for number in MARKS if chr(number) not in known), None)
        if mark is None:
            raise InvalidRequest.of("chat.messages", NO_MARK)

        def plain(value: Any) -> Any:
            if isinstance(value, str):
                # Taken away first: what stood around one of these could be a special token afterwards.
                value = value.replace(OPEN, "").replace(CLOSE, "")
                return pattern.sub(lambda found: "".join(mark + each for each in found[0]), value)
            if isinstance(value, dict):
                return {plain(key): plain(each) for key, each in value.items()}
            return [plain(each) for each in value] if isinstance(value, list) else value

        return Conversation(plain(conversation.turns), plain(conversation.tools), plain(conversation.arguments)), mark

    def encode(self, rendered: str, mark: str) -> list[int]:
        """Ids of a prompt that was rendered of messages with `mark`. Only what has no mark counts as special tokens.

        Raises InvalidRequest, field `chat.messages`, where the tokenizer finds others all the same.
        """
        # A name would be found in what a mark stood in, so marks go last.
        text, written = self._renaming(rendered.replace(OPEN, "").replace(CLOSE, ""), mark)
        text = text.replace(mark, "")
        renamed, numbers, special = self._tokenizer()
        (encoding,) = renamed.encode_batch_fast([text], add_special_tokens=False)
        found = [numbers.get(number, number) for number in encoding.ids]
        # Some models have special tokens among the pieces of their texts too.
        meant = [numbers[number] for number in encoding.ids if number in special]
        others = sum(number in self._numbers for number in found) - sum(number in self._numbers for number in meant)
        if len(meant) != written or others:
            raise InvalidRequest.of("chat.messages", NOT_TEXT)
        return found

    def _renaming(self, rendered: str, mark: str) -> tuple[str, int]:
        """(`rendered` with the other names of special tokens that have no mark in front, how many there are)."""
        assert self._any is not None, "there are special tokens, or nothing were marked"
        parts, written, at = [], 0, 0
        while found := self._any.search(rendered, at):
            start, end = found.span()
            if start and rendered[start - 1] == mark:
                # Another one may begin inside of it.
                parts.append(rendered[at : start + 1])
                at = start + 1
                continue
            parts += rendered[at:start], OPEN, found[0], CLOSE
            written, at = written + 1, end
        return "".join([*parts, rendered[at:]]), written

    def _tokenizer(self) -> _Renamed:
        """Made when it is first needed: it takes as much memory as the other tokenizer."""
        with self._lock:
            if self._renamed is None:
                self._renamed = self._made()
            return self._renamed

    def _made(self) -> _Renamed:
        state = json.loads(self._backend.to_str())
        added, state["added_tokens"] = state["added_tokens"], []
        renamed = tokenizers.Tokenizer.from_str(json.dumps(state))
        numbers, special = dict[int, int](), set[int]()
        for token in added:
            name = f"{OPEN}{token['content']}{CLOSE}" if token["special"] else token["content"]
            options = {key: token[key] for key in ("single_word", "lstrip", "rstrip", "normalized", "special")}
            # Normalisers take characters away that no text has.
            options["normalized"] = options["normalized"] and not token["special"]
            renamed.add_tokens([tokenizers.AddedToken(name, **options)])
            number = renamed.token_to_id(name)
            assert number is not None, "it was added just now"
            numbers[number] = token["id"]
            if token["special"]:
                special.add(number)
        return renamed, numbers, frozenset(special)


def longest_of(names: Iterable[str]) -> str:
    """A pattern for the longest of `names` at a place; all are longer than nothing.

    What several begin with is compared once: some models have hundreds of special tokens with a common beginning.
    """
    told = sorted(set(names))
    same = (one == other for one, other in zip(told[0], told[-1], strict=False))
    start = told[0][: sum(takewhile(bool, same))]
    rests = [name[len(start) :] for name in told]
    ways = [longest_of(group) for _, group in groupby(filter(None, rests), key=lambda rest: rest[0])]
    if not ways:
        return re.escape(start)
    return f"{re.escape(start)}(?:{'|'.join(ways)}){'' if all(rests) else '?'}"
