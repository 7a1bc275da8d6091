"""Limits of a tenant that count work: sequences at once, and tokens per minute, corrected by what was used."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from core.errors import Overloaded
from core.types.chat import ChatMessage
from core.types.io import EmbedRequest, GenerateRequest, TextPair
from core.types.sampling_params import SamplingParams
from service.errors import TenantLockedOut, TenantSequences
from service.limits.hold import Hold
from service.limits.token_budget import TokenBudget
from service.limits.work import Work, embedding, generating
from tests.contract.tenants.test_gates import made

CONTEXT = 1000


def test_a_request_is_its_prompt_once_and_the_most_of_every_output() -> None:
    def work(asked: GenerateRequest) -> Work:
        return generating(asked, CONTEXT)

    ids = GenerateRequest(token_ids=tuple(range(10)), sampling=SamplingParams(n=64, max_tokens=20))
    assert work(ids) == Work(64, 10, 10 + 64 * 20)
    assert work(GenerateRequest(token_ids=(1, 2))) == Work(1, 2, CONTEXT), "what is left open may fill the context"
    assert work(GenerateRequest(text="x" * 41, sampling=SamplingParams(max_tokens=1))) == Work(1, 11, 12)
    chat = GenerateRequest(chat=(ChatMessage("user", "x" * 40),), sampling=SamplingParams(max_tokens=1))
    assert work(chat) == Work(1, 18, 19)
    assert embedding(EmbedRequest(inputs=("x" * 8, (1, 2, 3)))) == Work(2, 5, 5)
    assert embedding(EmbedRequest(inputs=(TextPair("x" * 8, "y" * 9), "x"))) == Work(2, 6, 6)


def test_parts_and_images_count() -> None:
    few = SamplingParams(max_tokens=1)
    parts = GenerateRequest(chat=(ChatMessage("user", "", parts=("x" * 40, b"png")),), sampling=few)
    assert generating(parts, CONTEXT) == Work(1, 18 + 256, 19 + 256)
    assert generating(GenerateRequest(text="x" * 4, images=(b"a", b"b"), sampling=few), CONTEXT) == Work(1, 513, 514)


def budget(per_minute: float) -> tuple[TokenBudget, list[float]]:
    now = [0.0]
    return TokenBudget(per_minute, clock=lambda: now[0]), now


def test_a_budget_fills_in_a_minute_and_says_when_there_is_enough() -> None:
    tokens, now = budget(600)
    assert tokens.take(500) == 500
    assert tokens.take(200) == 0, "nothing is taken where there is too little"
    assert tokens.wait(200) == pytest.approx(10.0)
    now[0] = 10.0
    assert tokens.take(200) == 200
    now[0] = 3600.0
    assert tokens.full and tokens.take(600) == 600 and tokens.take(1) == 0


def test_what_may_need_more_than_a_minute_has_waits_for_a_full_one() -> None:
    tokens, now = budget(600)
    assert tokens.take(5000) == 600
    now[0] = 59.0
    assert tokens.take(5000) == 0 and tokens.wait(5000) == pytest.approx(1.0)
    now[0] = 60.0
    assert tokens.take(5000) == 600


def test_what_was_used_and_not_charged_is_owed() -> None:
    tokens, now = budget(600)
    tokens.give(-900)
    assert tokens.wait(1) == pytest.approx(30.1)
    now[0] = 29.0
    assert tokens.take(1) == 0
    tokens.give(5000)
    assert tokens.take(600) == 600 and tokens.take(1) == 0, "no more than a minute's worth is ever there"


def test_a_limit_that_changes_keeps_what_was_used() -> None:
    tokens, _ = budget(600)
    tokens.take(500)
    tokens.resize(1000)
    assert tokens.take(501) == 0 and tokens.take(500) == 500


async def test_sequences_are_counted_and_not_calls(tmp_path: Path) -> None:
    doors, counts, _ = made(tmp_path, "a: {concurrent_sequences: 64}\n")
    many = await doors.enter("a", None, Work(sequences=60))
    few = [await doors.enter("a", None) for _ in range(4)]
    with pytest.raises(Overloaded) as refused:
        await doors.enter("a", None)
    assert (refused.value.reason, refused.value.retry_after) == ("TENANT_SEQUENCE_LIMIT", 0.01)
    assert refused.value.message == "the tenant's limit of 64 sequences at once is reached"
    many.release()
    few.append(await doors.enter("a", None, Work(sequences=60)))
    for hold in few:
        hold.release()
    (await doors.enter("a", None, Work(sequences=64))).release()
    assert counts["a", "TENANT_SEQUENCE_LIMIT"] == 1


async def test_a_large_request_is_not_passed_by_small_ones_for_ever(tmp_path: Path) -> None:
    doors, _, _ = made(tmp_path, "a: {concurrent_sequences: 4}\n", wait=60)
    held = [await doors.enter("a", None) for _ in range(4)]
    order: list[str] = []

    async def enter(name: str, sequences: int) -> Hold:
        hold = await doors.enter("a", None, Work(sequences=sequences))
        order.append(name)
        return hold

    large = asyncio.create_task(enter("large", 4))
    await asyncio.sleep(0)
    small = asyncio.create_task(enter("small", 1))
    for hold in held:
        assert not order, "no more than four at once"
        hold.release()
        for _ in range(5):
            await asyncio.sleep(0)
    (await asyncio.wait_for(large, 5)).release()
    (await asyncio.wait_for(small, 5)).release()
    assert order == ["large", "small"]


async def test_more_sequences_than_may_ever_run_are_not_told_to_come_back(tmp_path: Path) -> None:
    doors, counts, _ = made(tmp_path, "a: {concurrent_sequences: 8, concurrent_requests: 1}\n")
    with pytest.raises(TenantSequences, match="has 9 sequences, and this tenant may have 8 at once"):
        await doors.enter("a", None, Work(sequences=9))
    assert counts["a", "TENANT_SEQUENCES"] == 1
    (await doors.enter("a", None, Work(sequences=8))).release()


async def test_tokens_are_charged_at_admission_and_the_unused_given_back(tmp_path: Path) -> None:
    doors, counts, _ = made(tmp_path, "a: {tokens_per_minute: 6000}\n")
    hold = await doors.enter("a", None, Work(1, 100, 5000))
    with pytest.raises(Overloaded) as refused:
        await doors.enter("a", None, Work(1, 100, 5000))
    # There are 1,000, and 4,000 more come in 40 seconds.
    assert refused.value.reason == "TENANT_TOKEN_LIMIT" and 30 < refused.value.retry_after <= 40
    assert refused.value.message == "the tenant's limit of 6000 tokens per minute is reached"
    hold.saw_prompt(100)
    hold.saw_prompt(90)
    hold.use(10)
    hold.release()
    (await doors.enter("a", None, Work(1, 100, 5850))).release()
    assert counts["a", "TENANT_TOKEN_LIMIT"] == 1


async def test_a_refusal_gives_everything_back(tmp_path: Path) -> None:
    doors, _, _ = made(tmp_path, "a: {tokens_per_minute: 6000, concurrent_sequences: 2, concurrent_requests: 5}\n")
    held = await doors.enter("a", None, Work(2, 1, 1000))
    for _ in range(10):
        with pytest.raises(Overloaded) as refused:
            await doors.enter("a", None, Work(1, 1, 2500))
        assert refused.value.reason == "TENANT_SEQUENCE_LIMIT", "and neither calls nor tokens"
    held.release()
    (await doors.enter("a", None, Work(1, 1, 5500))).release()


async def test_tokens_that_become_known_after_the_release_are_charged(tmp_path: Path) -> None:
    doors, _, _ = made(tmp_path, "a: {tokens_per_minute: 6000}\n")
    hold = (await doors.enter("a", None, Work(1, 10, 3000))).move()
    hold.release()
    hold.use(5900)
    with pytest.raises(Overloaded):
        await doors.enter("a", None, Work(1, 1, 2900))


async def test_a_prompt_that_is_told_again_behind_a_move_counts_once(tmp_path: Path) -> None:
    doors, _, _ = made(tmp_path, "a: {tokens_per_minute: 6000}\n")
    hold = await doors.enter("a", None, Work(1, 1000, 5000))
    hold.saw_prompt(1000)
    moved = hold.move()
    moved.saw_prompt(1000)
    assert moved.used == 1000
    moved.release()
    (await doors.enter("a", None, Work(1, 1, 5000))).release()


async def test_a_tenant_with_nothing_is_told_so_and_not_to_come_back(tmp_path: Path) -> None:
    doors, counts, path = made(tmp_path, "a: {concurrent_requests: 1}\n", wait=60)
    held = await doors.enter("a", None)
    path.write_text("a: {concurrent_requests: 0}\n")
    with pytest.raises(TenantLockedOut):
        await doors.enter("a", None)
    with pytest.raises(TenantLockedOut):
        doors.refuse_hopeless("a")
    assert counts["a", "TENANT_LOCKED_OUT"] == 2
    held.release()


async def test_a_full_line_is_known_before_there_is_any_work(tmp_path: Path) -> None:
    doors, _, _ = made(tmp_path, "a: {concurrent_requests: 1}\n", wait=60)
    held = await doors.enter("a", None)
    waiting = [asyncio.create_task(doors.enter("a", None)) for _ in range(64)]
    doors.refuse_hopeless("a")
    for _ in range(3):
        await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        doors.refuse_hopeless("a")
    doors.refuse_hopeless("b")
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    held.release()
