"""Tokenizers without a Rust backend: what `decode` promises of ids that only the model has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PythonBackend

from core.errors import InvalidRequest
from core.text.detokenizer import IncrementalDetokenizer
from core.text.tokenizer import Tokenizer

PIECES = ("<unk>", "<s>", "</s>", "▁Hello", ",", "▁wor", "ld", "�", "�")
"""As of a SentencePiece model: the last two, parts of a character, have one text between them."""
HOLE, SIZE = 9, 12
TEXT_IDS = [3, 4, 5, 6]


class Pieces(PythonBackend):
    """SentencePiece's habits: an id past its end raises, one in a hole is the unknown token."""

    def __init__(self, **rest: Any) -> None:
        super().__init__(unk_token="<unk>", bos_token="<s>", eos_token="</s>", **rest)

    @property
    def vocab_size(self) -> int:
        return SIZE

    def __len__(self) -> int:
        return SIZE

    def get_vocab(self) -> dict[str, int]:
        return {piece: index for index, piece in enumerate(PIECES)}

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        return [f"▁{word}" for word in text.split()]

    def _convert_token_to_id(self, token: str) -> int:
        return self.get_vocab().get(token, 0)

    def _convert_id_to_token(self, index: int) -> str:
        if not 0 <= index < SIZE:
            raise IndexError("piece id is out of range.")
        return PIECES[index] if index < len(PIECES) else "<unk>"

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens).replace("▁", " ").strip()


@pytest.fixture
def pieces() -> Tokenizer:
    tokenizer = Tokenizer(Pieces())
    assert tokenizer.backend is None
    return tokenizer


@pytest.mark.parametrize("unknown", [HOLE, SIZE - 1, SIZE, 10**6, -1, 2**40])
def test_a_python_tokenizer_passes_over_ids_it_does_not_know(pieces: Tokenizer, unknown: int) -> None:
    for place in range(len(TEXT_IDS) + 1):
        ids = [*TEXT_IDS[:place], unknown, *TEXT_IDS[place:]]
        assert pieces.decode(ids, True) == pieces.decode(ids, False) == "Hello, world"
        detokenizer = IncrementalDetokenizer(pieces, [1], True)
        assert detokenizer.feed(ids) + detokenizer.finish() == "Hello, world"
    assert pieces.decode([unknown], False) == ""


def test_ids_that_share_their_text_are_both_known(pieces: Tokenizer) -> None:
    """`get_vocab` has one of them only."""
    assert pieces.decode([7], False) == pieces.decode([8], False) == "�"


def test_special_tokens_are_known_and_skipped(pieces: Tokenizer) -> None:
    assert pieces.decode([1, *TEXT_IDS, 2], True) == "Hello, world"
    assert pieces.decode([1, 3], False) == "<s> Hello"
    assert pieces.decode([0], False) == "<unk>"


def test_ids_beyond_byt5_add_nothing(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["pure_python"]
    ids = tokenizer.encode("naïve", False)
    assert tokenizer.decode([*ids[:3], tokenizer.vocab_size, *ids[3:], 10**6], True) == "naïve"


def test_a_python_tokenizer_cuts_the_end_and_of_a_pair_the_second_text(families: dict[str, Path]) -> None:
    theirs, ours = AutoTokenizer.from_pretrained(families["pure_python"]), Tokenizer.load(families["pure_python"])
    assert ours.backend is None
    ids, types = ours.encode_pair("abcdef", "ghijklmn", 12)
    assert ids == theirs("abcdef", "ghijklmn", truncation="only_second", max_length=12)["input_ids"]
    assert len(ids) == len(types) == 12
    assert ours.encode_within("abcdef", 4) == theirs("abcdef", truncation=True, max_length=4)["input_ids"]
    with pytest.raises(InvalidRequest, match="cannot say which tokens may be cut"):
        ours.encode_within("abcdef", 4, (1, 5))
