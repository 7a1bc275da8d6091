"""Streamed text is the text: for every tokenizer family, any ids, any pieces."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from core.text.detokenizer import MAX_PENDING, IncrementalDetokenizer
from core.text.tokenizer import Tokenizer
from tests.support.growth import Work, growth
from tests.unit.core.text.checkpoints import CORPUS, FAMILIES

TEXTS = [
    *CORPUS[:5],
    "no leading space",
    " leading and trailing ",
    "\n\n\ttabs\r\nand   runs   of   spaces",
    "👩🏽‍🚀🧑‍🤝‍🧑🏴󠁧󠁢󠁥󠁮󠁧󠁿",
    "a real \ufffd replacement \ufffd\ufffd character",
    "क्षत्रिय ก็ a\u0323\u0307 \u202eright to left\u202c",
    "",
]


def stream(
    tokenizer: Tokenizer, prompt: Sequence[int], output: Sequence[int], skip: bool, rng: random.Random | None = None
) -> list[str]:
    """The pieces a client would get, with `rng` fed in pieces of one to four ids."""
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip)
    pieces, place = [], 0
    while place < len(output):
        size = rng.randint(1, 4) if rng else 1
        pieces.append(detokenizer.feed(output[place : place + size]))
        place += size
    return [*pieces, detokenizer.finish()]


def whole(tokenizer: Tokenizer, prompt: Sequence[int], output: Sequence[int], skip: bool) -> str:
    """What decoding everything adds to the prompt's text."""
    before = tokenizer.decode(prompt, skip)
    text = tokenizer.decode([*prompt, *output], skip)
    common = next((i for i, (a, b) in enumerate(zip(before, text)) if a != b), min(len(before), len(text)))
    return text[common:]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_streamed_text_is_the_text(family: str, text: str, tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers[family]
    ids = tokenizer.encode(text, add_special_tokens=False)
    prompt = tokenizer.encode("Hello, world!", add_special_tokens=True)
    for before in ([], prompt):
        for skip in (True, False):
            assert "".join(stream(tokenizer, before, ids, skip)) == whole(tokenizer, before, ids, skip)


# Not byte_fallback: spelled in byte tokens, a row of U+FFFD cannot be told from a run of invalid bytes.
@pytest.mark.parametrize("family", ["byte_level", "metaspace", "word_piece", "pure_python"])
def test_rows_of_replacement_characters(family: str, tokenizers: dict[str, Tokenizer]) -> None:
    ids = tokenizers[family].encode("a" + "\ufffd" * 40 + "b", add_special_tokens=False)
    assert "".join(stream(tokenizers[family], [], ids, True)) == tokenizers[family].decode(ids, True)


@pytest.mark.parametrize("family", ["byte_level", "metaspace", "word_piece", "pure_python"])
def test_arbitrary_ids(family: str, tokenizers: dict[str, Tokenizer], seed: int) -> None:
    """Also ids that no text has: bytes out of order, special tokens, prompts that end inside a character."""
    tokenizer, rng = tokenizers[family], random.Random(seed)
    for _ in range(400):
        prompt = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.choice([0, 1, 4, 20]))]
        output = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randint(1, 40))]
        skip = rng.random() < 0.5
        found = "".join(stream(tokenizer, prompt, output, skip, rng))
        assert found == whole(tokenizer, prompt, output, skip), (prompt, output, skip)


def _bytes_of(tokenizer: Tokenizer) -> dict[int, int]:
    """Ids of the byte tokens 0x80–0xFF of the byte-level and byte-fallback families, by byte."""
    backend = tokenizer.backend
    assert backend is not None
    names = {0x80: "Ģ", 0x82: "Ĥ", 0xAC: "¬", 0xC3: "Ã", 0xE2: "â", 0xF0: "ð", 0x9F: "Ł", 0x98: "ĺ"}
    found = {}
    for value, name in names.items():
        token = backend.token_to_id(f"<0x{value:02X}>")
        found[value] = token if token is not None else backend.token_to_id(name)
    assert None not in found.values()
    return found


@pytest.mark.parametrize("family", ["byte_level", "byte_fallback"])
def test_runs_of_bytes(family: str, tokenizers: dict[str, Tokenizer], seed: int) -> None:
    """Nothing but bytes and letters, so that most windows end inside a character; byte-level must be exact."""
    tokenizer, rng = tokenizers[family], random.Random(seed)
    letters = tokenizer.encode("hello world", add_special_tokens=False)
    tokens = [*_bytes_of(tokenizer).values()] * 3 + letters
    for _ in range(600):
        prompt = [rng.choice(tokens) for _ in range(rng.choice([0, 1, 5]))]
        output = [rng.choice(tokens) for _ in range(rng.randint(1, 60))]
        found = "".join(stream(tokenizer, prompt, output, True, rng))
        expected = whole(tokenizer, prompt, output, True)
        if family == "byte_level":
            assert found == expected, (prompt, output)
        else:
            # The decoder takes back characters once their run of bytes turns invalid; text that was sent stays sent.
            assert _ascii(found) == _ascii(expected), (prompt, output)


