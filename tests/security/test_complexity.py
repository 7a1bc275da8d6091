"""Twice the input takes about twice the time, for every text that makes naive code quadratic; and never on the loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from core.errors import InvalidRequest
from core.text.detokenizer import IncrementalDetokenizer
from core.text.stop import StopMatcher
from core.text.tokenizer import Tokenizer
from core.types.chat import ChatMessage
from service.client import CallFailed
from tests.security.neighbour import beside
from tests.support.scorecard import Scorecard
from tests.support.servers import serve_checkpoint

pytestmark = pytest.mark.alone

RATIO = 3.0
"""Per doubling, on average over `DOUBLINGS`: linear work has 2 and quadratic work 4."""
DOUBLINGS = 3
RUNS = 5
ENOUGH_SECONDS = 0.004
"""Below this a clock's grain and the constant part blur the ratio; sizes are doubled until one run takes as long."""

MAX_CHARS = 1 << 21


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> Tokenizer:
    return Tokenizer.load(tiny)


def seconds(work: Callable[[int], object], size: int, enough: float = 0.0) -> float:
    """The best of some runs, in CPU time of this thread: the other core's work does not count.

    No further ones are made once one took at most `enough`.
    """
    best = float("inf")
    for _ in range(RUNS):
        before = time.thread_time()
        work(size)
        best = min(best, time.thread_time() - before)
        if best <= enough:
            break
    return best


def ratio_over(work: Callable[[int], object], size: int, doublings: int) -> float:
    """time(2n) / time(n) on average from `size` on; that of the larger need not be its best, if it is well below."""
    small = seconds(work, size)
    large = seconds(work, size << doublings, small * (0.85 * RATIO) ** doublings)
    return float((large / small) ** (1 / doublings))


def growth(work: Callable[[int], object], size: int) -> float:
    """time(2n) / time(n) on average from n to 8n, with n at least `size`."""
    while seconds(work, size, ENOUGH_SECONDS) < ENOUGH_SECONDS and size < MAX_CHARS:
        size *= 2
    return ratio_over(work, size, DOUBLINGS)


TOKENISED_DOUBLINGS = 5
"""From 4,096 to 131,072 characters: the library's vectors outgrow the caches on the way, which by itself makes up to
2.5 of every 2."""

TEXTS: dict[str, str] = {
    "one letter": "z",
    "a merge of merges": "the quick brown ",
    "blanks": " ",
    "digits": "7",
    "line ends": "\n",
    "combining marks": "\u0301",
    "emoji": "\U0001f468\u200d",
    "special tokens": "<|eos|>",
    "special tokens begun": "<|eo",
    "brackets": "<<<|",
}


