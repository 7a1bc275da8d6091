"""Hundreds of random constraints: what a library lets through is what `re` and `jsonschema` let through, and what is
broken is refused by the name of its field, within its time.
"""

from __future__ import annotations

import random
import time
from collections import Counter

import numpy as np
import pytest

from core.errors import InvalidRequest, RequestFailed
from core.sampling.grammar.registry import GrammarError
from core.text.tokenizer import Tokenizer
from core.types.constraint import Constraint, ConstraintKind
from core.types.grammar import Matcher
from tests.proofs.constraints.asks import BACKENDS
from tests.proofs.constraints.random_constraints import draw, spoil
from tests.proofs.constraints.test_endings import ask
from tests.proofs.constraints.test_grammars import EOS, set_up, tokenizer
from tests.unit.core.engine.emulation import running

COUNT, WALKS, LONGEST = 150, 2, 120
BROKEN = 40
SLOWEST = 10.0
"""Seconds of the processor for one compile; the server's own bound kills it after three of the clock."""


def walk(matcher: Matcher, words: int, rng: random.Random) -> list[int] | None:
    """Random allowed tokens, the end as soon as it may come half of the time; None if there was no end."""
    taken: list[int] = []
    while len(taken) < LONGEST:
        mask = np.zeros(words, np.int32)
        assert matcher.fill(mask), (matcher.failure, taken)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        if EOS in allowed and (len(allowed) == 1 or rng.random() < 0.5):
            assert matcher.accept(EOS)
            return taken
        # Single characters would rarely come to an end.
        taken.append(rng.choice([token for token in allowed if token != EOS]))
        assert matcher.accept(taken[-1]), taken
    return None


@pytest.mark.parametrize("name", BACKENDS)
def test_what_passes_meets_the_constraint(name: str, seed: int) -> None:
    rng = random.Random(seed)
    backend, vocabulary = set_up(name, EOS)
    outcomes: Counter[str] = Counter()
    for _ in range(COUNT):
        judged = draw(rng)
        assert not judged.constraint.violations()
        kind = judged.constraint.kind.value
        began = time.thread_time()
        try:
            grammar = backend.compile(judged.constraint)
        except GrammarError:
            outcomes[f"{kind} refused"] += 1
            continue
        assert time.thread_time() - began < SLOWEST, judged.constraint
        for _ in range(WALKS):
            taken = walk(grammar.matcher(), vocabulary.words, rng)
            outcomes[f"{kind} {'met' if taken is not None else 'without end'}"] += 1
            if taken is not None:
                text = tokenizer().decode(taken, skip_special_tokens=False)
                assert judged.meets(text), (judged.constraint, text)
    print(f"{name}: {dict(sorted(outcomes.items()))}")
    # Calls and tags have walks of their own.
    for kind in set(ConstraintKind) - {ConstraintKind.CALLS, ConstraintKind.STRUCTURAL_TAGS}:
        met, refused = outcomes[f"{kind.value} met"], outcomes[f"{kind.value} refused"]
        assert met >= 10 and refused * WALKS < met, outcomes


@pytest.mark.parametrize("name", BACKENDS)
def test_batches_of_different_grammars_agree_with_each_alone(name: str, seed: int) -> None:
    """One call for many rows gives the bits of one call per row, and takes the same tokens."""
    rng = random.Random(seed)
    backend, vocabulary = set_up(name, EOS)
    grammars = []
    while len(grammars) < 12:
        try:
            grammars.append(backend.compile(draw(rng).constraint))
        except GrammarError:
            continue
    together, alone = ([grammar.matcher() for grammar in grammars] for _ in range(2))
    for _ in range(12):
        words = np.zeros((len(grammars), vocabulary.words), np.int32)
        some = grammars[0].fill_all(together, words)
        for place, matcher in enumerate(alone):
            mask = np.zeros(vocabulary.words, np.int32)
            assert matcher.fill(mask) == some[place]
            assert np.array_equal(mask, words[place]) or not some[place], place
        tokens = [rng.choice(np.flatnonzero(_bits(row)).tolist() or [EOS]) for row in words]
        accepted = list(grammars[0].accept_all(together, tokens))
        assert accepted == [matcher.accept(token) for matcher, token in zip(alone, tokens, strict=True)]
        going = [place for place, fine in enumerate(accepted) if fine and tokens[place] != EOS]
        together, alone = [together[i] for i in going], [alone[i] for i in going]
        grammars = [grammars[i] for i in going]
        if not going:
            break


def _bits(words: np.ndarray) -> np.ndarray:
    return np.unpackbits(words.view(np.uint8), bitorder="little")


async def test_broken_ones_are_refused_by_the_name_of_their_field(served_tokenizer: Tokenizer, seed: int) -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed (extra [grammar])")
    rng = random.Random(seed)
    refused: Counter[str] = Counter()
    async with running(served_tokenizer) as engine:
        for _ in range(BROKEN):
            broken: Constraint = spoil(rng, draw(rng).constraint)
            while broken.kind is ConstraintKind.CHOICE:
                # Choices are a list in the API, and cannot be broken as a text.
                broken = spoil(rng, draw(rng).constraint)
            try:
                await ask(engine, broken, 8)
            except InvalidRequest as error:
                assert [each.field for each in error.violations] == [f"constraint.{broken.kind.value}"], broken
                refused[broken.kind.value] += 1
            except RequestFailed:
                refused["while it ran"] += 1
        tokens, _ = await ask(engine, Constraint(ConstraintKind.REGEX, "[0-9]{3}"), 8)
        assert tokens and not any(engine.stats.assert_failures.values())
    print(f"refused: {dict(refused)}")
    assert refused.total() >= 5
