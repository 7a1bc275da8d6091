"""A constraint that quotes a special token is met in ordinary tokens, and in such as the model has logits for."""

from __future__ import annotations

import json
import random
import re

import numpy as np
import pytest
import tokenizers
from tokenizers.models import BPE, Unigram, WordPiece

from core.sampling.grammar.registry import build_backend
from core.sampling.grammar.spelling import spelling_of
from core.sampling.grammar.vocabulary import Vocabulary
from core.types.constraint import Constraint, ConstraintKind
from tests.proofs.constraints.asks import BACKENDS
from tests.proofs.constraints.test_grammars import EOS, WIDTH, set_up, tokenizer, walk

SPECIAL = {token.content for token in tokenizer().get_added_tokens_decoder().values() if token.special}
END = tokenizer().id_to_token(EOS)

QUOTING = {
    "choice": (Constraint.choice([f"{END}x"]), re.escape(f"{END}x")),
    "choice-of-two": (Constraint.choice([f"a{END}x", "bq"]), re.escape(f"a{END}x") + "|bq"),
    "regex": (Constraint(ConstraintKind.REGEX, rf"([a-c]<\|bos\|>x|q{re.escape(END)}){{2}}"), None),
    "schema": (
        Constraint(ConstraintKind.JSON_SCHEMA, json.dumps({"const": f"{END}</s><|bos|>"})),
        re.escape(json.dumps(f"{END}</s><|bos|>")),
    ),
    "ebnf": (Constraint(ConstraintKind.EBNF, f'root ::= "a<|bos|>b" "{END}"'), re.escape(f"a<|bos|>b{END}")),
}


@pytest.mark.parametrize("case", QUOTING)
@pytest.mark.parametrize("name", BACKENDS)
def test_quoted_special_tokens_are_spelled_out(name: str, case: str, seed: int) -> None:
    assert {"<|bos|>", END} <= SPECIAL
    backend, vocabulary = set_up(name, EOS)
    constraint, pattern = QUOTING[case]
    grammar = backend.compile(constraint)
    for number in range(4):
        taken = walk(grammar.matcher(), vocabulary, random.Random(seed + number), 80)
        text = tokenizer().decode(taken[:-1], skip_special_tokens=False)
        assert taken[-1] == EOS and re.fullmatch(pattern or constraint.source, text), (seed, text)
        assert not {tokenizer().id_to_token(token) for token in taken[:-1]} & SPECIAL


@pytest.mark.parametrize("name", BACKENDS)
def test_free_text_has_no_special_tokens(name: str) -> None:
    backend, vocabulary = set_up(name, EOS)
    words = np.zeros(vocabulary.words, np.int32)
    assert backend.compile(Constraint(ConstraintKind.REGEX, r"[^x]+")).matcher().fill(words)
    allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
    assert len(allowed) > 50 and not {tokenizer().id_to_token(int(token)) for token in allowed} & SPECIAL


@pytest.mark.parametrize("name", BACKENDS)
def test_text_is_spelled_in_tokens_that_have_a_logit(name: str, seed: int) -> None:
    """The tokenizer would take one token beyond the logits where the model has two for the same text."""
    newest = tokenizer().get_vocab_size() - 1
    text = tokenizer().decode([newest])
    assert tokenizer().encode(text, add_special_tokens=False).ids == [newest]
    vocabulary = Vocabulary.of(tokenizer(), newest, (EOS,))
    grammar = build_backend(name, vocabulary).compile(Constraint.choice([text]))
    taken = walk(grammar.matcher(), vocabulary, random.Random(seed), 40)
    assert taken[-1] == EOS and tokenizer().decode(taken[:-1]) == text and max(taken) < newest


def test_a_text_is_split_as_before_where_no_special_token_is_quoted() -> None:
    copy = spelling_of(tokenizer(), WIDTH)
    for text in ("the quick brown fox", "27+45=72", " a  b\n", "zażółć 漢字"):
        assert copy.encode(text, add_special_tokens=False).ids == tokenizer().encode(text, add_special_tokens=False).ids


MODELS = (
    Unigram([("<unk>", 0.0), ("<s>", 0.0), ("a", -1.0), ("b", -1.5), ("ab", -1.0)], 0, False),
    WordPiece({"<unk>": 0, "<s>": 1, "a": 2, "##b": 3, "##bb": 4}, unk_token="<unk>"),
    BPE(
        {"<unk>": 0, "<s>": 1, "a": 2, "##b": 3, "a##b": 4, "ab": 5},
        [("a", "##b")],
        unk_token="<unk>",
        continuing_subword_prefix="##",
    ),
)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: type(model).__name__)
def test_every_kind_of_model_loses_its_newest_token(model: tokenizers.models.Model) -> None:
    made = tokenizers.Tokenizer(model)
    made.add_special_tokens(["<unk>", "<s>"])
    before = made.encode("abb").ids
    size = made.get_vocab_size()
    whole, narrow = spelling_of(made, size), spelling_of(made, size - 1)
    assert whole.encode("abb").ids == before and narrow.get_vocab_size() == size - 1
    assert max(narrow.encode("abb").ids) < size - 1
    assert whole.id_to_token(1) != "<s>" and whole.get_added_tokens_decoder()[1].special
    assert made.encode("<s>").ids == [1] and 1 not in whole.encode("<s>").ids
