"""The vocabulary of the simulated model, and the real tokenizer around it: bytes, pieces of characters, words.

`text_of` is what a list of ids means, worked out without any tokenizer: their bytes in a row, read as UTF-8.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from core.text.tokenizer import Tokenizer
from tests.proofs.sim.reference import EOS, VOCAB

ASCII = bytes(range(0x20, 0x7F))
PIECES = tuple(bytes([byte]) for byte in sorted(set("é€😀ñ漢".encode())))
"""Bytes that are a character only together, and mostly come alone: what streams hold back."""
WORDS = ("the", " the", "of", "né", "€", "漢", "😀", "xyz", ", ", "\n", "stop", " st", "op", "ab", "b ", "ß")


def _pieces() -> list[bytes]:
    pieces = [bytes([byte]) for byte in ASCII] + list(PIECES)
    for number in range(VOCAB - len(EOS) - len(pieces)):
        word = WORDS[number % len(WORDS)]
        pieces.append((word + str(number // len(WORDS)) * (number >= len(WORDS))).encode())
    return pieces + [f"<e{token}>".encode() for token in EOS]


BYTES: tuple[bytes, ...] = tuple(_pieces())
"""Of each id."""
SPECIAL = frozenset(EOS)


def text_of(ids: Sequence[int], skip_special: bool = True) -> str:
    """What `ids` say, incomplete characters as U+FFFD."""
    return b"".join(BYTES[each] for each in ids if not (skip_special and each in SPECIAL)).decode("utf-8", "replace")


def ids_of(text: str) -> list[int]:
    """Of printable ASCII, one id per character."""
    return [ord(letter) - 0x20 for letter in text]


class _OffLoop(Tokenizer):
    """All texts take the way of long ones, on which other things happen before their ids are there.

    Those of the simulation are short, and would be encoded where they arrive.
    """

    def is_quick(self, chars: int) -> bool:
        """See `Tokenizer.is_quick`."""
        return False


@lru_cache(maxsize=1)
def tokenizer() -> Tokenizer:
    """The production tokenizer over a Rust tokenizer of this vocabulary; made once."""
    letters = _byte_letters()
    vocab = {"".join(letters[byte] for byte in piece): number for number, piece in enumerate(BYTES[: EOS[0]])}
    assert len(vocab) == EOS[0], "two ids of one meaning"
    rust = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    rust.decoder = decoders.ByteLevel()
    rust.add_special_tokens([BYTES[token].decode() for token in EOS])
    return _OffLoop(PreTrainedTokenizerFast(tokenizer_object=rust))


def _byte_letters() -> list[str]:
    """The printable letter that stands for each byte in a byte-level vocabulary, as GPT-2 has them."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters, others = [""] * 256, 0
    for byte in range(256):
        if byte in plain:
            letters[byte] = chr(byte)
        else:
            letters[byte] = chr(256 + others)
            others += 1
    return letters
