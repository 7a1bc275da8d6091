"""Which engine a request goes to: by what each has to do, and by the beginning of the prompt."""

from __future__ import annotations

import random

import pytest

from core.types.audio import Audio
from core.types.chat import ChatMessage
from core.types.io import EmbedRequest, GenerateRequest, TextPair
from service.limits.work import IMAGE_TOKENS
from service.replicas.prompt_pieces import (
    MOST_PIECES,
    PIECE_BYTES,
    PIECE_TOKENS,
    SOUND_TOKENS,
    Prompt,
    SeenPieces,
    inputs_of,
    prompt_of,
)
from service.replicas.router import HELD_PER_TOKEN, ROW_TOKENS, Router

IDS = tuple(range(1000))
PLACES = (0, 1, 2)


def test_pieces_name_all_that_comes_before_them() -> None:
    prompt = prompt_of(GenerateRequest(token_ids=IDS))
    assert prompt.tokens == 1000 and len(prompt.pieces) == 1000 // PIECE_TOKENS
    for length in (PIECE_TOKENS - 1, PIECE_TOKENS, PIECE_TOKENS + 1, 640):
        cut = prompt_of(GenerateRequest(token_ids=IDS[:length]))
        assert cut.pieces == prompt.pieces[: length // PIECE_TOKENS]
    changed = prompt_of(GenerateRequest(token_ids=(*IDS[:130], 7, *IDS[131:])))
    assert changed.pieces[:2] == prompt.pieces[:2] and not set(changed.pieces[2:]) & set(prompt.pieces)


def test_salts_and_adapters_have_no_piece_in_common() -> None:
    requests = [
        GenerateRequest(token_ids=IDS),
        GenerateRequest(token_ids=IDS, cache_salt="a"),
        GenerateRequest(token_ids=IDS, adapter="a"),
        GenerateRequest(token_ids=IDS, adapter="b"),
    ]
    found = [piece for request in requests for piece in prompt_of(request).pieces]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(
    "fields",
    [
        {"text": "é" * 2000},
        {"text": "\ud800" * 2000},
        {"chat": (ChatMessage("user", "a" * 4000),)},
        {"chat": (ChatMessage("user", "", parts=("a" * 4000, b"\x89PNG")),)},
        {"chat": (ChatMessage("user", "a"),), "chat_tools": ("{}" * 2000,)},
        {"audio": Audio(b"RIFF" * 1000)},
    ],
    ids=["text", "half", "chat", "parts", "tools", "sound"],
)
def test_whatever_is_sent_has_pieces(fields: dict[str, object]) -> None:
    prompt = prompt_of(GenerateRequest(**fields))  # type: ignore[arg-type]
    assert len(prompt.pieces) >= 4000 // PIECE_BYTES and prompt.tokens >= 1000
    assert prompt == prompt_of(GenerateRequest(**fields))  # type: ignore[arg-type]


def test_turns_of_a_conversation_begin_with_the_turns_before() -> None:
    turns = (ChatMessage("user", "a" * 1000), ChatMessage("assistant", "b" * 1000))
    first, later = (prompt_of(GenerateRequest(chat=turns[:count])) for count in (1, 2))
    assert later.pieces[: len(first.pieces)] == first.pieces and len(first.pieces) == 3
    image = GenerateRequest(chat=(ChatMessage("user", "", parts=(b"a" * 999, "x" * 999)),))
    other = GenerateRequest(chat=(ChatMessage("user", "", parts=(b"b" * 999, "x" * 999)),))
    assert not set(prompt_of(image).pieces) & set(prompt_of(other).pieces)


def test_a_prompt_of_any_length_has_a_bounded_number_of_pieces() -> None:
    prompt = prompt_of(GenerateRequest(text="a" * (MOST_PIECES + 9) * PIECE_BYTES))
    assert len(prompt.pieces) == MOST_PIECES and prompt.tokens == (MOST_PIECES + 9) * PIECE_TOKENS


def test_inputs_count_together() -> None:
    inputs = ("a" * 40, (1, 2, 3), TextPair("b" * 20, "c" * 20))
    assert inputs_of(EmbedRequest(inputs)) == Prompt((), 10 + 3 + 10)


def test_the_pieces_sent_last_are_remembered_and_of_a_prompt_its_beginning_longest() -> None:
    seen = SeenPieces(4)
    seen.add((1, 2, 3))
    assert [seen.leading((1, 2, 3, 4)), seen.leading((1, 9, 3)), seen.leading((2, 3)), seen.leading(())] == [3, 1, 2, 0]
    seen.add((4, 5))
    assert len(seen) == 4 and [seen.leading((1, 2, 3)), seen.leading((4, 5))] == [2, 2]
    seen.add((1,))
    seen.add((6, 7))
    assert seen.leading((1, 2)) == 1, "sent again, so it stays"
    seen.clear()
    assert len(seen) == 0 == seen.leading((1,))


def test_among_equals_each_gets_its_turn() -> None:
    router, taken = Router(3), []
    for _ in range(9):
        place = router.order(Prompt((), 10), PLACES)[0]
        share = router.take(place, Prompt((), 10), 1)
        share.taken()
        taken.append(place)
        share.end()
    assert taken == [0, 1, 2] * 3


def test_a_known_beginning_is_worth_the_prompt_that_it_saves() -> None:
    router = Router(2)
    long, new = prompt_of(GenerateRequest(token_ids=IDS)), prompt_of(GenerateRequest(token_ids=IDS[::-1]))
    known = router.take(0, long, 1)
    known.taken()
    known.end()
    assert (router.books[0].routed, router.books[0].matched) == (1, 0)
    assert router.order(long, (0, 1)) == [0, 1] and router.order(new, (0, 1)) == [1, 0]
    # Each row that decodes there makes it dearer, until what it would save is less.
    shares, saved = [], PIECE_TOKENS * len(long.pieces)
    while router.order(long, (0, 1))[0] == 0:
        shares.append(router.take(0, Prompt((), 80), 1))
        shares[-1].begin()
    dearer = ROW_TOKENS + 80 / HELD_PER_TOKEN
    assert len(shares) == pytest.approx(saved / dearer, abs=1)
    for share in shares:
        share.end()
    assert router.order(long, (0, 1))[0] == 0
    router.forget()
    assert router.order(long, (0, 1))[0] == 1, "it has been sent less"


def test_prompts_that_wait_weigh_until_they_are_computed_and_outputs_as_they_grow() -> None:
    router = Router(2)
    waiting = router.take(0, Prompt((), 1000), 2)
    book = router.books[0]
    assert (book.rows, book.prefill, book.held) == (2, 1000, 1000)
    assert router.order(Prompt((), 1), (0, 1))[0] == 1
    waiting.begin()
    waiting.begin()
    assert (book.rows, book.prefill, book.held) == (2, 0, 1000)
    waiting.grow(50)
    assert book.held == 1050 and book.cost(7) == 7 + 2 * ROW_TOKENS + 1050 / HELD_PER_TOKEN
    waiting.end()
    waiting.end()
    waiting.grow(50)
    assert (book.rows, book.prefill, book.held) == (0, 0, 0)


def test_what_an_engine_refuses_it_has_not_seen() -> None:
    router, prompt = Router(2), prompt_of(GenerateRequest(token_ids=IDS))
    router.take(0, prompt, 1).end()
    book = router.books[0]
    assert (book.routed, book.matched, len(book.seen), book.rows) == (0, 0, 0, 0)
    for matched in (0, 1):
        share = router.take(0, prompt, 1)
        share.taken()
        assert (book.routed, book.matched) == (matched + 1, matched)
        share.end()


def test_an_estimate_is_corrected_when_the_length_is_known() -> None:
    router = Router(1)
    share = router.take(0, Prompt((), 100), 1)
    share.correct(40)
    assert router.books[0].held == 40
    share.end()
    assert router.books[0].held == 0


def test_images_and_sounds_weigh_what_they_become_and_not_their_bytes() -> None:
    large = ChatMessage("user", "", parts=("what is this?", b"x" * 4_000_000))
    assert prompt_of(GenerateRequest(chat=(large,))).tokens == pytest.approx(IMAGE_TOKENS, abs=20)
    assert prompt_of(GenerateRequest(token_ids=(1, 2), images=(b"x" * 9999,))).tokens == IMAGE_TOKENS + 2
    assert prompt_of(GenerateRequest(text="a" * 400, images=(b"x" * 9999,))).tokens == IMAGE_TOKENS + 100
    assert prompt_of(GenerateRequest(audio=Audio(b"x" * 10**7))).tokens == SOUND_TOKENS


@pytest.mark.parametrize("token", [-1, -(2**31), 2**31, 2**32, 2**62])
def test_ids_that_no_model_has_are_not_refused_here(token: int) -> None:
    assert prompt_of(GenerateRequest(token_ids=(token,) * 70)).tokens == 70


def test_only_those_that_are_there_are_chosen() -> None:
    router = Router(3)
    router.take(1, Prompt((), 1), 1).taken()
    assert router.order(Prompt((), 1), (1,)) == [1] and router.order(Prompt((), 1), ()) == []


def test_books_are_empty_when_all_has_ended(seed: int) -> None:
    draw, router, live = random.Random(seed), Router(4), []
    for _ in range(2000):
        match draw.randrange(4):
            case 0:
                prompt = prompt_of(GenerateRequest(token_ids=IDS[: draw.randrange(1, 1000)]))
                live.append(router.take(router.order(prompt, range(4))[0], prompt, draw.randrange(1, 4)))
                live[-1].taken()
            case 1 if live:
                draw.choice(live).begin()
            case 2 if live:
                draw.choice(live).grow(draw.randrange(9))
            case _ if live:
                live.pop(draw.randrange(len(live))).end()
        assert all(min(book.rows, book.held, book.prefill) >= 0 for book in router.books)
    for share in live:
        share.end()
    assert {(book.rows, book.held, book.prefill) for book in router.books} == {(0, 0, 0)}
    routed = [book.routed for book in router.books]
    assert max(routed) < 2 * min(routed), "one prompt in common does not send all to one"
