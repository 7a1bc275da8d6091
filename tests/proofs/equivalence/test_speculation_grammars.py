"""Constrained outputs with drafts are those without them: a draft behind which no mask was written does not count."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from core.executor import grammar_work
from core.sampling.grammar.registry import build_backend
from core.sampling.grammar.vocabulary import Vocabulary
from core.types.grammar import Grammar, Matcher, Words
from core.types.request import Req
from core.types.sampling_params import SamplingParams
from tests.proofs.constraints.asks import BACKENDS
from tests.proofs.constraints.test_grammars import ALL, EOS, WIDTH, tokenizer
from tests.proofs.equivalence.test_speculation import (
    CONTEXT,
    OUTPUTS,
    VOCAB,
    Setting,
    assert_same,
    both_ways,
    hash_model,
    requests,
)
from tests.proofs.happens_before.hash_model import HashModel
from tests.support.fakes.adversaries import ADVERSARIES, Says, always_right, like_a_coin
from tests.support.fakes.step_grammar import StepGrammar, StepMatcher, follows

SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.9, "frequency_penalty": 1.5},
    {"temperature": 1.0, "top_p": 0.8, "logprobs": True, "top_logprobs": 2},
)


def of_steps(seed: int) -> list[Req]:
    """Each with a grammar in which what may come next hangs on the token before and on how many there were."""
    made = requests(VOCAB, seed)
    for req in made:
        req.grammar = StepGrammar()
    return made


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("says", ADVERSARIES, ids=lambda each: each.__name__)
def test_no_draft_changes_a_constrained_output(says: Says, overlap: bool, seed: int) -> None:
    plain, speculated, drafter = both_ways(Setting(overlap=overlap), hash_model, lambda: of_steps(seed), says, VOCAB)
    assert_same(plain, speculated, of_steps(seed))
    assert all(follows(seen.tokens) for seen in speculated)
    assert (drafter.accepted > 0) == says.__name__.startswith(("always_right", "right_then"))


def test_constrained_rows_that_give_way_go_on_where_they_were(seed: int) -> None:
    setting = Setting(tokens=112, rows=6)
    plain, speculated, drafter = both_ways(setting, hash_model, lambda: of_steps(seed), like_a_coin(seed), VOCAB)
    assert_same(plain, speculated, of_steps(seed))
    assert drafter.accepted > 0


class Ending(StepMatcher):
    """Allows nothing more behind `most` tokens, and is complete then."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def _look(self) -> None:
        self.is_terminated = len(self.taken) >= self._most

    def fill(self, words: Words) -> bool:
        return not self.is_terminated and super().fill(words)

    def accept(self, token: int) -> bool:
        assert not self.is_terminated, "nothing follows a complete output"
        accepted = super().accept(token)
        self._look()
        return accepted

    def fork(self) -> Matcher:
        made = Ending(self._most)
        made.taken = [*self.taken]
        made._look()
        return made


class EndingGrammar(StepGrammar):
    def __init__(self, most: int) -> None:
        self._most = most

    def matcher(self) -> Matcher:
        return Ending(self._most)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("most", range(1, 9))
def test_an_output_that_is_complete_among_drafts_ends_there(most: int, overlap: bool, seed: int) -> None:
    """Drafts go on behind its end, as the drafter knows what another request said there."""

    def reqs() -> list[Req]:
        made = of_steps(seed)
        for req in made[::2]:
            req.grammar = EndingGrammar(most)
        return made

    plain, speculated, _ = both_ways(Setting(overlap=overlap), hash_model, reqs, always_right, VOCAB)
    assert_same(plain, speculated, reqs())
    assert all(len(seen.tokens) <= most for seen in speculated[::2])
    pairs = zip(reqs()[::2], speculated[::2], strict=True)
    assert any(len(seen.tokens) == most < req.max_new_tokens for req, seen in pairs)


@cache
def compiled(name: str, ends: tuple[int, ...]) -> Sequence[Grammar]:
    backend = build_backend(name, Vocabulary.of(tokenizer(), WIDTH, ends))
    return [backend.compile(constraint) for constraint in ALL]


def of_library(name: str, ends: tuple[int, ...], seed: int) -> list[Req]:
    rng = np.random.default_rng(seed)
    made = []
    for grammar in compiled(name, ends):
        for options in SAMPLINGS:
            prompt: npt.NDArray[np.int64] = rng.integers(3, WIDTH, rng.integers(1, 30))
            params = SamplingParams(stop_token_ids=ends, **options)
            req = Req(f"{len(made)}", 0, prompt, params, int(rng.integers(2**40)), OUTPUTS)
            req.grammar = grammar
            made.append(req)
    return made


@pytest.mark.parametrize("ends", [(EOS,), ()], ids=["end token", "none"])
@pytest.mark.parametrize("name", BACKENDS)
def test_outputs_of_libraries_are_equal(
    name: str, ends: tuple[int, ...], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A machine that stands still makes rows suspected, and these have no drafts.
    monkeypatch.setattr(grammar_work, "SUSPICIOUS_SECONDS", 60.0)
    monkeypatch.setattr(grammar_work, "free_seconds", lambda words: 60.0)
    reqs = lambda: of_library(name, ends, seed)  # noqa: E731
    plain, speculated, drafter = both_ways(Setting(), lambda: HashModel(WIDTH, CONTEXT), reqs, always_right, WIDTH)
    assert_same(plain, speculated, reqs())
    assert drafter.accepted > sum(len(seen.tokens) for seen in plain) / 4
