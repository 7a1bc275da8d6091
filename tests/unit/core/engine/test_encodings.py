"""Short texts share their way through a thread, and each is refused by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from core.engine.encodings import LONG_CHARS, TOGETHER_CHARS, Encoding, Encodings, Outcome, together
from core.engine.prompt_bounds import CHARS_PER_TOKEN, PromptBounds
from core.engine.workers import Workers
from core.errors import InvalidRequest, TextFailed
from core.text.failures import TextFailures
from core.text.tokenizer import Tokenizer
from core.types.io import TextPair

SURROGATE = "\ud800"


class Noted(Workers):
    """Two threads, and what was asked of them."""

    def __init__(self) -> None:
        super().__init__(2, "test")
        self.turns = list[tuple[int, str, bool]]()

    async def run(self, function: Callable[..., Any], *args: Any, caller: str = "", long: bool = False) -> Any:
        self.turns.append((len(args[0]), caller, long))
        return await super().run(function, *args, caller=caller, long=long)


@pytest.fixture
def workers() -> Any:
    made = Noted()
    yield made
    made.close()


def encodings(tokenizer: Tokenizer, workers: Workers, most: int = 2_000, vocab: int | None = None) -> Encodings:
    bounds = PromptBounds(vocab or tokenizer.vocab_size, most)
    return Encodings(tokenizer, bounds, workers, TextFailures())


def of_chars(*chars: int) -> list[Encoding]:
    return [Encoding(each, lambda: [1], lambda found: np.asarray(found)) for each in chars]


@pytest.mark.parametrize(
    ("chars", "want"),
    [
        ((), []),
        ((LONG_CHARS + 1,), [1]),
        ((TOGETHER_CHARS - 5, 5), [2]),
        ((TOGETHER_CHARS - 5, 6), [1, 1]),
        ((1, TOGETHER_CHARS, 1, 1), [1, 1, 2]),
        ((LONG_CHARS + 1, 1, 1, LONG_CHARS + 1, 1), [1, 2, 1, 1]),
        ((10,) * 2_000, [819, 819, 362]),
    ],
)
def test_as_many_neighbours_share_a_turn_as_have_few_characters(chars: Sequence[int], want: Sequence[int]) -> None:
    given = of_chars(*chars)
    found = list(together(given))
    assert [len(each) for each in found] == want
    assert [each for some in found for each in some] == given


async def test_many_short_texts_are_one_turn_and_a_long_one_says_so(tokenizer: Tokenizer, workers: Noted) -> None:
    texts = encodings(tokenizer, workers, 100_000)
    some = [f"text {number}" for number in range(128)]
    done = await texts.done([texts.whole(each) for each in some], "one")
    assert workers.turns == [(128, "one", False)]
    for text, ids in zip(some, done, strict=True):
        assert isinstance(ids, np.ndarray) and ids.dtype == np.int64
        assert ids.tolist() == tokenizer.encode(text, add_special_tokens=True)
    workers.turns.clear()
    some = ["a" * 300, "b" * (LONG_CHARS + 1), "c" * 300]
    await texts.done([texts.whole(each) for each in some], "two")
    assert workers.turns == [(1, "two", False), (1, "two", True), (1, "two", False)]


async def test_another_caller_has_its_turn_between_two_of_many(tokenizer: Tokenizer, workers: Noted) -> None:
    """What shares a turn is bounded, so a request of many texts holds up no other caller for all of them."""
    texts = encodings(tokenizer, workers, 100_000)
    many = [texts.whole("x" * (TOGETHER_CHARS // 2)) for _ in range(60)]
    order = list[str]()

    async def ask(name: str, given: Sequence[Encoding]) -> None:
        await texts.done(given, name)
        order.append(name)

    await asyncio.gather(ask("many", many), ask("few", [texts.whole("y" * 300)]))
    assert order == ["few", "many"]
    assert [name for _, name, _ in workers.turns].count("many") == 30


def fields_of(outcome: Outcome) -> list[str]:
    """What is wrong with a text; nothing where there are ids."""
    return [each.field for each in outcome.violations] if isinstance(outcome, InvalidRequest) else []


async def test_each_text_is_refused_by_itself(tokenizer: Tokenizer, workers: Noted) -> None:
    texts = encodings(tokenizer, workers, 20)
    good, long = "fine", "x" * 60
    for many in (1, 2):
        done = await texts.done([texts.whole(each) for each in (good, SURROGATE, long, good)] * many, "")
        assert [fields_of(each) for each in done] == [[], ["text"], ["text"], []] * many
    assert workers.turns == [(8, "", False)]
    with pytest.raises(InvalidRequest, match="at most 1344 characters"):
        texts.whole("x" * (21 * CHARS_PER_TOKEN + 1))
    (paired,) = await texts.done([texts.pair(TextPair(good, SURROGATE), 2)], "")
    assert fields_of(paired) == ["pair"]


async def test_ids_without_a_logit_are_refused_behind_the_thread(tokenizer: Tokenizer, workers: Noted) -> None:
    texts = encodings(tokenizer, workers, 20, vocab=5)
    (found,) = await texts.done([texts.whole("some text")], "")
    assert isinstance(found, InvalidRequest) and "the model has no logits" in str(found)


async def test_a_tokenizer_that_fails_ends_the_request(tokenizer: Tokenizer, workers: Noted) -> None:
    texts = encodings(tokenizer, workers)

    def fails() -> Any:
        raise RuntimeError("secret")

    with pytest.raises(TextFailed) as failed:
        await texts.done([*of_chars(1, 1), Encoding(1, fails, lambda found: found)], "")
    assert "secret" not in str(failed.value)


def test_bounds_of_characters_come_before_the_tokenizer(tokenizer: Tokenizer, workers: Noted) -> None:
    texts = encodings(tokenizer, workers, 20)
    most = 21 * CHARS_PER_TOKEN
    assert texts.whole("x" * most).chars == most
    assert texts.pair(TextPair("abc", "de"), 1).chars == 5
    for refused in (
        lambda: texts.cut("q" * (most + 1) + "d", (most + 1, most + 2)),
        lambda: texts.pair(TextPair("x" * most, "y"), 1),
        lambda: texts.pair(TextPair("x" * (most + 1), "y"), 1, cut=True),
    ):
        with pytest.raises(InvalidRequest, match=f"at most {most} characters"):
            refused()


def test_types_that_the_model_does_not_know_are_its_last(tokenizer: Tokenizer, workers: Noted) -> None:
    size = tokenizer.vocab_size
    pair = encodings(tokenizer, workers, 20).pair(TextPair("a", "b"), 2)
    assert pair.ids(([3, 4, 5], [0, 1, 2])).tolist() == [3, 4 + size, 5 + size]