def _ascii(text: str) -> str:
    return "".join(character for character in text if character < "\x80").strip()


def test_valid_byte_fallback_text_is_exact(tokenizers: dict[str, Tokenizer], seed: int) -> None:
    tokenizer, rng = tokenizers["byte_fallback"], random.Random(seed)
    alphabet = "ab c世界é😀🇨\u0301 \n"
    for _ in range(300):
        text = "".join(rng.choice(alphabet) for _ in range(rng.randint(1, 30)))
        prompt = tokenizer.encode(rng.choice(["", "say", "世", "x "]), add_special_tokens=True)
        output = tokenizer.encode(text, add_special_tokens=False)
        found = "".join(stream(tokenizer, prompt, output, True))
        assert found == whole(tokenizer, prompt, output, True), (text, prompt)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_piece_ends_inside_a_character(family: str, tokenizers: dict[str, Tokenizer]) -> None:
    """U+FFFD reaches the client only when the text has it; every piece is a whole number of characters."""
    tokenizer = tokenizers[family]
    for text in ("世界 😀 é€ 👩‍👩‍👧", "😀" * 30):
        ids = tokenizer.encode(text, add_special_tokens=False)
        if "\ufffd" in tokenizer.decode(ids, True) or tokenizer.decode(ids, True).strip() != text.strip():
            continue  # this vocabulary cannot spell the text
        pieces = stream(tokenizer, [], ids, True)
        assert not any("\ufffd" in piece for piece in pieces)
        assert pieces[-1] == ""
        assert "".join(pieces).strip() == text.strip()


def test_text_comes_as_soon_as_it_is_complete(byte_level: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(byte_level, [], True)
    value = _bytes_of(byte_level)
    assert [detokenizer.feed([value[byte]]) for byte in (0xE2, 0x82, 0xAC)] == ["", "", "€"]
    assert detokenizer.feed(byte_level.encode("a", add_special_tokens=False)) == "a"


def test_finish_shows_what_no_byte_will_complete(byte_level: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(byte_level, [], True)
    value = _bytes_of(byte_level)
    assert detokenizer.feed([value[0xF0], value[0x9F]]) == ""
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


def test_output_completes_the_character_the_prompt_began(byte_level: Tokenizer) -> None:
    """The library's own stream would repeat the prompt's text here."""
    value = _bytes_of(byte_level)
    prompt = [*byte_level.encode("price: ", add_special_tokens=False), value[0xE2]]
    output = [value[0x82], value[0xAC], *byte_level.encode("5", add_special_tokens=False)]
    assert "".join(stream(byte_level, prompt, output, True)) == "€5"


def test_first_word_keeps_its_space_after_a_prompt(tokenizers: dict[str, Tokenizer]) -> None:
    for family in ("byte_fallback", "metaspace"):
        tokenizer = tokenizers[family]
        prompt = tokenizer.encode("Hello", add_special_tokens=False)
        output = tokenizer.encode("world", add_special_tokens=False)
        assert "".join(stream(tokenizer, prompt, output, True)) == " world"
        assert "".join(stream(tokenizer, [], output, True)) == "world"
        # A chat ends in special tokens that have no text; what stands before them still counts.
        assert "".join(stream(tokenizer, [*prompt, *[2] * 20], output, True)) == " world"


@pytest.mark.parametrize("family", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("kind", ["invalid bytes", "skipped special tokens", "replacement characters", "emoji"])
def test_endless_incomplete_text_stays_linear(family: str, kind: str, tokenizers: dict[str, Tokenizer]) -> None:
    """A client can force any token with a bias. Eight times the ids may cost eight times the time, not sixty-four."""
    tokenizer = tokenizers[family]
    unit = {
        "invalid bytes": [_bytes_of(tokenizer)[0x80]],
        "skipped special tokens": [2],
        "replacement characters": tokenizer.encode("\ufffd", add_special_tokens=False),
        "emoji": tokenizer.encode("😀", add_special_tokens=False)[-4:],
    }[kind]

    def feeding(count: int) -> Work:
        detokenizer, ids = IncrementalDetokenizer(tokenizer, [], True), unit * count

        def work() -> None:
            detokenizer.feed(ids)
            assert len(detokenizer._window.context) + len(detokenizer._window.pending) <= 2 * MAX_PENDING

        return work

    assert growth(feeding, 2000, 16_000, most=24) < 24


def test_bytes_of_endless_invalid_text_arrive_while_it_goes_on(byte_level: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(byte_level, [], True)
    value = _bytes_of(byte_level)
    streamed = detokenizer.feed([value[0x80]] * 100)
    assert 90 <= len(streamed) < 100
    assert streamed + detokenizer.finish() == "\ufffd" * 100
