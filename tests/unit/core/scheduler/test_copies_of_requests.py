"""Prefixes in host memory through the life of a request: what its end, its return and its faults leave there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from core.errors import RequestFailed
from core.lanes import LaneRecorder
from core.memory.usable_prefix import Usable
from core.scheduler.fair_share import FairShare
from core.scheduler.lifecycle import Lifecycle
from core.scheduler.outputs import Ending
from core.scheduler.phases import PhaseClock
from core.scheduler.policy import POLICIES
from core.scheduler.prefill_adder import PrefillAdder
from core.scheduler.rejoining import Rejoining
from core.scheduler.running import RunningSet
from core.scheduler.sampling_table import SamplingTable
from core.scheduler.tally import Tally
from core.scheduler.waiting_queue import WaitingQueue
from core.types.arrays import Ints
from core.types.image import NO_IMAGES, PlacedImage, PromptImages, ReadImage
from core.types.request import Req
from core.types.sampling_params import SamplingParams
from tests.unit.core.memory.test_leases import PAGE, ids
from tests.unit.core.scheduler.test_prefix_copies import CHUNK, PAGES, World


@pytest.mark.parametrize("reach", [None, PAGE])
def test_only_what_finite_logits_vouch_for_is_copied(reach: int | None) -> None:
    world, prompt = World(reach=reach), ids(2 * CHUNK)
    seat = world.seat(prompt)
    world.leave(seat, prompt, sound=reach is not None)
    assert world.moves.begun == [] and world.copies.kept == 0 and world.tier.used_bytes == 0
    world.check()


def test_only_what_is_copied_is_leased() -> None:
    world, prompt = World(), ids(3 * CHUNK + 1)
    world.serve(prompt[: 2 * CHUNK])
    seat = world.seat(prompt)
    assert world.copies.take_backs() == (), "the device has it"
    world.leave(seat, prompt)
    ((lease,),) = [tuple(world.memory.leases._leases.values())]
    assert len(lease.pages) == CHUNK // PAGE
    world.land()
    assert len(world.memory.leases) == 0
    world.check()


def test_a_retracted_row_that_still_waited_keeps_nothing() -> None:
    """No batch has carried its prefix: what its pages hold is of others."""
    world, prompt = World(), ids(2 * CHUNK + 1)
    world.serve(prompt)
    world.memory.flush()
    life = life_of(world)
    req = Req("r", 0, prompt, SamplingParams(max_tokens=4), 0, 4)
    life.enter(req)
    assert life.admit(req, 0, 0.0) and req.cached_tokens == req.computed_from == 2 * CHUNK
    assert life.running.planned[req.row] == 2 * CHUNK
    life.retract(req)
    assert world.memory.cache.cached_pages == 0 and world.copies.take_backs() == ()
    assert life.admit(req, 0, 0.0) and len(world.copies.take_backs()) == 1
    world.check()


def test_what_comes_back_is_as_sound_as_it_was() -> None:
    world, prompt = World(), ids(2 * CHUNK + 1)
    world.serve(prompt)
    world.memory.flush()
    seat = world.seat(prompt)
    pages = world.memory.pages_of(seat.row, len(prompt))
    assert world.memory.sound.leading(pages) == 2 * CHUNK // PAGE, "and its last page is not"


def test_a_row_that_goes_before_a_batch_lets_its_copies_go() -> None:
    world, prompt = World(chunks=2), ids(2 * CHUNK + 1)
    world.serve(prompt)
    world.memory.flush()
    seat = world.seat(prompt)
    assert world.prefixes.flush() == 0, "a row waits for it"
    assert world.copies.gone(seat.row) and not world.copies.gone(seat.row)
    world.memory.release(seat.row, seat.generation, prompt[:0])
    assert world.copies.take_backs() == () and world.prefixes.flush() == 2 * CHUNK
    world.check()


def test_copies_that_were_taken_along_may_go() -> None:
    world, prompt = World(chunks=2), ids(2 * CHUNK + 1)
    world.serve(prompt)
    world.memory.flush()
    world.seat(prompt)
    world.copies.take_backs()
    assert world.copies.flush() == 2 * CHUNK
    assert world.copies.peek(prompt, len(prompt), "") == 0


def life_of(world: World, rejoining: Rejoining | None = None) -> Lifecycle:
    running, tally = RunningSet(4, 64), Tally(PhaseClock(LaneRecorder()))
    host: Any = SimpleNamespace(rejoining=rejoining, prefixes=world.copies, handing=None, taking=None)
    parts = (world.memory, SamplingTable(4, 64, ()), tally, FairShare(64, 4), host)
    return Lifecycle(WaitingQueue(POLICIES["fcfs"]()), running, *parts)


def decoding(life: Lifecycle, world: World, prompt: Ints, images: PromptImages = NO_IMAGES, outputs: int = 1) -> Req:
    """A request whose prompt is computed, and that has put out some tokens."""
    req = Req("r", 0, prompt, SamplingParams(max_tokens=9), 0, 9, images=images)
    life.enter(req)
    assert life.admit(req, 0, 0.0)
    life.running.plan_prompt(req.row, len(prompt))
    world.copies.take_backs()
    world.memory.vouch(req.row, len(prompt))
    for number in range(outputs):
        row = np.array([req.row])
        known = life.running.known[row].copy()
        if number:
            life.running.plan_decodes(row, np.array([1]))
        life.running.append(row, known, np.array([7]))
    return req


@pytest.mark.parametrize("how", ["condemned", "retracted for another's fault", "other weights"])
def test_nothing_of_what_is_not_kept_is_copied(how: str) -> None:
    world, prompt = World(), ids(2 * CHUNK)
    life = life_of(world)
    if how == "other weights":
        world.serve(prompt)
        assert world.prefixes.tokens
    req = decoding(life, world, prompt)
    if how == "condemned":
        life.condemn(Ending(req, error=RequestFailed("no number")))
    elif how == "other weights":
        life.start_over()
    else:
        life.retract(req, keep=False)
    assert world.moves.begun == [] and world.prefixes.tokens == 0
    world.check()


def test_a_request_that_comes_back_by_itself_fetches_nothing_beside() -> None:
    world, prompt = World(), ids(2 * CHUNK + 1)
    rejoining = Rejoining(world.tier, world.outgoing)
    life = life_of(world, rejoining)
    world.serve(prompt)
    world.memory.flush()
    req = decoding(life, world, prompt, outputs=2)
    fetched = world.copies.fetched
    life.retract(req)
    world.land()
    world.memory.flush()
    assert req in rejoining and life.admit(req, 0, 0.0)
    assert world.copies.take_backs() == () and world.copies.fetched == fetched
    assert len(rejoining.take_backs()) == 1


def test_what_a_request_finds_of_its_own_as_it_comes_back_is_condemned_with_it() -> None:
    """It computed that before it gave way, and what it was told to go on from is no better."""
    world, prompt = World(), ids(2 * CHUNK + 1)
    life = life_of(world, Rejoining(world.tier, world.outgoing))
    req = decoding(life, world, prompt, outputs=2)
    world.memory.offer(req.row, prompt)
    life.retract(req)
    world.land()
    assert life.admit(req, 0, 0.0) and world.memory.pages_found(np.array([req.row])).tolist() == [2 * CHUNK // PAGE]
    life.condemn(Ending(req, error=RequestFailed("no number")))
    assert world.memory.cache.cached_pages == 0
    world.check()


def test_a_tenant_that_is_flushed_leaves_the_copies_of_others() -> None:
    world = World()
    for salt in ("a\0", "b\0"):
        world.leave(world.seat(ids(CHUNK), salt), ids(CHUNK), salt=salt)
        world.land()
    life_of(world).flush("a")
    assert world.prefixes.tokens == CHUNK and world.prefixes.peek(ids(CHUNK), CHUNK, "b\0") == CHUNK


@pytest.mark.parametrize("tenant", [None, "a"])
def test_a_flush_does_not_wait_for_copies(tenant: str | None) -> None:
    """What is under way keeps its pages from others; no request finds them any more."""
    world, prompt = World(), ids(2 * CHUNK)
    for salt in ("a\0", "b\0"):
        world.leave(world.seat(prompt, salt), prompt, salt=salt)
    pages = len(prompt) // PAGE
    assert world.memory.flush(tenant) == (pages if tenant else 2 * pages)
    assert world.memory.cache.peek(prompt, len(prompt), "a\0") == 0
    assert world.memory.cache.peek(prompt, len(prompt), "b\0") == (len(prompt) if tenant else 0)
    assert world.memory.allocator.available == PAGES - 2 * pages, "they are read still"
    world.check()
    world.land()
    assert world.memory.allocator.available == (PAGES - pages if tenant else PAGES)
    world.check()


def test_what_the_device_has_and_nothing_vouches_for_stays_doubted() -> None:
    world, prompt = World(), ids(2 * CHUNK + 1)
    world.serve(prompt)
    world.memory.flush()
    seat = world.memory.admit(prompt[: PAGE + 1], "", 0)
    assert seat is not None
    world.memory.release(seat.row, seat.generation, prompt[:PAGE])
    seat = world.seat(prompt)
    assert seat.cached_tokens == 2 * CHUNK
    assert world.memory.sound.leading(world.memory.pages_of(seat.row, PAGE)) == 0


def cut(at: int) -> Usable:
    """An image begins at token `at` and ends with the first chunk."""
    return lambda tokens: at if at < tokens <= CHUNK else tokens


@pytest.mark.parametrize("device", [0, 1])
def test_what_ends_within_an_image_is_fetched_to_its_beginning(device: int) -> None:
    """Only the first chunk is held, and an image begins within it, behind a page that the device may have."""
    world, prompt = World(), ids(2 * CHUNK + 1)
    world.serve(prompt[:CHUNK])
    world.memory.flush()
    if device:
        world.serve(prompt[: PAGE + 1])
    seat = world.memory.admit(prompt, "", 0)
    assert seat is not None and seat.cached_tokens == device * PAGE
    found, backs = world.copies.fetch(seat, prompt, "", cut(PAGE + 1)), world.copies.take_backs()
    if device:
        assert found is seat and backs == ()
    else:
        assert found.cached_tokens == PAGE and [(len(each.slots), len(each.copies)) for each in backs] == [(PAGE, 1)]


def test_a_request_that_fetched_up_to_an_image_can_be_condemned() -> None:
    """Where it began to compute, the cache is cut: at a page, whatever lies there."""
    world, prompt = World(), ids(2 * CHUNK + 1)
    images = PromptImages((PlacedImage(CHUNK - 3, ReadImage(np.zeros((6, 2), np.float32), None, 6)),))
    keyed = images.keyed(prompt)
    world.serve(keyed[:CHUNK])
    world.memory.flush()
    life = life_of(world)
    req = decoding(life, world, prompt, images, outputs=0)
    assert req.computed_from == PAGE
    life.condemn(Ending(req, error=RequestFailed("no number")))
    world.check()


def test_what_is_kept_with_the_first_token_is_of_the_images_too() -> None:
    """Which other images in the same place are not."""
    world, prompt = World(), ids(2 * CHUNK + 1)
    images = PromptImages((PlacedImage(CHUNK - 3, ReadImage(np.zeros((6, 2), np.float32), None, 6)),))
    life = life_of(world)
    req = decoding(life, world, prompt, images, outputs=0)
    life.computed(req.row, len(prompt))
    assert world.prefixes.tokens == 0, "all of it is there when the row is given back"
    told: Any = SimpleNamespace(reached=lambda row: 0, gone=lambda row: None)
    world.copies.trails = told
    life.computed(req.row, len(prompt))
    keyed = images.keyed(prompt)
    assert [world.prefixes.peek(each, len(each), "") for each in (keyed, prompt)] == [2 * CHUNK, 0]


def test_the_longest_prefix_is_where_there_is_more_of_it() -> None:
    """For the policy that serves it first."""
    world, prompt = World(), ids(CHUNK + 1)
    seat = world.memory.admit(prompt, "", 0)
    assert seat is not None
    world.memory.release(seat.row, seat.generation, prompt)
    life = life_of(world)
    holdings: Any = None
    adder = PrefillAdder(life, cast(Any, None), holdings)
    req = Req("r", 0, prompt, SamplingParams(max_tokens=9), 0, 9)
    assert adder._match_len(req) == CHUNK
    world.serve(ids(3 * CHUNK, 500))
    world.memory.flush()
    assert adder._match_len(Req("s", 0, ids(3 * CHUNK, 500), SamplingParams(max_tokens=9), 0, 9)) == 2 * CHUNK
