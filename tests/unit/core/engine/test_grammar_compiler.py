"""Constraints that several requests wait for: compiled once, for all of them, and no more at a time than the bound."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from functools import partial

import pytest
import pytest_asyncio

from core.config import GrammarConfig
from core.engine.grammar import bounded_work
from core.engine.grammar import compiler as grammar_compiler
from core.engine.grammar import library as grammar_library
from core.engine.grammar.compiler import GrammarCompiler
from core.engine.grammar.trial import GrammarTrial
from core.errors import Draining, InvalidRequest, Overloaded
from core.sampling.grammar.registry import Backend
from core.sampling.grammar.vocabulary import Vocabulary
from core.types.constraint import Constraint, ConstraintKind
from core.types.grammar import Grammar
from tests.proofs.constraints.test_grammars import EOS, WIDTH, set_up, tokenizer
from tests.support.within import within

pytest.importorskip("llguidance", reason="llguidance is not installed (extra [grammar])")

DIGITS = Constraint(ConstraintKind.REGEX, "[0-9]{3}")


class Examiner:
    """Stands for the process of the trial: lets a constraint pass once the gate is open."""

    def __init__(self) -> None:
        self.asked: list[Constraint] = []
        self.gate = asyncio.Event()
        self.ended = 0

    async def __call__(self, constraint: Constraint) -> int:
        self.asked.append(constraint)
        try:
            await self.gate.wait()
        finally:
            self.ended += 1
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


async def compiling_two(compiler: GrammarCompiler, examiner: Examiner) -> list[asyncio.Task[Grammar]]:
    """Have every process busy with a tenant's constraint."""
    tasks = [asyncio.create_task(compiler.grammar(regex(f"busy{i}"), "busy")) for i in range(2)]
    await until_asked(examiner, 2)
    return tasks


def regex(text: str) -> Constraint:
    return Constraint(ConstraintKind.REGEX, text)


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


async def test_more_than_the_bound_are_told_to_come_back(compiler: GrammarCompiler, examiner: Examiner) -> None:
    await compiling_two(compiler, examiner)
    waiting = [asyncio.create_task(compiler.grammar(regex(f"a{i}"))) for i in range(grammar_compiler.MAX_COMPILES)]
    await asyncio.sleep(0)
    beyond = asyncio.create_task(compiler.grammar(DIGITS))
    await asyncio.sleep(0)
    assert beyond.done(), "it waits like the others"
    with pytest.raises(Overloaded) as refused:
        await beyond
    assert refused.value.reason == "GRAMMAR_COMPILES"
    with pytest.raises(InvalidRequest):
        await compiler.grammar(regex(""))
    examiner.gate.set()
    await asyncio.gather(*waiting)
    await compiler.grammar(DIGITS)


async def test_cancelled_calls_leave_nothing_in_the_queue(compiler: GrammarCompiler, examiner: Examiner) -> None:
    busy = await compiling_two(compiler, examiner)
    gone = [asyncio.create_task(compiler.grammar(regex(f"gone{i}"), "hasty")) for i in range(60)]
    await asyncio.sleep(0)
    for task in gone:
        task.cancel()
    await asyncio.gather(*gone, return_exceptions=True)
    wanted = asyncio.create_task(compiler.grammar(DIGITS, "other"))
    examiner.gate.set()
    await asyncio.gather(wanted, *busy)
    assert [each.source for each in examiner.asked] == ["busy0", "busy1", DIGITS.source]
    assert not compiler._jobs and len(compiler._queue) == 0


async def test_what_nothing_waits_for_any_more_is_stopped(compiler: GrammarCompiler, examiner: Examiner) -> None:
    busy = await compiling_two(compiler, examiner)
    wanted = asyncio.create_task(compiler.grammar(DIGITS, "other"))
    await asyncio.sleep(0)
    assert examiner.ended == 0
    busy[0].cancel()
    await until_asked(examiner, 3)
    assert examiner.ended == 1 and examiner.asked[2] == DIGITS
    examiner.gate.set()
    await asyncio.gather(wanted, busy[1])


async def test_tenants_take_turns(compiler: GrammarCompiler, examiner: Examiner) -> None:
    await compiling_two(compiler, examiner)
    asked = [asyncio.create_task(compiler.grammar(regex(f"a{i}"), "a")) for i in range(6)]
    await asyncio.sleep(0)
    asked += [asyncio.create_task(compiler.grammar(regex(f"b{i}"), "b")) for i in range(2)]
    await asyncio.sleep(0)
    examiner.gate.set()
    await asyncio.gather(*asked)
    order = [each.source for each in examiner.asked[2:]]
    assert order == ["a0", "b0", "a1", "b1", "a2", "a3", "a4", "a5"]


async def test_a_full_queue_makes_room_for_the_tenant_with_less(compiler: GrammarCompiler, examiner: Examiner) -> None:
    await compiling_two(compiler, examiner)
    many = [asyncio.create_task(compiler.grammar(regex(f"a{i}"), "a")) for i in range(grammar_compiler.MAX_COMPILES)]
    await asyncio.sleep(0)
    few = asyncio.create_task(compiler.grammar(DIGITS, "b"))
    await asyncio.wait((few, many[-1]), return_when=asyncio.FIRST_COMPLETED)
    assert many[-1].done(), "the tenant with less was refused"
    with pytest.raises(Overloaded) as refused:
        await many[-1]
    assert refused.value.retry_after > 0 and not few.done()
    again = asyncio.create_task(compiler.grammar(regex("more"), "a"))
    with pytest.raises(Overloaded):
        await again
    examiner.gate.set()
    await asyncio.gather(few, *many[:-1])


