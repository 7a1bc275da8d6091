"""Answers of one message that nobody reads: so many bytes of one caller wait, and a call beyond that is refused."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from core.errors import Overloaded
from service.limits import unread_answers
from service.limits.unread_answers import REASON, UnreadAnswers

ROOM = 100


class Deaf:
    """The context of a call whose client reads when the test says so."""

    def __init__(self) -> None:
        self.heard: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def write(self, _answer: bytes) -> None:
        await self.heard


@pytest.fixture(autouse=True)
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unread_answers, "MOST_BYTES", ROOM)


async def written(answers: UnreadAnswers, size: int) -> tuple[Deaf, asyncio.Task[None]]:
    context: Any = Deaf()
    task = asyncio.create_task(answers.write(context, bytes(size), seconds=3600.0))
    await asyncio.sleep(0)
    return context, task


async def test_what_finds_no_room_is_refused_and_room_comes_back() -> None:
    answers = UnreadAnswers()
    first, second = await written(answers, 60), await written(answers, 40)
    with pytest.raises(Overloaded) as refused:
        answers.refuse_if_full()
    assert refused.value.reason == REASON and refused.value.retry_after > 0
    first[0].heard.set_result(None)
    await first[1]
    answers.refuse_if_full()
    with pytest.raises(Overloaded):
        await (await written(answers, 61))[1]
    third = await written(answers, 60)
    assert not third[1].done()
    for _, task in (second, third):
        task.cancel()
    await asyncio.gather(second[1], third[1], return_exceptions=True)
    answers.refuse_if_full()


async def test_an_answer_larger_than_the_room_passes_alone() -> None:
    answers = UnreadAnswers()
    context, task = await written(answers, 3 * ROOM)
    assert not task.done()
    context.heard.set_result(None)
    await task
