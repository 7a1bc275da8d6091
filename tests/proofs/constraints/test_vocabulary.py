"""What every mask is cut to: ids that the model can sample, and no end token that was made up for the library."""

from __future__ import annotations

import numpy as np
import pytest
import tokenizers
from tokenizers.models import WordLevel

from core.sampling.grammar.vocabulary import Vocabulary

TOKENS = 70


def vocabulary(model_size: int, ends: tuple[int, ...]) -> Vocabulary:
    words = {f"w{number}": number for number in range(TOKENS)}
    return Vocabulary.of(tokenizers.Tokenizer(WordLevel(words, "w0")), model_size, ends)


@pytest.mark.parametrize("model_size", [40, 64, TOKENS, TOKENS + 1, 96, 130])
@pytest.mark.parametrize("ends", [(), (5,), (5, 39)])
def test_a_mask_allows_what_the_model_can_sample_and_no_end_of_our_own(model_size: int, ends: tuple[int, ...]) -> None:
    """Also where the made-up end has a number that the model has a logit for, as padded embeddings have."""
    made = vocabulary(model_size, ends)
    end = min(TOKENS, model_size)
    assert made.virtual_end == (not ends) and made.end_ids == (ends or (end,))
    assert made.size == max(model_size, ends == () and end + 1) and made.words % 2 == 0
    words = np.full((2, made.words), -1, np.int32)
    made.cut(words)
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
    possible = [token for token in range(model_size) if ends or token != end]
    assert all(np.flatnonzero(row).tolist() == possible for row in bits)


def test_marks_are_added_tokens_that_the_model_has() -> None:
    backend = tokenizers.Tokenizer(WordLevel({f"w{number}": number for number in range(TOKENS)}, "w0"))
    backend.add_tokens(["<a>"])
    backend.add_special_tokens(["<b>", "<c>"])
    assert Vocabulary.of(backend, TOKENS + 2, (5,)).marks == {"<a>": TOKENS, "<b>": TOKENS + 1}
    assert Vocabulary.of(backend, TOKENS + 2, ()).marks == {"<a>": TOKENS, "<b>": TOKENS + 1}
