"""A prompt whose keys are handed over: what is copied, when it is offered, and how its copy comes back to the tier."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from core.disagg.interface import Offer
from core.errors import RequestFailed
from core.lanes import LaneRecorder
from core.memory.host_moves import HostCopy
from core.scheduler.fair_share import FairShare
from core.scheduler.handing_over import HandingOver, whole_pages
from core.scheduler.host_cache import HostCache
from core.scheduler.lifecycle import Lifecycle
from core.scheduler.outputs import Ending
from core.scheduler.phases import PhaseClock
from core.scheduler.policy import POLICIES
from core.scheduler.running import RunningSet
from core.scheduler.sampling_table import SamplingTable
from core.scheduler.taking_over import Arrived, TakingOver
from core.scheduler.tally import Tally
from core.scheduler.waiting_queue import WaitingQueue
from core.types.arrays import Ints
from core.types.handover import Kept
from core.types.io import FinishReason
from core.types.request import Req
from core.types.sampling_params import SamplingParams
from tests.unit.core.memory.test_leases import PAGE, ids
from tests.unit.core.scheduler.test_prefix_copies import CHUNK, World


class Giver:
    """What is offered and withdrawn, in order; a test says what becomes of it."""

    address = ("127.0.0.1", 1)

    def __init__(self) -> None:
        self.offers: list[tuple[Offer, Callable[[bool], None]]] = []
        self.withdrawn: list[str] = []
        self.retired = 0

    def expect(self, room: str) -> None:
        pass

    def offer(self, offer: Offer, over: Callable[[bool], None]) -> None:
        self.offers.append((offer, over))

    def withdraw(self, room: str) -> None:
        self.withdrawn.append(room)

    def retire(self) -> None:
        self.retired += 1

    def close(self) -> None:
        pass


class Handing(World):
    """A world whose requests may be handed over, or taken over."""

    def __init__(self, chunks: int = 8) -> None:
        super().__init__(chunks)
        self.giver, self.wakes = Giver(), list[int]()
        self.moves.host_views = lambda copy, start=0: [memoryview(bytes((copy.number, start)))]  # type: ignore[attr-defined]
        self.handing = HandingOver(self.tier, self.outgoing, self.giver, self.memory, lambda: self.wakes.append(1))
        self.taking = TakingOver(self.tier, self.outgoing, self.memory)
        running, tally = RunningSet(4, 64), Tally(PhaseClock(LaneRecorder()))
        host: Any = SimpleNamespace(rejoining=None, prefixes=None, handing=self.handing, taking=self.taking)
        parts = (self.memory, SamplingTable(4, 64, ()), tally, FairShare(64, 4), host)
        self.life = Lifecycle(WaitingQueue(POLICIES["fcfs"]()), running, *parts)

    def request(self, prompt: Ints, room: str = "") -> Req:
        req = Req("r", 0, prompt, SamplingParams(max_tokens=9), 0, 1 if room else 9)
        req.kept = Kept(room, "claim of " + room) if room else None
        self.life.enter(req)
        return req

    def compute(self, req: Req, *, samples: bool = True) -> None:
        assert self.life.admit(req, 0, 0.0)
        self.life.running.plan_prompt(req.row, len(req.prompt))
        if samples:
            row = np.array([req.row])
            self.life.running.append(row, self.life.running.known[row].copy(), np.array([7]))

    def free(self) -> bool:
        """Whether nothing is kept anywhere, beside what the prefix cache has."""
        self.check()
        return self.tier.used_bytes == 0 and len(self.memory.leases) == 0 and self.memory.rows.used == 0


@pytest.mark.parametrize("length", [1, PAGE, PAGE + 1, 3 * PAGE, 3 * PAGE + 1])
def test_whole_pages_without_the_last_token_are_offered_once_they_landed(length: int) -> None:
    world = Handing()
    req = world.request(ids(length), "room")
    world.compute(req)
    pages = world.memory.pages_of(req.row, length).copy()
    world.life.end(Ending(req, FinishReason.LENGTH))
    tokens = (length - 1) // PAGE * PAGE
    assert whole_pages(length, PAGE) == tokens
    if not tokens:
        assert world.moves.begun == [] and world.giver.withdrawn == ["room"] and world.free()
        assert world.handing.lost == 0, "there was nothing to hand over"
        return
    (out,) = world.moves.begun
    assert out.slots.tolist() == [page * PAGE + place for page in pages[: tokens // PAGE] for place in range(PAGE)]
    assert world.giver.offers == [] and len(world.memory.leases) == 1 and len(world.handing) == 1
    world.land()
    ((offer, over),) = world.giver.offers
    assert (offer.room, offer.claim, offer.tokens, offer.cached_tokens) == ("room", "claim of room", tokens, 0)
    assert [bytes(part) for part in offer.parts(3)] == [bytes((out.number, 3))]
    assert not world.handing.settle() and world.tier.used_bytes and world.wakes == []
    over(True)
    assert world.wakes == [1] and world.handing.settle() and world.free()
    figures = (world.handing.given, world.handing.lost, world.handing.given_tokens, len(world.handing))
    assert figures == (1, 0, tokens, 0)


def test_what_no_engine_got_is_lost_and_comes_back() -> None:
    world = Handing()
    req = world.request(ids(9), "room")
    world.compute(req)
    world.life.end(Ending(req, FinishReason.LENGTH))
    world.land()
    world.giver.offers[0][1](False)
    assert world.handing.settle() and world.free()
    assert (world.handing.given, world.handing.lost, world.handing.given_tokens) == (0, 1, 0)


def test_without_room_the_other_engine_is_told() -> None:
    world = Handing(chunks=1)
    for room in ("first", "second"):
        req = world.request(ids(2 * PAGE + 1), room)
        world.compute(req)
        world.life.end(Ending(req, FinishReason.LENGTH))
    assert len(world.moves.begun) == 1 and world.giver.withdrawn == ["second"] and world.handing.lost == 1


@pytest.mark.parametrize("when", ["waiting", "without logits", "condemned"])
def test_a_prompt_that_was_not_computed_to_its_end_is_not_offered(when: str) -> None:
    world = Handing()
    req = world.request(ids(9), "room")
    if when != "waiting":
        world.compute(req, samples=when == "condemned")
    if when == "condemned":
        world.life.condemn(Ending(req, error=RequestFailed("no number")))
    else:
        world.life.end(Ending(req, FinishReason.CANCELLED))
    assert world.moves.begun == [] and world.giver.withdrawn == ["room"] and world.giver.offers == [] and world.free()


def test_a_request_that_gives_way_is_still_expected() -> None:
    world = Handing()
    req = world.request(ids(9), "room")
    world.compute(req, samples=False)
    world.life.retract(req)
    assert world.giver.withdrawn == [] and world.moves.begun == []
    world.compute(req)
    world.life.end(Ending(req, FinishReason.LENGTH))
    assert len(world.moves.begun) == 1


def test_requests_of_no_room_leave_no_copy() -> None:
    world = Handing()
    req = world.request(ids(9))
    world.compute(req)
    world.life.end(Ending(req, FinishReason.LENGTH))
    assert world.moves.begun == [] and world.giver.withdrawn == [] and world.free()


def test_offers_are_withdrawn_where_weights_change() -> None:
    world = Handing()
    req = world.request(ids(9), "room")
    world.compute(req)
    world.life.end(Ending(req, FinishReason.LENGTH))
    world.land()
    world.life.start_over()
    assert world.giver.retired == 1 and world.tier.used_bytes, "it may be read until the giver says so"
    world.giver.offers[0][1](False)
    world.handing.settle()
    assert world.free()


def arrived(world: Handing, tokens: int, start: int = 0) -> tuple[HostCopy, Arrived]:
    ready = list[int]()
    copy = world.taking.reserve(tokens, lambda: ready.append(1))
    assert copy is not None
    (out,) = world.moves.begun
    assert out.copies == (copy,) and len(out.slots) == 0 and ready == [], "a step may still read what was there"
    world.land()
    assert ready == [1]
    return copy, Arrived(copy, start, 3)


def test_what_arrived_comes_with_the_first_chunk() -> None:
    world, prompt = Handing(), ids(3 * PAGE)
    req = world.request(prompt)
    copy, keys = arrived(world, 2 * PAGE)
    world.taking.adopt(req, keys)
    assert req in world.taking and world.life.admit(req, 0, 0.0)
    assert req not in world.taking and int(world.life.running.planned[req.row]) == 2 * PAGE
    assert (req.cached_tokens, req.computed_from) == (3, 2 * PAGE), "the client is told what no engine computed"
    (back,) = world.taking.take_backs()
    assert back.copies == (copy,) and back.skip == 0 and world.taking.take_backs() == ()
    own = world.memory.pages_of(req.row, 2 * PAGE)
    assert back.slots.tolist() == [page * PAGE + place for page in own.tolist() for place in range(PAGE)]
    assert world.memory.sound.leading(own) == 2, "another engine has sampled from them"
    world.life.end(Ending(req, FinishReason.CANCELLED))
    assert world.free() and (world.taking.taken, world.taking.taken_tokens) == (1, 2 * PAGE)


def test_what_the_device_has_is_not_brought() -> None:
    world, prompt = Handing(), ids(4 * PAGE)
    first = world.request(prompt[: PAGE + 1])
    world.compute(first)
    world.life.end(Ending(first, FinishReason.LENGTH))
    req = world.request(prompt)
    _, keys = arrived(world, 3 * PAGE)
    world.taking.adopt(req, keys)
    assert world.life.admit(req, 0, 0.0)
    (back,) = world.taking.take_backs()
    assert back.skip == PAGE and len(back.slots) == 2 * PAGE and world.taking.taken_tokens == 2 * PAGE


@pytest.mark.parametrize("there", [True, False])
def test_keys_behind_a_cached_beginning_need_it(there: bool) -> None:
    world, prompt = Handing(), ids(4 * PAGE)
    first = world.request(prompt[: PAGE + 1])
    world.compute(first)
    world.life.end(Ending(first, FinishReason.LENGTH))
    req = world.request(prompt)
    _, keys = arrived(world, 2 * PAGE, start=PAGE)
    world.taking.adopt(req, keys)
    if not there:
        world.memory.flush()
    assert world.life.admit(req, 0, 0.0)
    backs = world.taking.take_backs()
    if there:
        assert [(back.skip, len(back.slots)) for back in backs] == [(0, 2 * PAGE)]
        assert int(world.life.running.planned[req.row]) == 3 * PAGE
    else:
        assert backs == () and int(world.life.running.planned[req.row]) == 0
    assert world.taking.evicted == (not there) and world.tier.used_bytes == 0


@pytest.mark.parametrize("when", ["waiting", "seated", "retracted"])
def test_keys_of_a_request_that_leaves_are_given_up(when: str) -> None:
    world, prompt = Handing(), ids(3 * PAGE)
    req = world.request(prompt)
    _, keys = arrived(world, 2 * PAGE)
    world.taking.adopt(req, keys)
    if when != "waiting":
        assert world.life.admit(req, 0, 0.0)
    if when == "retracted":
        world.life.retract(req)
        assert world.tier.used_bytes == 0 and world.memory.cache.cached_pages == 0, "nothing was written there"
    world.life.end(Ending(req, FinishReason.CANCELLED))
    assert world.free() and world.memory.cache.cached_pages == 0 and world.taking.take_backs() == ()


def test_keys_of_other_weights_are_forgotten() -> None:
    world = Handing()
    req = world.request(ids(3 * PAGE))
    _, keys = arrived(world, 2 * PAGE)
    world.taking.adopt(req, keys)
    era = world.taking.era
    world.life.start_over()
    assert world.taking.era == era + 1 and req not in world.taking and world.tier.used_bytes == 0


def test_room_is_refused_and_given_up() -> None:
    world = Handing(chunks=1)
    copy = world.taking.reserve(CHUNK, lambda: None)
    assert copy is not None and world.taking.reserve(1, lambda: None) is None
    world.taking.give_up(copy)
    assert world.tier.used_bytes == 0


def test_a_row_that_gets_more_than_keys_begins_with_nothing_cached() -> None:
    taking = Handing().taking
    assert [taking.at_most(limit) for limit in (None, 0, 7)] == [None, 0, 7]
    pool: Any = SimpleNamespace()
    taking._others = [pool]
    assert [taking.at_most(limit) for limit in (None, 0, 7)] == [0, 0, 0]


def test_what_other_salts_have_cached_is_wanted_all_the_same() -> None:
    world, prompt = Handing(), ids(4 * PAGE)
    first = world.request(prompt)
    world.compute(first)
    world.life.end(Ending(first, FinishReason.LENGTH))
    assert world.taking.missing(prompt, 3 * PAGE, first.salt) == 3 * PAGE
    assert world.taking.missing(prompt, 3 * PAGE, "another") == 0


def test_the_device_forgets_what_was_reserved_and_given_up() -> None:
    world = Handing()
    first = world.taking.reserve(PAGE, lambda: None)
    assert first is not None
    world.taking.give_up(first)
    assert world.taking.reserve(PAGE, lambda: None) is not None
    assert [out.dropped for out in world.moves.begun] == [(), (first.number,)]


def test_copies_are_settled_in_the_step_in_which_others_land() -> None:
    """The giver has woken the loop once: nothing else would."""
    host: Any = object.__new__(HostCache)
    host.disk = None
    settled = list[int]()
    host.outgoing = SimpleNamespace(land=lambda: True)
    host.handing = SimpleNamespace(settle=lambda: bool(settled.append(1)))  # type: ignore[func-returns-value]
    assert host.settle() and settled == [1]
