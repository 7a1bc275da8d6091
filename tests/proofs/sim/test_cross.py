"""Encoder inputs and adapters in scripted runs: who aborts when, and what is left of it."""

from __future__ import annotations

import pytest

from core.types.request import RequestState
from tests.proofs.sim.clients import Client
from tests.proofs.sim.reference import VOCAB, answer
from tests.proofs.sim.scenario import Cross, draw
from tests.proofs.sim.stage import Stage
from tests.proofs.sim.story import Story
from tests.proofs.sim.sweep import play

REAL = pytest.mark.parametrize("real_steps", [False, True])


def ids(length: int, first: int = 0) -> list[int]:
    """An input that differs from those of another `first`."""
    return [VOCAB + (first + place) % 7 for place in range(length)]


def stage(pages: int, *, real_steps: bool, chunk: int = 8, rows: int = 2) -> Stage:
    """Pages of two tokens, and a decoder that starts from one id."""
    cross = Cross(pages, longest=20, start_ids=(3,), forced_first=(7,), forced_last=())
    return Stage(rows=rows, page_size=2, cache="none", chunk=chunk, real_steps=real_steps, cross=cross)


def used(world: Stage) -> dict[str, int]:
    """By pool."""
    return {pool.name: pool.used for pool in world.memory.stats()}


@REAL
def test_d18_abort_in_the_queue_leaks_no_cross_page(real_steps: bool) -> None:
    """Who waits for cross pages has none, who gave way has none, and none is left behind."""
    world = stage(4, real_steps=real_steps)
    running = world.add(ids(7), 20)
    for _ in range(4):
        world.step()
    refused = world.add(ids(3, 1), 5)
    world.step()
    assert world.hits["cross_refused"] and refused.req.state is RequestState.WAITING
    world.scheduler._lifecycle.retract(running.req)
    running.forced += 1
    for client in (refused, running):
        world.abort(client)
    world.step()
    assert not any(used(world).values())
    heir = world.add(ids(8, 2), 4)
    world.finish()
    world.cut(refused, running)
    world.complete(heir)


@REAL
def test_abort_before_the_input_is_encoded(real_steps: bool) -> None:
    """Its step is in flight when it goes; the next takes the pages at once, and the device gets to both in order."""
    world = stage(4, real_steps=real_steps)
    gone = world.add(ids(8), 1)
    world.stall()
    world.abort(gone)
    heir = world.add(ids(8, 3), 9)
    world.stall()
    assert heir.req.state is RequestState.RUNNING and world.device.in_flight == 2
    assert world.hits["cross_reused_in_flight"] == 1
    world.finish()
    world.cut(gone)
    world.complete(heir)
    assert gone.tokens == [] and heir.tokens[0] == 7, "the first is forced"


@REAL
def test_an_input_longer_than_a_step_is_encoded_alone_and_again(real_steps: bool) -> None:
    """A retraction runs its encoder a second time, and changes no token."""
    world = stage(16, real_steps=real_steps, chunk=4)
    long, short = world.add(ids(15), 12), world.add(ids(2, 5), 12)
    for _ in range(6):
        world.step()
    assert world.hits["cross_over_budget"] == 1
    world.scheduler._lifecycle.retract(long.req)
    long.forced += 1
    world.finish()
    assert world.hits["cross_over_budget"] == 2 and world.hits["cross_encoded_again"] == 1
    world.complete(long, short)


def test_an_input_says_what_its_request_is_told() -> None:
    """The reference: other inputs, other outputs, of any two that differ in one place."""

    def told(client: Client) -> tuple[int, ...]:
        req = client.req
        return answer(req.prompt.tolist(), req.params, req.seed, req.max_new_tokens, 1, client.encoder).tokens

    world = stage(16, real_steps=False)
    clients = [world.add(sent, 8) for sent in (ids(6), [*ids(5), ids(6)[0]], ids(5), ids(6))]
    outputs = [told(client) for client in clients]
    assert len(set(outputs)) == 3 and outputs[0] == outputs[3]
    world.finish()
    world.complete(*clients)


def test_the_story_tells_of_inputs_and_adapters() -> None:
    drawn = [draw(seed) for seed in range(1000)]
    encoder = next(s.seed for s in drawn if s.cross and s.depth == 2)
    adapters = next(s.seed for s in drawn if s.adapters and s.adapters.room > 1 and s.arrivals > 0.1)
    stories = Story(tracing=True), Story(tracing=True)
    assert not play(encoder, 100, story=stories[0]).oracle and not play(adapters, 300, story=stories[1]).oracle
    first, second = ("\n".join(story.lines) for story in stories)
    assert "encoder reads [5" in first and "encoder: [" in first and "in pages [" in first
    assert "load of " in second and "adapters: slot" in second and "for tokens [" in second
