"""Recurrent states and sliding windows in scripted runs, with the twin and with the production step."""

from __future__ import annotations

import pytest

from core.types.request import RequestState
from tests.proofs.sim.scenario import States, draw
from tests.proofs.sim.stage import Stage
from tests.proofs.sim.story import Story
from tests.proofs.sim.sweep import play


def prompt(length: int, first: int) -> list[int]:
    """Tokens that no other prompt with another `first` begins with."""
    return [first, *range(1, length)]


@pytest.mark.parametrize("cache", ["radix", "none"])
@pytest.mark.parametrize("real_steps", [False, True])
def test_d18_abort_in_the_queue_leaks_no_state(cache: str, real_steps: bool) -> None:
    """One recurrent state for two rows: who waits has none, who gave way has none, and none is left behind."""
    stage = Stage(rows=2, page_size=2, cache=cache, real_steps=real_steps, states=States(slots=1, interval=2))
    (side,) = stage.device.sides
    running = stage.add([1, 2, 3], 30)
    for _ in range(4):
        stage.step()
    refused = stage.add([4], 5)
    stage.step()
    assert stage.hits["state_refused"] and refused.req.state is RequestState.WAITING
    stage.scheduler._lifecycle.retract(running.req)
    running.forced += 1
    for client in (refused, running):
        stage.abort(client)
    stage.step()
    used = {pool.name: pool.used for pool in stage.memory.stats()}
    assert used[side.host.name] == used["req"] == 0
    heir = stage.add([5, 6], 4)
    stage.finish()
    stage.cut(refused, running)
    stage.complete(heir)


@pytest.mark.parametrize("real_steps", [False, True])
def test_d18_abort_in_a_prefill_leaves_what_it_kept_to_the_cache(real_steps: bool) -> None:
    """The state at the boundary that it had reached outlives it, once, and serves the next that asks the same."""
    stage = Stage(rows=1, page_size=2, chunk=4, depth=1, real_steps=real_steps, states=States(slots=3, interval=2))
    first = stage.add(prompt(5, 30), 4)
    for _ in range(6):
        stage.step()
    gone = stage.add([*prompt(5, 30), *range(60, 70)], 4)
    while gone.req.state is RequestState.WAITING:
        stage.step()
    assert stage.hits["state_resumed"] == 1
    stage.abort(gone)
    stage.step()
    again = stage.add(prompt(5, 30), 4)
    stage.finish()
    assert stage.hits["state_resumed"] == 2
    stage.cut(gone)
    stage.complete(first, again)


@pytest.mark.parametrize("real_steps", [False, True])
def test_a_prompt_is_cut_where_it_leaves_what_others_asked(real_steps: bool) -> None:
    """One chunk, kept twice: behind the shared system prompt, for all who follow, and at its own last boundary."""
    stage = Stage(rows=2, page_size=2, chunk=32, real_steps=real_steps, states=States(slots=8, interval=2))
    system = prompt(8, 40)
    for tail in (50, 60, 70):
        stage.add([*system, *range(tail, tail + 5)], 2)
        for _ in range(8):
            stage.step()
    assert stage.hits["state_kept_at_branch"] == 1, "the second finds where they part"
    assert stage.hits["state_resumed"] == 1, "the third starts there"
    stage.finish()
    stage.complete(*stage.world.clients.gone)


def test_the_story_tells_of_states_and_windows() -> None:
    both = next(seed for seed in range(1000) if (drawn := draw(seed)).states and drawn.windows and drawn.depth == 2)
    story = Story(tracing=True)
    assert not play(both, 100, story=story).oracle
    text = "\n".join(story.lines)
    assert "states: row" in text and "cleared" in text and "windows: page" in text
