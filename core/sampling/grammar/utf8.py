"""Which tokens keep an output UTF-8, whatever byte of a character the output stopped at.

xgrammar takes some bytes for a character that are none (surrogates, and in patterns encodings that are too long). A
decoder makes three U+FFFD of them, so a text would be longer than its `maxLength`, and no JSON.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from core.types.grammar import Words

TEXT = 0
"""The state between two characters of a text, at which an output begins."""
_ONE, _TWO, _THREE, _E0, _ED, _F0, _F4, JSON = range(1, 9)
"""States inside of a character: bytes that it still needs, or the lead byte that narrows the second one.

From `JSON` on come the same states once more, for JSON: no raw control character may stand there.
"""
_NEVER = 2 * JSON
"""Behind bytes that are no UTF-8."""

_WELL_FORMED = (
    (TEXT, 0x00, 0x7F, TEXT),
    (TEXT, 0xC2, 0xDF, _ONE),
    (TEXT, 0xE1, 0xEF, _TWO),
    (TEXT, 0xE0, 0xE0, _E0),
    (TEXT, 0xED, 0xED, _ED),
    (TEXT, 0xF1, 0xF3, _THREE),
    (TEXT, 0xF0, 0xF0, _F0),
    (TEXT, 0xF4, 0xF4, _F4),
    (_ONE, 0x80, 0xBF, TEXT),
    (_TWO, 0x80, 0xBF, _ONE),
    (_THREE, 0x80, 0xBF, _TWO),
    (_E0, 0xA0, 0xBF, _ONE),
    (_ED, 0x80, 0x9F, _ONE),
    (_F0, 0x90, 0xBF, _TWO),
    (_F4, 0x80, 0x8F, _TWO),
)
"""(state, first byte, last byte, next state): table 3-7 of the Unicode Standard, "Well-Formed UTF-8 Byte Sequences"."""


def _steps() -> npt.NDArray[np.uint8]:
    """uint8[state, byte]: the next state."""
    table = np.full((_NEVER + 1, 256), _NEVER, np.uint8)
    for state, first, last, after in _WELL_FORMED:
        table[state, first : last + 1] = after
        table[JSON + state, first : last + 1] = JSON + after
    table[JSON, :0x20] = _NEVER
    return table


class Utf8:
    """The states before and after each token of a vocabulary."""

    def __init__(self, tokens: Sequence[bytes], words: int) -> None:
        """`tokens`: the bytes of each id; `words`: the length of a mask."""
        after = _after(tokens)
        bits = np.zeros((_NEVER, words * 32), np.bool_)
        bits[:, : len(tokens)] = after != _NEVER
        self.masks: Words = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
        """int32[state, W]: bits of the tokens that may come in each state."""
        self.after = tuple(row.tobytes() for row in after)
        """By state and id: the state behind a token that the mask of the state allows."""


def _after(tokens: Sequence[bytes]) -> npt.NDArray[np.uint8]:
    """uint8[state, id]: the state behind each token, from each state that can be gone on from."""
    steps, flat = _steps(), np.frombuffer(b"".join(tokens), np.uint8)
    lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
    begins = np.cumsum(lengths) - lengths
    states = np.repeat(np.arange(_NEVER, dtype=np.uint8)[:, None], len(tokens), axis=1)
    for place in range(int(lengths.max(initial=0))):
        longer = np.flatnonzero(lengths > place)
        states[:, longer] = steps[states[:, longer], flat[begins[longer] + place]]
    return states
