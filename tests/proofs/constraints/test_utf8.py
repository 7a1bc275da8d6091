"""No output leaves UTF-8: our own states against Python's decoder, and each library behind its interface."""

from __future__ import annotations

import json
import random
from contextlib import suppress

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from core.sampling.grammar.registry import build_backend
from core.sampling.grammar.utf8 import JSON, TEXT, Utf8
from core.sampling.grammar.vocabulary import Vocabulary
from core.types.constraint import Constraint, ConstraintKind
from tests.proofs.constraints.asks import BACKENDS
from tests.proofs.constraints.test_grammars import allowed

BYTES = [bytes([value]) for value in range(256)]
TEXTS = ("a", "é", "€", "\ud7ff", "\ue000", "\U00010000", "\U0010ffff", "\ufffd")
BROKEN = (b"\xed\xa0\x80", b"\xed\xbf\xbf", b"\xe0\x80\x80", b"\xf0\x80\x80\x80", b"\xf4\x90\x80\x80", b"\xc0\x80")
"""Surrogates, too long encodings, and a character beyond the last."""


def begins_text(told: bytes) -> bool:
    """Whether more bytes can make UTF-8 of `told`, by Python's decoder. Its incremental one takes a byte more."""
    for rest in (b"", b"\x80", b"\x80\x80", b"\xa0\x80", b"\x80\x80\x80", b"\x90\x80\x80"):
        with suppress(UnicodeDecodeError):
            (told + rest).decode()
            return True
    return False


def may(utf8: Utf8, state: int, token: int) -> bool:
    return bool(utf8.masks[state, token >> 5] >> (token & 31) & 1)


def follows(utf8: Utf8, tokens: list[int], state: int = TEXT) -> bool:
    """Whether the masks let `tokens` through, one after the other."""
    for token in tokens:
        if not may(utf8, state, token):
            return False
        state = utf8.after[state][token]
    return True


def test_a_token_may_come_where_a_decoder_takes_its_bytes(seed: int) -> None:
    """Every two bytes, alone and as tokens of one byte each; then drawn tokens behind every state."""
    pairs = [first + second for first in BYTES for second in BYTES]
    utf8 = Utf8([*BYTES, *pairs], 2 * -(-(256 + len(pairs)) // 64))
    for number, pair in enumerate(pairs):
        assert follows(utf8, [256 + number]) == follows(utf8, list(pair)) == begins_text(pair), pair
        fits = begins_text(pair) and min(pair) >= 0x20
        assert follows(utf8, [256 + number], JSON) == follows(utf8, list(pair), JSON) == fits, pair
    rng = random.Random(seed)
    interesting = [0x00, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC1, 0xC2, 0xDF, 0xE0, 0xE1, 0xEC, 0xED, 0xEE, 0xEF]
    interesting += [0xF0, 0xF1, 0xF3, 0xF4, 0xF5, 0xFF]
    drawn = [bytes(rng.choices(interesting, k=rng.randint(1, 4))) for _ in range(2000)]
    of_many = Utf8(drawn, 64)
    for number, token in enumerate(drawn):
        for before in ([], [0xC3], [0xE1], [0xE0], [0xED], [0xF0], [0xF1], [0xF4], [0xF1, 0x80], [0xF1, 0x80, 0x80]):
            state = TEXT
            for byte in before:
                state = utf8.after[state][byte]
            assert may(of_many, state, number) == begins_text(bytes(before) + token), (before, token)


def test_ids_without_bytes_change_nothing_and_ids_beyond_the_last_never_come() -> None:
    utf8 = Utf8([b"\xed", b"", b"\xa0", b"\x80"], 2)
    inside = utf8.after[TEXT][0]
    assert [may(utf8, inside, token) for token in range(6)] == [False, True, False, True, False, False]
    assert utf8.after[inside][1] == inside


def byte_level() -> tokenizers.Tokenizer:
    """A tokenizer with a token for each byte, and an end."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["</s>"])
    return made


def ids_of_bytes(tokenizer: tokenizers.Tokenizer) -> dict[int, int]:
    """The id of each byte, by GPT-2's alphabet."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    letters = {byte: chr(byte) for byte in shown} | {byte: chr(256 + number) for number, byte in enumerate(hidden)}
    return {byte: tokenizer.token_to_id(letter) for byte, letter in letters.items()}


CONSTRAINTS = [
    (Constraint(ConstraintKind.JSON_SCHEMA, json.dumps({"type": "string", **more})), '"')
    for more in ({}, {"maxLength": 6}, {"pattern": "^[^a]{1,3}$"}, {"minLength": 1, "maxLength": 2})
]
CONSTRAINTS += [
    (Constraint(ConstraintKind.REGEX, "[^b]{1,3}"), ""),
    (Constraint(ConstraintKind.EBNF, "root ::= [^b]+"), ""),
]


@pytest.mark.parametrize("name", BACKENDS)
def test_no_constraint_lets_bytes_through_that_are_no_text(name: str) -> None:
    tokenizer = byte_level()
    vocabulary = Vocabulary.of(tokenizer, 257, (256,))
    backend = build_backend(name, vocabulary)
    ids = ids_of_bytes(tokenizer)
    for constraint, before in CONSTRAINTS:
        grammar = backend.compile(constraint)
        words = np.zeros((2, grammar.words), np.int32)
        for told in (*BROKEN, *(text.encode() for text in TEXTS)):
            matcher, other = grammar.matcher(), grammar.matcher()
            taken = [ids[byte] for byte in before.encode()]
            assert all(grammar.accept_all([matcher, other], [token] * 2) == [True] * 2 for token in taken)
            for place, byte in enumerate(told):
                fits = begins_text(told[: place + 1]) and not (told == b"a" and b"^a" in constraint.source.encode())
                assert (ids[byte] in allowed(matcher, vocabulary)) == fits, (constraint, told, place)
                words[:] = 0
                assert grammar.fill_all([other, matcher], words).all()
                assert bool(words[1, ids[byte] >> 5] >> (ids[byte] & 31) & 1) == fits, (constraint, told, place)
                if not fits:
                    assert list(grammar.accept_all([matcher], [ids[byte]])) == [False]
                    assert matcher.failure is not None and not matcher.gave_up
                    break
                assert matcher.accept(ids[byte])


@pytest.mark.parametrize("name", BACKENDS)
def test_a_fork_has_its_bytes_for_itself(name: str) -> None:
    tokenizer = byte_level()
    vocabulary = Vocabulary.of(tokenizer, 257, (256,))
    ids = ids_of_bytes(tokenizer)
    matcher = build_backend(name, vocabulary).compile(Constraint(ConstraintKind.REGEX, "[^b]{1,3}")).matcher()
    start = allowed(matcher, vocabulary)
    inside = matcher.fork()
    for byte in b"\xed\x9f":
        assert inside.accept(ids[byte])
    ended = inside.fork()
    assert ended.accept(ids[0xBF]) and ended.accept(256)
    assert allowed(inside, vocabulary) == sorted(ids[byte] for byte in range(0x80, 0xC0))
    assert allowed(matcher, vocabulary) == start and not allowed(ended.fork(), vocabulary)
