"""Prompts cut into pieces, so that a router knows where the beginning of one was computed before.

A piece is named by a hash of itself and of all pieces before it. Prompts are cut as they are sent, before any
tokenizer: an engine that has seen the same beginning of a text has seen the same tokens. Hashes only choose an engine,
which compares tokens by itself, so a collision costs time and nothing else.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from core.types.io import EmbedRequest, GenerateRequest, Input, TextPair
from service.limits.work import IMAGE_TOKENS

PIECE_TOKENS: Final = 64
TOKEN_BYTES: Final = 4
"""Of the text of one token, about."""
ID_BYTES: Final = 8
"""Of a token id, which may be any number that a client sends."""
PIECE_BYTES: Final = PIECE_TOKENS * TOKEN_BYTES
MOST_PIECES: Final = 4096
"""Of one prompt: a million bytes of text, which take a millisecond or two."""
SOUND_TOKENS: Final = 1500
"""Of half a minute, which is what Whisper reads at once."""


class Prompt(NamedTuple):
    """What the router knows of a prompt: the hashes of its whole pieces, and its length in tokens, estimated."""

    pieces: tuple[int, ...]
    tokens: int


def prompt_of(request: GenerateRequest) -> Prompt:
    """The prompt of `request`. Prompts under other salts or adapters have no piece in common."""
    namespace = hash((request.cache_salt, request.adapter))
    images = request.sent_images
    media = IMAGE_TOKENS * len(images) + SOUND_TOKENS * (request.audio is not None)
    if request.token_ids is not None:
        sent = array("q", request.token_ids).tobytes() + b"".join(each.data for each in images)
        pieces = _pieces(sent, namespace, PIECE_TOKENS * ID_BYTES)
        return Prompt(tuple(pieces), len(request.token_ids) + media)
    sent = b"\0".join(_texts(request))
    encoded = sum(len(each.data) for each in images) + (0 if request.audio is None else len(request.audio.data))
    return Prompt(tuple(_pieces(sent, namespace, PIECE_BYTES)), (len(sent) - encoded) // TOKEN_BYTES + media)


def inputs_of(request: EmbedRequest) -> Prompt:
    """All inputs of `request` together. They are read once, so no engine is better than another for them."""
    return Prompt((), sum(map(_tokens, request.inputs)))


def _tokens(given: Input) -> int:
    if isinstance(given, TextPair):
        return (len(given.first) + len(given.second)) // TOKEN_BYTES
    return len(given) // TOKEN_BYTES if isinstance(given, str) else len(given)


def _texts(request: GenerateRequest) -> Iterator[bytes]:
    """The bytes that the prompt is made of, in the order in which templates write them."""
    yield from map(_encoded, request.chat_tools)
    yield _encoded(request.text or "")
    for turn in request.chat or ():
        yield _encoded(turn.role)
        yield _encoded(turn.content)
        for part in turn.parts:
            yield part if isinstance(part, bytes) else _encoded(part)
    yield from request.images
    if request.audio is not None:
        yield request.audio.data


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _pieces(sent: bytes, namespace: int, size: int) -> Iterator[int]:
    last = namespace
    for start in range(0, min(len(sent) - size + 1, MOST_PIECES * size), size):
        last = hash((last, sent[start : start + size]))
        yield last


class SeenPieces:
    """The pieces that one engine was sent last, as many as its cache can hold."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._seen: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def leading(self, pieces: Sequence[int]) -> int:
        """How many of `pieces`, from the first, were sent."""
        return next((place for place, piece in enumerate(pieces) if piece not in self._seen), len(pieces))

    def add(self, pieces: Sequence[int]) -> None:
        """Note that `pieces` were sent now. Those sent longest ago are forgotten."""
        # The last piece first: a beginning must outlive what follows it.
        for piece in reversed(pieces):
            self._seen[piece] = None
            self._seen.move_to_end(piece)
        while len(self._seen) > self.most:
            self._seen.popitem(last=False)

    def clear(self) -> None:
        """Forget all: the cache was emptied."""
        self._seen.clear()
