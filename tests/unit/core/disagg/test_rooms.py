"""Rooms are remembered when they are over, up to a bound, and never mixed up with others of their name."""

from __future__ import annotations

import asyncio

from core.disagg import rooms
from core.disagg.interface import Offer
from core.disagg.rooms import Rooms
from tests.unit.core.disagg.transfer import Keys, offer


def of(name: str) -> Offer:
    return offer(Keys(), room=name)


async def test_only_so_many_names_are_remembered() -> None:
    found = Rooms(60.0)
    many = rooms.REMEMBERED + 3
    for number in range(many):
        found.expect(str(number))
        found.withdraw(str(number))
    assert [found.is_gone(str(number)) for number in (0, 2, 3, many - 1)] == [False, False, True, True]
    assert len(found) == 0


async def test_a_name_that_is_used_again_is_a_new_room() -> None:
    found, told = Rooms(60.0), list[str]()
    found.expect("a")
    found.offer(of("a"), lambda delivered: told.append(f"first {delivered}"))
    first = found.find("a")
    assert first is not None
    sending = asyncio.Event()

    async def send() -> None:
        found.begin("a", first)
        try:
            sending.set()
            await asyncio.Event().wait()
        finally:
            found.sent("a", first, delivered=False)

    task = asyncio.ensure_future(send())
    await sending.wait()
    found.withdraw("a")
    assert told == [], "what is being sent is read still"
    found.expect("a")
    found.offer(of("a"), lambda delivered: told.append(f"second {delivered}"))
    await asyncio.wait([task])
    assert told == ["first False"]
    assert found.find("a") is not first and not found.is_gone("a") and len(found) == 1
    found.close()
    assert told == ["first False", "second False"] and found.is_gone("a")


async def test_a_second_offer_in_one_room_is_over() -> None:
    found, told = Rooms(60.0), list[str]()
    found.expect("a")
    found.offer(of("a"), lambda delivered: told.append(f"first {delivered}"))
    found.offer(of("a"), lambda delivered: told.append(f"second {delivered}"))
    found.offer(of("none"), lambda delivered: told.append(f"none {delivered}"))
    assert told == ["second False", "none False"]
    found.close()
    assert told == ["second False", "none False", "first False"]


async def test_an_offer_that_is_sent_does_not_expire_and_stands_again_if_that_failed() -> None:
    found, told = Rooms(0.05), list[bool]()
    found.expect("a")
    found.offer(of("a"), told.append)
    room = found.find("a")
    assert room is not None
    found.begin("a", room)
    await asyncio.sleep(0.1)
    assert told == []
    found.sent("a", room, delivered=False)
    assert found.find("a") is room and told == []
    ends = asyncio.get_running_loop().time() + 20
    while not told and asyncio.get_running_loop().time() < ends:
        await room.changed.wait()
        room.changed.clear()
    assert told == [False] and found.is_gone("a")


async def test_what_was_delivered_is_over() -> None:
    found, told = Rooms(60.0), list[bool]()
    found.expect("a")
    found.offer(of("a"), told.append)
    room = found.find("a")
    assert room is not None
    found.begin("a", room)
    found.sent("a", room, delivered=True)
    assert told == [True] and found.is_gone("a") and len(found) == 0
    found.close()
    assert told == [True]


async def test_of_two_requests_of_one_name_one_may_go() -> None:
    found, told = Rooms(60.0), list[bool]()
    found.expect("a")
    found.offer(of("a"), told.append)
    found.expect("a")
    found.withdraw("a")
    assert told == [] and len(found) == 1
    found.withdraw("a")
    assert told == [False] and len(found) == 0


async def test_offers_of_weights_before_are_over_whatever_else_is_expected_there() -> None:
    """A gateway drew a name twice: the second request has not ended, and the first one's keys must go all the same."""
    found, told = Rooms(60.0), list[str]()
    found.expect("a")
    found.offer(of("a"), lambda delivered: told.append(f"a {delivered}"))
    found.expect("a")
    found.expect("b")
    found.retire()
    assert told == ["a False"] and found.find("a") is None and found.find("b") is not None