async def test_a_full_queue_drops_no_constraint_that_a_shorter_line_waits_for_too(
    compiler: GrammarCompiler, examiner: Examiner
) -> None:
    await compiling_two(compiler, examiner)
    many = [asyncio.create_task(compiler.grammar(regex(f"a{i}"), "a")) for i in range(grammar_compiler.MAX_COMPILES)]
    await asyncio.sleep(0)
    shared = asyncio.create_task(compiler.grammar(regex(f"a{len(many) - 1}"), "b"))
    await asyncio.sleep(0)
    few = asyncio.create_task(compiler.grammar(DIGITS, "c"))
    dropped, _ = await asyncio.wait((shared, few, *many), return_when=asyncio.FIRST_COMPLETED)
    assert dropped == {many[-2]}
    with pytest.raises(Overloaded):
        await many[-2]
    examiner.gate.set()
    await asyncio.gather(shared, few, *many[:-2], many[-1])


async def test_a_full_queue_makes_no_room_that_would_be_taken_back(
    compiler: GrammarCompiler, examiner: Examiner
) -> None:
    """Of two lines that differ by one, each would be the shorter one in turn."""
    await compiling_two(compiler, examiner)
    fewer = (grammar_compiler.MAX_COMPILES - 1) // 2
    lines = {"a": fewer + 1, "b": fewer, "c": grammar_compiler.MAX_COMPILES - 2 * fewer - 1}
    names = [(f"{tenant}{number}", tenant) for tenant, count in lines.items() for number in range(count)]
    waiting = [asyncio.create_task(compiler.grammar(regex(name), tenant)) for name, tenant in names]
    await asyncio.sleep(0)
    more = asyncio.create_task(compiler.grammar(DIGITS, "b"))
    await asyncio.wait((more, *waiting), return_when=asyncio.FIRST_COMPLETED)
    assert more.done() and not any(each.done() for each in waiting)
    with pytest.raises(Overloaded):
        await more
    examiner.gate.set()
    await asyncio.gather(*waiting)


async def test_one_constraint_of_two_tenants_has_the_turn_of_the_first_to_come(
    compiler: GrammarCompiler, examiner: Examiner
) -> None:
    await compiling_two(compiler, examiner)
    many = [asyncio.create_task(compiler.grammar(regex(f"a{i}"), "a")) for i in range(5)]
    await asyncio.sleep(0)
    last = asyncio.create_task(compiler.grammar(regex("a4"), "b"))
    await asyncio.sleep(0)
    many[4].cancel()
    await asyncio.sleep(0)
    examiner.gate.set()
    await asyncio.gather(last, *many[:4])
    assert [each.source for each in examiner.asked[2:]] == ["a0", "a4", "a1", "a2", "a3"]


async def test_a_compile_that_never_began_gives_its_place_back(compiler: GrammarCompiler, examiner: Examiner) -> None:
    """Its caller goes while a place comes free for it: in some of these turns of the loop before its first step."""
    for turns in range(6):
        before = len(examiner.asked)
        busy = [asyncio.create_task(compiler.grammar(regex(f"busy{turns}{i}"))) for i in range(2)]
        await until_asked(examiner, before + 2)
        gone = asyncio.create_task(compiler.grammar(regex(f"gone{turns}")))
        await asyncio.sleep(0)
        busy[0].cancel()
        for _ in range(turns):
            await asyncio.sleep(0)
        for task in (gone, busy[1]):
            task.cancel()
        await asyncio.gather(gone, *busy, return_exceptions=True)
    examiner.gate.set()
    async with within(30, "a place is free"):
        await compiler.grammar(DIGITS)
    assert len(compiler._idle) == 2


class Burning:
    """A library that works on `constraint` until it is let go."""

    def __init__(self, library: Backend, constraint: Constraint) -> None:
        self._library, self._constraint = library, constraint
        self.let_go = threading.Event()

    def compile(self, constraint: Constraint) -> Grammar:
        while constraint == self._constraint and not self.let_go.is_set():
            pass
        return self._library.compile(constraint)


async def test_a_compile_in_this_process_has_an_end_too(examiner: Examiner, monkeypatch: pytest.MonkeyPatch) -> None:
    """It passed the trial and burns here. Others go on beside it, and it is waited for no longer than its seconds."""
    stuck, examiner.gate = Burning(set_up("llguidance", EOS)[0], DIGITS), asyncio.Event()
    examiner.gate.set()
    monkeypatch.setattr(grammar_library, "build_backend", lambda name, vocabulary: stuck)
    # However long a busy machine takes to let it burn so much.
    monkeypatch.setattr(bounded_work, "PATIENCE", 10_000)
    compiler = GrammarCompiler(
        GrammarConfig(compile_timeout=0.05), "llguidance", partial(Vocabulary.of, tokenizer(), WIDTH, (EOS,))
    )
    try:
        async with within(60, "the compile is given up"):
            with pytest.raises(InvalidRequest, match="too long to compile"):
                await compiler.grammar(DIGITS)
        assert compiler._library is not None and compiler._library.left_behind == 1
        await compiler.grammar(regex("[a-z]"))
    finally:
        stuck.let_go.set()
        await compiler.close()


async def test_nothing_begins_after_the_end(compiler: GrammarCompiler, examiner: Examiner) -> None:
    """Places of compiles that were ended come back, and no process may be started in them."""
    tasks = await compiling_two(compiler, examiner)
    await compiler.close()
    assert all(isinstance(each, Draining) for each in await asyncio.gather(*tasks, return_exceptions=True))
    async with within(30, "it is refused"):
        with pytest.raises(Draining):
            await compiler.grammar(regex("late"))
    assert len(examiner.asked) == 2