def repeated(text: str, size: int) -> str:
    return (text * (size // len(text) + 1))[:size]


@pytest.mark.parametrize("kind", TEXTS)
def test_tokenising_grows_as_its_input(tokenizer: Tokenizer, kind: str, scorecard: Scorecard) -> None:
    def encode(size: int) -> None:
        tokenizer.encode(repeated(TEXTS[kind], size), True)

    ratio = ratio_over(encode, 4096, TOKENISED_DOUBLINGS)
    scorecard(30, f"tokenise {kind}: times as long", ratio, at_most=RATIO)


def test_tokenising_and_detokenising_let_other_threads_run(tokenizer: Tokenizer, scorecard: Scorecard) -> None:
    """The engine plans steps and writes streams in threads of the same process."""
    ids = tokenizer.encode("z" * 500_000, True)
    for name, work in (
        ("tokenise", lambda: tokenizer.encode("z" * 500_000, True)),
        ("detokenise", lambda: tokenizer.decode(ids, True)),
    ):
        best = min(longest_stop(work) for _ in range(5))
        scorecard(30, f"{name} 500,000: share of its time in which all threads stop", best, at_most=0.5)


def longest_stop(work: Callable[[], object]) -> float:
    """The longest time in which another thread could not run while `work` ran, as a share of its duration."""
    gaps, done = [0.0], threading.Event()

    def tick() -> None:
        last = time.monotonic()
        while not done.is_set():
            time.sleep(0.0005)
            now = time.monotonic()
            gaps.append(now - last)
            last = now

    thread = threading.Thread(target=tick)
    thread.start()
    before = time.monotonic()
    work()
    took = time.monotonic() - before
    done.set()
    thread.join()
    return max(gaps) / took


STOPS: dict[str, tuple[str, ...]] = {
    "almost": tuple("a" * (240 + i) + "b" for i in range(16)),
    "nested": tuple("a" * (i + 1) + "b" for i in range(16)),
    "periodic": tuple("ab" * (100 + i) + "c" for i in range(16)),
    "disjoint": tuple(chr(0x100 + i) * 256 for i in range(16)),
}


@pytest.mark.parametrize("piece", [1, 7, 1000])
@pytest.mark.parametrize("kind", STOPS)
def test_scanning_for_stops_grows_as_its_input(kind: str, piece: int, scorecard: Scorecard) -> None:
    def scan(size: int) -> None:
        matcher = StopMatcher(STOPS[kind], include_stop=False)
        text = repeated("ab" if kind == "periodic" else "a", size)
        shown = 0
        for at in range(0, size, piece):
            out, matched = matcher.feed(text[at : at + piece])
            shown += len(out)
            assert matched is None
        assert shown + len(matcher.finish()) == size

    ratio = growth(scan, 2048)
    scorecard(30, f"scan for {kind} stops by {piece}: times as long", ratio, at_most=RATIO)


def outputs(tokenizer: Tokenizer) -> dict[str, list[int]]:
    """Short runs of ids that are repeated: letters, bytes that never end a character, special tokens, all mixed."""
    letters = tokenizer.encode("the quick", False)
    unfinished = tokenizer.encode("\U0001f468", False)[:1]
    return {
        "letters": letters,
        "unfinished characters": unfinished,
        "special": [0, 1, 2],
        "mixed": [*letters, *unfinished, 2],
    }


@pytest.mark.parametrize("kind", ["letters", "unfinished characters", "special", "mixed"])
@pytest.mark.parametrize("skip", [True, False])
def test_detokenising_grows_as_its_input(tokenizer: Tokenizer, kind: str, skip: bool, scorecard: Scorecard) -> None:
    ids = outputs(tokenizer)[kind]

    def detokenise(size: int) -> None:
        stream = IncrementalDetokenizer(tokenizer, ids * 10, skip)
        for _ in range(size // len(ids)):
            stream.feed(ids)
        stream.finish()

    def decode(size: int) -> None:
        tokenizer.decode(ids * (size // len(ids)), skip)

    ratios = growth(detokenise, 512), growth(decode, 4096)
    for way, ratio in zip(("streamed", "whole"), ratios):
        scorecard(30, f"detokenise {kind}, {way}, skipping {skip}: times as long", ratio, at_most=RATIO)


def test_rendering_a_chat_grows_as_its_input(tokenizer: Tokenizer, scorecard: Scorecard) -> None:
    ratio = growth(lambda size: tokenizer.render_chat([ChatMessage("user", "a")] * size), 256)
    scorecard(30, "render a chat: times as long", ratio, at_most=RATIO)


def test_the_measure_can_fail() -> None:
    assert growth(lambda size: [i for i in range(size) for _ in range(size)], 64) > RATIO


async def test_the_longest_prompts_do_not_hold_up_the_loop(tiny: Path, scorecard: Scorecard) -> None:
    """At the limits of length in each form; the median over their lags, since two cores are shared with the rest."""
    lags: list[float] = []
    async with serve_checkpoint(tiny) as (_, client):

        async def attack() -> None:
            longest = "z" * 65_536
            for work in (
                client.complete(longest, max_tokens=1),
                client.tokenize(longest),
                client.complete([5] * 1023, max_tokens=1),
                client.complete([{"role": "user", "content": longest}], max_tokens=1),
                client.detokenize([5] * 65_536),
            ):
                try:
                    await work
                except CallFailed as refused:
                    assert refused.reason == InvalidRequest.reason

        for _ in range(5):
            async with beside(client) as neighbour:
                await attack()
            lags.append(neighbour.worst_lag)
            await asyncio.sleep(0)
    scorecard(30, "loop late at the longest inputs, best of 5, ms", min(lags) * 1e3, at_most=20)
    scorecard(30, "the same, worst of 5, ms", max(lags) * 1e3)
