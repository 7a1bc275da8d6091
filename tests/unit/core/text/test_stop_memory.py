"""What the stop strings of a request cost the server: memory while it runs, and the loop's time when it comes."""

from __future__ import annotations

import gc
import random
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from core.text.stop import StopMatcher
from core.types.sampling_params import MAX_STOP_STRING_CHARS, MAX_STOP_STRINGS

MAX_BYTES = 64 << 10
"""Of the largest stop strings that a request may have, themselves left out."""


def largest(rng: random.Random, letters: str) -> tuple[str, ...]:
    return tuple("".join(rng.choices(letters, k=MAX_STOP_STRING_CHARS)) for _ in range(MAX_STOP_STRINGS))


@contextmanager
def traced() -> Iterator[Callable[[], int]]:
    """Gives what says how many bytes were taken since, and are still held."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        yield lambda: tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("letters", ["ab", "abcdefghij", "\u4e16\u754c\u306e", "\U0001f300\U0001f301\U0001f302"])
def test_the_largest_stop_strings_take_few_bytes(letters: str) -> None:
    rng = random.Random(0)
    stops = largest(rng, letters)
    texts = [*(text[:-1] + "\n" for text in stops), "".join(rng.choices(letters, k=2000))]
    with traced() as held:
        matcher = StopMatcher(stops, False)
        for text in texts:
            # Everything that is worked out late.
            matcher.feed(text)
        assert held() < MAX_BYTES


def test_equal_stop_strings_share_and_the_last_matcher_frees_them() -> None:
    rng = random.Random(1)
    lists = [tuple("".join(list(text)) for text in stops) for stops in [largest(rng, "xyz")] * 8]
    with traced() as held:
        matchers = [StopMatcher(stops, bool(i % 2)) for i, stops in enumerate(lists)]
        assert held() < MAX_BYTES
        del matchers
        gc.collect()
        # Half of what one automaton takes; other threads of this process may have taken some kilobytes meanwhile.
        assert held() < MAX_BYTES // 4


def calls_of(work: Callable[[], object]) -> int:
    """Calls of functions, C ones included: what does not depend on the machine."""
    count = 0

    def counting(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counting)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def test_a_request_with_the_largest_comes_in_for_few_calls() -> None:
    """On the loop, between the steps: work for each string, and none for each of its characters."""
    stops = largest(random.Random(2), "abcdefghij")
    assert calls_of(lambda: StopMatcher(stops, False)) < 20 * MAX_STOP_STRINGS


def test_a_character_pays_for_one_level_at_most() -> None:
    stops = tuple("ab" * 127 + chr(0x100 + i) for i in range(MAX_STOP_STRINGS))
    matcher = StopMatcher(stops, False)
    worst = max(calls_of(partial(matcher.feed, character)) for character in "ab" * 127)
    assert worst < 20 * MAX_STOP_STRINGS
