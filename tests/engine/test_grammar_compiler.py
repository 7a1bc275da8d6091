"""Constraints that several requests wait for: compiled once, for all of them, and no more at a time than the bound."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial

import pytest
import pytest_asyncio

from core.config import GrammarConfig
from core.engine import grammar_compiler
from core.engine.grammar_compiler import GrammarCompiler
from core.engine.grammar_trial import GrammarTrial
from core.errors import InvalidRequest, Overloaded
from core.sampling.grammar.vocabulary import Vocabulary
from core.types.constraint import Constraint, ConstraintKind
from tests.constraints.test_grammars import EOS, WIDTH, tokenizer
from tests.fakes.within import within

pytest.importorskip("llguidance", reason="llguidance is not installed (extra [grammar])")

DIGITS = Constraint(ConstraintKind.REGEX, "[0-9]{3}")


class Examiner:
    """Stands for the process of the trial: lets a constraint pass once the gate is open."""

    def __init__(self) -> None:
        self.asked: list[Constraint] = []
        self.gate = asyncio.Event()

    async def __call__(self, constraint: Constraint) -> int:
        self.asked.append(constraint)
        await self.gate.wait()
        return 100


@pytest_asyncio.fixture
async def examiner(monkeypatch: pytest.MonkeyPatch) -> Examiner:
    made = Examiner()
    monkeypatch.setattr(GrammarTrial, "examine", lambda trial, constraint: made(constraint))
    return made


@pytest_asyncio.fixture
async def compiler(examiner: Examiner) -> AsyncIterator[GrammarCompiler]:
    made = GrammarCompiler(GrammarConfig(), "llguidance", partial(Vocabulary.of, tokenizer(), WIDTH, (EOS,)))
    yield made
    await made.close()


async def until_asked(examiner: Examiner, count: int) -> None:
    async with within(30, "the constraints are examined"):
        while len(examiner.asked) < count:
            await asyncio.sleep(0)


async def test_a_waiter_that_gives_up_leaves_the_work_to_the_others(
    compiler: GrammarCompiler, examiner: Examiner
) -> None:
    gone, other = (asyncio.create_task(compiler.grammar(DIGITS)) for _ in range(2))
    await until_asked(examiner, 1)
    gone.cancel()
    examiner.gate.set()
    found = await asyncio.gather(gone, other, return_exceptions=True)
    assert isinstance(found[0], asyncio.CancelledError) and not isinstance(found[1], BaseException), found
    assert await compiler.grammar(DIGITS) is found[1] and examiner.asked == [DIGITS]


async def test_more_than_the_bound_are_told_to_come_back(
    compiler: GrammarCompiler, examiner: Examiner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_compiler, "MAX_COMPILES", 2)
    constraints = [Constraint(ConstraintKind.REGEX, text) for text in ("a", "b", "c")]
    first = [asyncio.create_task(compiler.grammar(each)) for each in constraints[:2]]
    await until_asked(examiner, 2)
    third = asyncio.create_task(compiler.grammar(constraints[2]))
    await asyncio.sleep(0)
    assert third.done(), "it waits like the others"
    with pytest.raises(Overloaded) as refused:
        await third
    assert refused.value.reason == "GRAMMAR_COMPILES"
    with pytest.raises(InvalidRequest):
        await compiler.grammar(Constraint(ConstraintKind.REGEX, ""))
    examiner.gate.set()
    await asyncio.gather(*first)
    await compiler.grammar(constraints[2])
