"""Gates and refusals without a server: limits that change under calls, bounds on what is remembered, bursts."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from pathlib import Path

import pytest

from core.errors import Overloaded
from service.access.tenant_file import MAX_TENANTS, OTHER, tenants_file
from service.limits import refusals, tenant_limiter
from service.limits.refusals import LONGEST_SECONDS, QUIET_SECONDS, Refusals
from service.limits.tenant_limiter import TenantGates
from tests.support.until import turns


class Counted(Counter[tuple[str, str]]):
    def __call__(self, label: str, reason: str, amount: int) -> None:
        self[label, reason] += amount


def made(folder: Path, text: str, wait: float = 0.01) -> tuple[TenantGates, Counted, Path]:
    path, counts = folder / "tenants", Counted()
    path.write_text(text)
    return TenantGates(tenants_file(path), wait, Refusals(counts)), counts, path


async def test_a_limit_that_is_lowered_counts_the_calls_that_are_open(tmp_path: Path) -> None:
    doors, counts, path = made(tmp_path, "a: {concurrent_requests: 3}\n")
    held = [await doors.enter("a", None) for _ in range(3)]
    path.write_text("a: {concurrent_requests: 2}\n")
    held.pop().release()
    with pytest.raises(Overloaded) as refused:
        await doors.enter("a", None)
    assert (refused.value.reason, refused.value.retry_after) == ("TENANT_CONCURRENCY_LIMIT", 0.01)
    assert refused.value.message == "the tenant's limit of 2 requests at once is reached"
    held.pop().release()
    held.append(await doors.enter("a", None))
    path.write_text("a: {concurrent_requests: 9}\n")
    held += [await doors.enter("a", None) for _ in range(7)]
    assert counts["a", "TENANT_CONCURRENCY_LIMIT"] == 1


async def test_one_tenant_at_its_limit_is_nobody_elses_business(tmp_path: Path) -> None:
    doors, counts, _ = made(tmp_path, '"*": {concurrent_requests: 1}\nb: {requests_per_second: 0.5}\n')
    await doors.enter("a", None)
    await doors.enter("c", None)
    await doors.enter("b", None)
    for tenant, reason in (("a", "TENANT_CONCURRENCY_LIMIT"), ("b", "TENANT_RATE_LIMIT")):
        with pytest.raises(Overloaded) as refused:
            await doors.enter(tenant, None)
        assert refused.value.reason == reason and refused.value.retry_after > 0
    await doors.enter(None, None)
    assert counts == {
        ("other", "TENANT_CONCURRENCY_LIMIT"): 1,
        ("b", "TENANT_RATE_LIMIT"): 1,
    } | {each: 0 for each, count in counts.items() if not count}


async def test_a_place_is_given_back_once_and_moves_with_its_holder(tmp_path: Path) -> None:
    doors, _, _ = made(tmp_path, "a: {concurrent_requests: 1}\n")
    first = await doors.enter("a", None)
    moved = first.move()
    first.release()
    with pytest.raises(Overloaded):
        await doors.enter("a", None)
    moved.release()
    moved.release()
    second = await doors.enter("a", None)
    with pytest.raises(Overloaded):
        await doors.enter("a", None)
    second.release()


async def test_a_caller_that_goes_while_it_waits_holds_nothing(tmp_path: Path) -> None:
    doors, _, _ = made(tmp_path, "a: {concurrent_requests: 1}\n", wait=60)
    first = await doors.enter("a", None)
    waiting = asyncio.create_task(doors.enter("a", None))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    first.release()
    (await asyncio.wait_for(doors.enter("a", None), 1)).release()


async def test_idle_gates_of_many_names_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_limiter, "MAX_GATES", 10)
    doors, _, _ = made(tmp_path, '"*": {concurrent_requests: 1}\n')
    held = await doors.enter("first", None)
    for number in range(50):
        (await doors.enter(f"name {number}", None)).release()
    assert len(doors._gates) <= 11
    with pytest.raises(Overloaded):
        await doors.enter("first", None)
    held.release()


async def test_a_tenant_that_comes_when_all_gates_are_in_use_has_one_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenant_limiter, "MAX_GATES", 2)
    doors, _, _ = made(tmp_path, '"*": {concurrent_requests: 1}\n')
    try:
        held = [await doors.enter(name, None) for name in ("first", "second", "third", "fourth")]
    except KeyError as lost:
        pytest.fail(f"no gate was made for {lost}")
    with pytest.raises(Overloaded):
        await doors.enter("fourth", None)
    for each in held:
        each.release()
    (await doors.enter("fifth", None)).release()
    assert len(doors._gates) == 2


async def test_the_gate_that_was_longest_unused_is_forgotten_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call in 1,000 s: a tenant is let in again only where its gate was forgotten."""
    monkeypatch.setattr(tenant_limiter, "MAX_GATES", 2)
    doors, _, _ = made(tmp_path, '"*": {requests_per_second: 0.001}\n')
    for name in ("a", "b"):
        (await doors.enter(name, None)).release()
    doors.refuse_hopeless("a")
    (await doors.enter("c", None)).release()
    with pytest.raises(Overloaded):
        await doors.enter("a", None)
    (await doors.enter("b", None)).release()


async def test_a_gate_in_whose_line_a_call_waits_is_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenant_limiter, "MAX_GATES", 1)
    doors, _, _ = made(tmp_path, '"*": {requests_per_second: 0.001}\n', wait=60)
    (await doors.enter("a", None)).release()
    waiting = [asyncio.create_task(doors.enter("a", None))]
    await turns(10)
    (await doors.enter("b", None)).release()
    waiting.append(asyncio.create_task(doors.enter("a", None)))
    await turns(10)
    assert not any(call.done() for call in waiting), "a new gate would have let the later one in"
    for call in waiting:
        call.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


def test_labels_are_bounded_however_often_the_file_changes() -> None:
    counts = Counted()
    told = Refusals(counts)
    for number in range(3 * MAX_TENANTS):
        told.expect(f"tenant {number}")
        told.note(f"tenant {number}", f"tenant {number}", "TENANT_RATE_LIMIT", "too fast")
    assert len({label for label, _ in counts}) == MAX_TENANTS + 1
    assert counts[OTHER, "TENANT_RATE_LIMIT"] == 2 * MAX_TENANTS
    assert sum(counts.values()) == 3 * MAX_TENANTS
    assert len(told._bursts) <= refusals.MAX_TENANTS


def test_a_burst_is_one_line_and_a_long_one_is_told_of_again(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    told = Refusals(lambda *_: None, clock=lambda: now)

    def lines(count: int, apart: float) -> list[str]:
        nonlocal now
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            for _ in range(count):
                told.note("alice", "alice", "TENANT_RATE_LIMIT", "the tenant's limit of 2 requests per second")
                now += apart
        return [record.getMessage() for record in caplog.records]

    (line,) = lines(50, 0.1)
    assert line == "tenant 'alice' is refused: the tenant's limit of 2 requests per second (TENANT_RATE_LIMIT)"
    now += QUIET_SECONDS
    (line,) = lines(1, 0)
    assert line.endswith("; 50 refusals in the burst before")
    assert len(lines(110, 2 * LONGEST_SECONDS / 100)) == 2
