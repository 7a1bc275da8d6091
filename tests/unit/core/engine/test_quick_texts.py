"""A few short texts are encoded on the loop; whatever may take longer is not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from core.engine.encodings import QUICK_TEXTS, Encodings
from core.engine.prompt_bounds import PromptBounds
from core.engine.workers import Workers
from core.errors import TextFailed
from core.text.failures import TextFailures
from core.text.tokenizer import Tokenizer
from core.types.io import TextPair
from tests.support.fakes.brittle_tokenizer import BrittleTokenizer
from tests.unit.core.engine.emulation import running

QUICK = 256
"""Characters."""


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each call of a tokenizer, whether it was made in the thread of this test."""
    here, seen = threading.current_thread(), list[bool]()
    for name in ("encode", "encode_within", "encode_pair"):
        whole = getattr(Tokenizer, name)

        def noted(self: Tokenizer, *given: Any, whole: Any = whole, **more: Any) -> Any:
            seen.append(threading.current_thread() is here)
            return whole(self, *given, **more)

        monkeypatch.setattr(Tokenizer, name, noted)
    return seen


@pytest.fixture
def texts(tokenizer: Tokenizer) -> Iterator[Encodings]:
    workers = Workers(2, "test")
    yield Encodings(tokenizer, PromptBounds(tokenizer.vocab_size, 2_000), workers, TextFailures())
    workers.close()


@pytest.mark.parametrize(
    ("chars", "on_loop"),
    [((QUICK,), True), ((QUICK + 1,), False), ((QUICK - 3, 1, 1, 1), True), ((QUICK - 3, 1, 1, 2), False)],
)
async def test_texts_that_are_short_together(
    texts: Encodings, threads: list[bool], chars: tuple[int, ...], on_loop: bool
) -> None:
    await texts.done([texts.whole("x" * each) for each in chars], "")
    assert threads == [on_loop] * len(chars)


async def test_not_more_of_them_than_a_few(texts: Encodings, threads: list[bool]) -> None:
    await texts.done([texts.whole("x")] * QUICK_TEXTS, "")
    assert threads == [True] * QUICK_TEXTS
    threads.clear()
    await texts.done([texts.whole("x")] * (QUICK_TEXTS + 1), "")
    assert threads == [False] * (QUICK_TEXTS + 1)


async def test_pairs_and_cut_texts_count_what_they_hold(texts: Encodings, threads: list[bool]) -> None:
    await texts.done([texts.pair(TextPair("x" * (QUICK - 1), "y"), 1)], "")
    await texts.done([texts.pair(TextPair("x" * QUICK, "y"), 1)], "")
    assert threads == [True, False]
    await texts.done([texts.cut("x" * QUICK)], "")
    assert threads[2:] == [True, True], "`encode_within` calls `encode`"


async def test_a_text_of_a_client(threads: list[bool], tokenizer: Tokenizer) -> None:
    async with running(tokenizer) as engine:
        threads.clear()
        for chars in (QUICK, QUICK + 1):
            await engine.tokenize("x" * chars, add_special_tokens=False)
    assert threads == [True, False]


async def test_a_tokenizer_in_python_is_never_called_on_the_loop(
    texts: Encodings, threads: list[bool], tokenizer: Tokenizer
) -> None:
    """It may take any time, and other threads hold its lock."""
    texts._tokenizer = BrittleTokenizer(tokenizer)
    await texts.done([texts.whole("x")], "")
    assert threads == [False]


@pytest.mark.parametrize("error", [SystemExit(1), asyncio.CancelledError("stray"), StopIteration()])
async def test_what_is_no_exception_ends_the_one_request(
    texts: Encodings, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fails(self: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
        raise error

    monkeypatch.setattr(Tokenizer, "encode", fails)
    async with running(tokenizer) as engine:
        for asked in (texts.done([texts.whole("x")], ""), engine.tokenize("x", add_special_tokens=False)):
            told: BaseException | None = None
            try:
                await asked
            except BaseException as what:  # SystemExit would end the test run
                told = what
            assert isinstance(told, TextFailed)
