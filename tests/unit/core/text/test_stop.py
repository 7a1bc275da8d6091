"""Stop strings across piece borders, against an oracle that sees all the text at once."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.text.stop import StopMatcher
from tests.support.growth import Work, growth


def oracle(text: str, stops: tuple[str, ...], include: bool) -> tuple[str, str | None]:
    """All text shown and the match, by the definition: first complete, then longest."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


def run(pieces: list[str], stops: tuple[str, ...], include: bool) -> tuple[str, str | None]:
    """What a client would get."""
    matcher, shown = StopMatcher(stops, include), ""
    for piece in pieces:
        emitted, matched = matcher.feed(piece)
        shown += emitted
        if matched is not None:
            return shown, matched
    return shown + matcher.finish(), None


def split(text: str, rng: random.Random) -> list[str]:
    cuts = sorted(rng.randint(0, len(text)) for _ in range(rng.randint(0, 6)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]


# Two letters, so that overlaps, repeats and stop strings within stop strings are the rule.
@given(
    text=st.text("ab", max_size=40),
    stops=st.lists(st.text("ab", min_size=1, max_size=6), max_size=5).map(tuple),
    include=st.booleans(),
    rng=st.randoms(use_true_random=False),
)
def test_against_the_oracle(text: str, stops: tuple[str, ...], include: bool, rng: random.Random) -> None:
    expected = oracle(text, stops, include)
    for pieces in ([text], list(text), split(text, rng), split(text, rng)):
        assert run(pieces, stops, include) == expected


@given(
    text=st.text("aab", max_size=40),
    stops=st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4).map(tuple),
)
def test_holds_back_exactly_what_could_become_a_stop_string(text: str, stops: tuple[str, ...]) -> None:
    """After each character, what is held is the longest end of the text that begins some stop string."""
    matcher, shown = StopMatcher(stops, False), ""
    for place, character in enumerate(text):
        emitted, matched = matcher.feed(character)
        shown += emitted
        if matched is not None:
            return
        so_far = text[: place + 1]
        beginnings = {stop[:size] for stop in stops for size in range(len(stop))}
        held = max((begin for begin in beginnings if so_far.endswith(begin)), key=len)
        assert shown == so_far[: len(so_far) - len(held)]


@pytest.mark.parametrize(
    ("pieces", "stops", "shown", "matched"),
    [
        (["hello wor", "ld"], (" world",), "hello", " world"),
        (["a\n", "\nb"], ("\n\n",), "a", "\n\n"),
        (["ab", "ab", "ac"], ("abac",), "ab", "abac"),
        (["xabcd"], ("abcd", "bc"), "xa", "bc"),
        (["xabc"], ("bc", "abc", "c"), "x", "abc"),
        (["abc"], ("abc", "ab"), "", "ab"),
        (["the 世", "界 end"], ("世界",), "the ", "世界"),
        (["", "", ""], ("x",), "", None),
        (["no match here"], ("match there",), "no match here", None),
        (["ends with sto"], ("stop",), "ends with sto", None),
        (["a\0b"], ("ac", "\0b"), "a", "\0b"),
        (["a\0", "\0"], ("ab", "\0\0"), "a", "\0\0"),
    ],
)
def test_examples(pieces: list[str], stops: tuple[str, ...], shown: str, matched: str | None) -> None:
    assert run(pieces, stops, False) == (shown, matched)


def test_included_stop_string_is_the_last_text() -> None:
    assert run(["one, tw", "o, three"], ("two",), True) == ("one, two", "two")


def test_withheld_text_comes_out_when_it_turns_harmless() -> None:
    matcher = StopMatcher(("stop!",), False)
    assert matcher.feed("please stop") == ("please ", None)
    assert matcher.feed(" now") == ("stop now", None)
    assert matcher.finish() == ""


def test_nothing_after_a_match() -> None:
    matcher = StopMatcher(("x",), False)
    assert matcher.feed("axb") == ("a", "x")
    assert matcher.feed("more") == ("", "x")
    assert matcher.finish() == ""
    assert matcher.matched == "x"


def test_without_stop_strings_text_passes_through() -> None:
    matcher = StopMatcher((), True)
    assert matcher.feed("anything") == ("anything", None)
    assert matcher.finish() == ""


def test_empty_stop_string_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        StopMatcher(("a", ""), False)


@pytest.mark.parametrize("piece", [1, 3, 1000])
def test_time_is_linear(piece: int) -> None:
    """The worst case: long stop strings that the text almost completes all the time."""
    stops = tuple("a" * (240 + i) + "b" for i in range(16))

    def feeding(length: int) -> Work:
        text, matcher = "a" * length, StopMatcher(stops, False)

        def work() -> None:
            for place in range(0, length, piece):
                matcher.feed(text[place : place + piece])

        return work

    assert growth(feeding, 10_000, 40_000, most=8) < 8
