"""Each library behind its interface, and the cache: what one request or ten thousand make of them."""

from __future__ import annotations

import json
import random
import re
import time
from functools import cache

import numpy as np
import pytest
import tokenizers

from core.engine.grammar.cache import BASE_BYTES, GrammarCache
from core.models.bundled import bundled_model_dir
from core.sampling.grammar.registry import Backend, GrammarError, build_backend
from core.sampling.grammar.trial import examine
from core.sampling.grammar.vocabulary import Vocabulary
from core.types.constraint import Constraint, ConstraintKind
from core.types.grammar import Matcher
from tests.proofs.constraints.asks import BACKENDS, CHOICES, EBNF, REGEX, SCHEMA

EOS = 2
WIDTH = 768
"""Logits, more than the tokenizer has tokens, as embeddings are often padded."""

ALL = (
    Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(SCHEMA)),
    Constraint(ConstraintKind.REGEX, REGEX),
    Constraint(ConstraintKind.EBNF, EBNF),
    Constraint.choice(CHOICES),
)


@cache
def tokenizer() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(bundled_model_dir() / "tokenizer.json"))


@cache
def set_up(name: str, *eos: int) -> tuple[Backend, Vocabulary]:
    vocabulary = Vocabulary.of(tokenizer(), WIDTH, eos)
    return build_backend(name, vocabulary), vocabulary


def allowed(matcher: Matcher, vocabulary: Vocabulary) -> list[int]:
    words = np.zeros(vocabulary.words, np.int32)
    some = matcher.fill(words)
    found = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
    assert some == bool(found)
    return found


def walk(matcher: Matcher, vocabulary: Vocabulary, rng: random.Random, most: int) -> list[int]:
    """Random allowed tokens up to an end token or `most`."""
    taken: list[int] = []
    while len(taken) < most and (choices := allowed(matcher, vocabulary)):
        taken.append(rng.choice(choices))
        assert matcher.accept(taken[-1])
        if taken[-1] == EOS:
            break
    return taken


@pytest.mark.parametrize("constraint", ALL, ids=lambda each: each.kind.value)
@pytest.mark.parametrize("name", BACKENDS)
def test_tokens_stay_in_the_vocabulary_and_forks_keep_theirs(name: str, constraint: Constraint, seed: int) -> None:
    rng = random.Random(seed)
    backend, vocabulary = set_up(name, EOS)
    matcher = backend.compile(constraint).matcher()
    start = allowed(matcher, vocabulary)
    taken = walk(matcher.fork(), vocabulary, rng, 6)
    assert all(token < tokenizer().get_vocab_size() for token in taken)
    for place, token in enumerate(taken):
        fork, again = matcher.fork(), backend.compile(constraint).matcher()
        assert all(again.accept(each) for each in taken[:place])
        assert allowed(matcher, vocabulary) == allowed(fork, vocabulary) == allowed(again, vocabulary)
        assert fork.accept(token) and fork.is_terminated == fork.fork().is_terminated
        assert matcher.accept(token)
    assert allowed(backend.compile(constraint).matcher(), vocabulary) == start


@pytest.mark.parametrize("name", BACKENDS)
def test_eos_is_allowed_where_the_grammar_ends_and_only_there(name: str) -> None:
    backend, vocabulary = set_up(name, EOS)
    matcher = backend.compile(Constraint(ConstraintKind.REGEX, "ab?")).matcher()
    assert EOS not in allowed(matcher, vocabulary)
    a, b = (tokenizer().encode(text, add_special_tokens=False).ids[0] for text in "ab")
    assert matcher.accept(a)
    assert EOS in allowed(matcher, vocabulary) and b in allowed(matcher, vocabulary) and not matcher.is_terminated
    assert matcher.accept(b)
    assert allowed(matcher, vocabulary) == [EOS] and matcher.is_terminated


@pytest.mark.parametrize("name", BACKENDS)
def test_a_model_without_eos_ends_by_termination(name: str, seed: int) -> None:
    rng = random.Random(seed)
    backend, vocabulary = set_up(name)
    grammar = backend.compile(Constraint(ConstraintKind.REGEX, REGEX))
    for _ in range(5):
        matcher = grammar.matcher()
        taken = walk(matcher, vocabulary, rng, 50)
        assert max(taken) < WIDTH and re.fullmatch(REGEX, tokenizer().decode(taken))
        assert matcher.is_terminated and matcher.failure is None


@pytest.mark.parametrize("name", BACKENDS)
def test_a_foreign_token_is_a_failure_of_that_matcher_alone(name: str) -> None:
    backend, _ = set_up(name, EOS)
    grammar = backend.compile(Constraint(ConstraintKind.REGEX, "a+"))
    one, other = grammar.matcher(), grammar.matcher()
    wrong = tokenizer().encode("b", add_special_tokens=False).ids[0]
    a = tokenizer().encode("a", add_special_tokens=False).ids[0]
    assert list(grammar.accept_all([one, other], [wrong, a])) == [False, True]
    assert one.failure is not None and other.failure is None
    words = np.zeros((1, grammar.words), np.int32)
    assert grammar.fill_all([other], words).tolist() == [True]
    assert EOS in np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))


@pytest.mark.parametrize("name", BACKENDS)
def test_what_cannot_be_met_is_found_by_the_trial(name: str) -> None:
    backend, vocabulary = set_up(name, EOS)
    for source in ('{"type": "no such"}', '{"$ref": "#/nowhere"}'):
        with pytest.raises(GrammarError):
            backend.compile(Constraint(ConstraintKind.JSON_SCHEMA, source))
        assert "error" in examine(backend, vocabulary, Constraint(ConstraintKind.JSON_SCHEMA, source))
    assert examine(backend, vocabulary, ALL[0])["bytes"] >= 0


def test_ten_thousand_schemas_stay_within_the_bytes() -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed (extra [grammar])")
    backend, _ = set_up("llguidance", EOS)
    cache_ = GrammarCache(4 << 20)
    began, most = time.monotonic(), 0
    for number in range(10_000):
        constraint = Constraint(ConstraintKind.JSON_SCHEMA, json.dumps({"const": f"value {number}"}))
        cache_.put(constraint, backend.compile(constraint), 0)
        most = max(most, cache_.used_bytes)
    print(f"{time.monotonic() - began:.1f} s, {len(cache_)} kept, {cache_.evictions} given up")
    assert most <= 4 << 20 and len(cache_) <= (4 << 20) // BASE_BYTES
    assert cache_.evictions == 10_000 - len(cache_)
    assert cache_.get(Constraint(ConstraintKind.JSON_SCHEMA, json.dumps({"const": "value 9999"}))) is not None
    assert cache_.get(Constraint(ConstraintKind.JSON_SCHEMA, json.dumps({"const": "value 0"}))) is None


def test_one_that_is_larger_than_the_cache_is_not_kept_and_drives_nobody_out() -> None:
    class Nothing:
        """A grammar that is only held."""

    cache_ = GrammarCache(1 << 20)
    small, large = Constraint(ConstraintKind.REGEX, "a"), Constraint(ConstraintKind.REGEX, "b")
    cache_.put(small, Nothing(), 0)  # type: ignore[arg-type]
    cache_.put(large, Nothing(), 2 << 20)  # type: ignore[arg-type]
    assert cache_.get(small) is not None and cache_.get(large) is None and cache_.evictions == 0
