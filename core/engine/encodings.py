"""Texts on their way to ids: what a thread makes of each, and what is made of that on the loop.

A thread is asked for many short texts at once: of 128 queries a hop for each took longer than all their tokens did.
A few short ones are encoded on the loop, in less than a hop takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from core.engine.off_loop import guarded
from core.engine.prompt_bounds import PromptBounds
from core.engine.workers import Workers
from core.errors import InvalidRequest
from core.text.failures import TextFailures
from core.text.tokenizer import Tokenizer
from core.types.arrays import Ints
from core.types.io import TextPair

LONG_CHARS: Final = 32_768
"""Longer texts keep a thread busy for 10 ms and more. They never take all threads at once."""
TOGETHER_CHARS: Final = 8_192
"""Of texts that share a turn: a fraction of that, since other callers wait for its end."""
QUICK_TEXTS: Final = 4
"""So many that are quick together are encoded on the loop: each has a cost of its own, however short it is."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """One text that can be encoded."""

    chars: int
    encode: Callable[[], Any]
    """Called in a thread. It may raise InvalidRequest, and whatever tokenizers raise."""
    ids: Callable[[Any], Ints]
    """What `encode` returned -> int64[n], n >= 1. On the loop. Raises InvalidRequest."""


Outcome = Ints | InvalidRequest
"""The ids of a text, or why it cannot be served."""


class Encodings:
    """Makes those of one model and has them done. Event-loop thread only."""

    def __init__(self, tokenizer: Tokenizer, bounds: PromptBounds, workers: Workers, failures: TextFailures) -> None:
        self._tokenizer, self._bounds, self._workers, self._failures = tokenizer, bounds, workers, failures

    def whole(self, text: str, part: tuple[int, int] | None = None) -> Encoding:
        """All of `text`, in which the characters `part` are the second text of a pair.

        Raises InvalidRequest, field `text`, where that is too long for any tokenizer.
        """
        self._bounds.refuse_long(len(text), "text")

        def encode() -> list[int]:
            ids = self._tokenizer.encode(text, True)
            if part is not None and len(ids) > self._bounds.max_input:
                self._refuse_first(self._tokenizer.encode(text[: part[0]] + text[part[1] :], True))
            return ids

        return Encoding(len(text), encode, self._ids_of("text"))

    def cut(self, text: str, part: tuple[int, int] | None = None) -> Encoding:
        """Of `text` without what is too long at its end, or at the end of its characters `part`. Raises as `whole`."""
        most = self._bounds.most_chars
        if part is None:
            text = text[:most]
        else:
            start, end = part[0], min(part[1], part[0] + most)
            self._bounds.refuse_long(len(text) - (part[1] - part[0]), "pair.first")
            text, part = text[:end] + text[part[1] :], (start, end)
        limit = self._bounds.max_input
        return Encoding(len(text), lambda: self._tokenizer.encode_within(text, limit, part), self._ids_of("text"))

    def pair(self, pair: TextPair, types: int, *, cut: bool = False) -> Encoding:
        """Two texts as the tokenizer joins them.

        `types`: of tokens that the model tells apart. Those of type t are told as id + t * vocabulary. `cut`: the
        second text loses what is too long. Raises InvalidRequest, field `pair`.
        """
        bounds, encode = self._bounds, self._tokenizer.encode_pair
        if cut:
            bounds.refuse_long(len(pair.first), "pair.first")
            pair = TextPair(pair.first, pair.second[: bounds.most_chars])
        chars = len(pair.first) + len(pair.second)
        if not cut:
            bounds.refuse_long(chars, "pair.first" if len(pair.first) > bounds.most_chars else "pair")
        ids_of, limit = self._ids_of("pair"), bounds.max_input if cut else None

        def typed(found: tuple[list[int], list[int]]) -> Ints:
            prompt = ids_of(found[0])
            return prompt if types == 1 else prompt + np.minimum(found[1], types - 1) * bounds.vocab_size

        def joined() -> tuple[list[int], list[int]]:
            found = encode(pair.first, pair.second, limit)
            if len(found[0]) > bounds.max_input:
                self._refuse_first(encode(pair.first, "")[0])
            return found

        return Encoding(chars, joined, typed)

    async def done(self, encodings: Sequence[Encoding], caller: str) -> list[Outcome]:
        """What becomes of each, in turns of `caller`. Raises TextFailed when the tokenizer fails, and Draining."""
        outcomes = list[Outcome]()
        for some in together(encodings):
            long = some[0].chars > LONG_CHARS
            with self._failures.told():
                if len(some) <= QUICK_TEXTS and self._tokenizer.is_quick(sum(each.chars for each in some)):
                    found = guarded(_encoded, some)
                else:
                    found = await self._workers.run(_encoded, some, caller=caller, long=long)
            outcomes += [
                made if isinstance(made, InvalidRequest) else attempted(each.ids, made)
                for each, made in zip(some, found, strict=True)
            ]
        return outcomes

    def _refuse_first(self, rest: Sequence[int]) -> None:
        """Raises InvalidRequest, field `pair.first`, if what a pair is without its second text leaves no room for one.

        So a query that is too long is not told of as a fault of each document.
        """
        limit = self._bounds.max_input
        if len(rest) >= limit:
            told = f"has {len(rest)} tokens without the second text, but the model takes at most {limit} of both"
            raise InvalidRequest.of("pair.first", told)

    def _ids_of(self, field: str) -> Callable[[Sequence[int]], Ints]:
        def ids(found: Sequence[int]) -> Ints:
            prompt = np.asarray(found, np.int64)
            self._bounds.refuse_unservable(field, prompt)
            return prompt

        return ids


def together(encodings: Sequence[Encoding]) -> Iterator[Sequence[Encoding]]:
    """Neighbours of `encodings` that share a turn: as many as have TOGETHER_CHARS, and at least one."""
    first, chars = 0, 0
    for place, each in enumerate(encodings):
        chars += each.chars
        if place > first and chars > TOGETHER_CHARS:
            yield encodings[first:place]
            first, chars = place, each.chars
    if encodings:
        yield encodings[first:]


def _encoded(encodings: Sequence[Encoding]) -> list[Any]:
    """What `encode` of each returns, or the InvalidRequest that it raises."""
    return [attempted(each.encode) for each in encodings]


def attempted(work: Callable[..., Any], *given: Any) -> Any:
    """What `work` returns, or the InvalidRequest that it raises."""
    try:
        return work(*given)
    except InvalidRequest as refused:
        return refused
