"""Grammars of answers with marks, in llguidance's Lark: required calls of tools, and structural tags in free text.

Marks are often added tokens of the tokenizer, which no text spells for the library. So texts are split at them, and
each is written by its id.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from core.types.structural_tags import StructuralTags

Pieces = list[str | int]
"""A text in parts: a number is an added token."""

JSON_OPTIONS: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As chat templates write arguments, which is what models have learnt."""

_TEXT: Final = r"TEXT: /(.|\n)*/"


class TagGrammar:
    """Writes grammars for one tokenizer. `marks`: ids of its added tokens, by their texts."""

    def __init__(self, marks: Mapping[str, int], end_ids: Sequence[int]) -> None:
        self._marks = marks
        self._end_ids = frozenset(end_ids)
        # Longest first: where one token begins as another does, the tokenizer takes the longer one.
        names = sorted(marks, key=len, reverse=True)
        self._mark = re.compile("|".join(map(re.escape, names)).join("()")) if names else None

    def pieces(self, text: str) -> Pieces:
        """`text` split at added tokens. Raises ValueError for one that ends outputs."""
        if self._mark is None:
            return [text] if text else []
        found = [self._marks.get(part, part) for part in self._mark.split(text) if part]
        if not self._end_ids.isdisjoint(found):
            raise ValueError(f"{text!r} has a token that ends outputs")
        return found

    def calls(self, source: str) -> str:
        """Maybe a thought, up to its mark, then calls whose arguments match the schemas of their tools.

        `source`: what `core.text.answers.call_grammar` writes.
        """
        told = json.loads(source)
        calls = told["calls"]
        more = "" if told["most"] == 1 else f" ({self._written(told['between'])} call)*"
        which = " | ".join(f"call_{place}" for place in range(len(calls)))
        return "\n".join(
            [
                f"start: thought {self._written(told['before'])} call{more} {self._written(told['behind'])}",
                f"call: ({which}) {self._written(told['end'])}",
                *(f"call_{at}: {self._written(begin)} {_json(schema)}" for at, (begin, schema) in enumerate(calls)),
                *self._thought(told["thought"], told["begun"]),
            ]
        )

    def tags(self, source: str) -> str:
        """Free text, and the tags of `source`, a `StructuralTags`, behind their triggers."""
        told = StructuralTags.of_source(source)
        heads = {trigger: f"head_{place}" for place, trigger in enumerate(told.triggers)}
        bodies: dict[str, list[str]] = {trigger: [] for trigger in told.triggers}
        rules, firsts, taken = [], [], set(self._end_ids)
        for place, tag in enumerate(told.tags):
            trigger = told.trigger_of(tag)
            rest, end = self._written(tag.begin.removeprefix(trigger)), self._written(tag.end)
            rules.append(f"tag_{place}: {rest} {_json(tag.schema)} {end}")
            bodies[trigger].append(f"tag_{place}")
            firsts.append(f"{self._written(trigger)} tag_{place}")
        for trigger, head in heads.items():
            first, *rest_of = self.pieces(trigger)
            if any(isinstance(piece, int) for piece in rest_of):
                raise ValueError(f"trigger {trigger!r} has a token of its own behind its beginning")
            if isinstance(first, int):
                taken.add(first)
            lazy = "" if isinstance(first, int) else "[lazy]"
            rules.append(f"{head}{lazy}: TEXT {self._written(trigger)}")
        tags = " | ".join(f"{heads[trigger]} ({' | '.join(each)})" for trigger, each in bodies.items() if each)
        others = _ranges(set(self._marks.values()) - taken)
        other = f"TEXT <[{others}]>" if others else None
        return "\n".join([_start(told, other), f"tag: {tags}", f"first: {' | '.join(firsts)}", *rules, _TEXT])

    def _thought(self, around: Sequence[str] | None, begun: bool) -> list[str]:
        """The rules of a thought, which may have begun in the prompt. It ends with the first mark."""
        if around is None:
            return ['thought: ""']
        begin, (mark, *rest) = map(self.pieces, around)
        lazy = "" if isinstance(mark, int) else "[lazy]"
        whole = f"closed {_lark(rest)} GAP"
        return [
            f"thought: {whole}" if begun else f"thought: ({_lark(begin)} {whole})?",
            f"closed{lazy}: TEXT {_lark([mark])}",
            _TEXT,
            r"GAP: /\n{0,2}/",
        ]

    def _written(self, text: str) -> str:
        return _lark(self.pieces(text))


def _start(told: StructuralTags, other: str | None) -> str:
    free = "" if other is None else f"({other})* "
    if told.stop_after_first:
        return "start: first" if told.at_least_one else f"start: {free}(tag | TEXT)"
    first = "first " if told.at_least_one else ""
    return f"start: {first}(tag{'' if other is None else f' | {other}'})* TEXT"


def _ranges(ids: Iterable[int]) -> str:
    """Ids as the library writes many of them: 3,7-9."""
    runs: list[list[int]] = []
    for each in sorted(ids):
        if runs and each == runs[-1][1] + 1:
            runs[-1][1] = each
        else:
            runs.append([each, each])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def _lark(pieces: Pieces) -> str:
    return " ".join(f"<[{piece}]>" if isinstance(piece, int) else json.dumps(piece) for piece in pieces)


def _json(schema: dict[str, Any] | bool) -> str:
    told = schema if isinstance(schema, dict) else {}
    return f"%json {json.dumps({**told, 'x-guidance': JSON_OPTIONS})}"
