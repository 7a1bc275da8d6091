"""Bugs that engines of this kind have shipped, as tests of ours, where they bite: at the scheduler and its pools.

The numbers are those of the table in `docs/explanation/simulation.md`, which says of each where it came from, and for
those that are not here, which test covers them. Every oracle of the simulation is on in all of these.
"""

from __future__ import annotations

import numpy as np
import pytest

from core.batch.schedule_batch import ForwardMode
from core.errors import InvalidRequest
from core.types.io import FinishReason, GenerateRequest
from core.types.request import RequestState
from core.types.sampling_params import SamplingParams
from tests.proofs.sim.stage import Stage


def prompt(length: int, first: int = 0) -> list[int]:
    """Tokens that no other prompt with another `first` begins with."""
    return [first, *range(1, length)]


@pytest.mark.parametrize("real_steps", [False, True])
def test_d01_long_prompts_in_many_chunks(real_steps: bool) -> None:
    stage = Stage(rows=8, pages=64, chunk=8, real_steps=real_steps)
    clients = [stage.add(prompt(30, first), 12) for first in (100, 200)]
    stage.finish()
    assert stage.hits["middle_chunk"] > 3
    stage.complete(*clients)


@pytest.mark.parametrize("real_steps", [False, True])
def test_d02_many_prefill_together_then_decode(real_steps: bool) -> None:
    stage = Stage(rows=64, pages=256, context=32, chunk=64, real_steps=real_steps)
    clients = [stage.add(prompt(2 + i % 9, i), 10) for i in range(64)]
    stage.finish()
    stage.complete(*clients)


@pytest.mark.parametrize("real_steps", [False, True])
def test_d03_row_reused_while_forward_stalled(real_steps: bool) -> None:
    stage = Stage(rows=1, real_steps=real_steps)
    first, second = stage.add([1, 2, 3], 40), stage.add([9, 8, 7], 5)
    for _ in range(3):
        stage.step()
    stage.abort(first)
    stage.stall()
    assert second.req.state is RequestState.RUNNING, "it owns the row while the device still works for the first"
    assert stage.hits["row_reused_in_flight"] == 1
    stage.finish()
    stage.cut(first)
    stage.complete(second)
    assert stage.scheduler.stats.stale_results > 0


def test_d06_one_of_two_ends_while_the_forward_is_stalled() -> None:
    stage = Stage()
    short, long = stage.add([1], 2), stage.add([2], 12)
    stage.step(execute=2, deliver=2)
    for _ in range(3):
        stage.stall()
    assert short.ended is not None and long.ended is None
    stage.finish()
    stage.complete(short, long)


def test_d07_retraction_and_radix_insert_while_the_forward_is_stalled() -> None:
    """Pages and table entries change hands on the host while the device has not read them yet."""
    stage = Stage(rows=3, pages=6, page_size=2, context=16)
    old, young = stage.add(prompt(4, 50), 8), stage.add(prompt(4, 60), 8)
    for _ in range(12):
        stage.step()
    assert young.req.retractions and stage.hits["page_reused_in_flight"]
    stage.finish()
    stage.complete(old, young)


def test_d10_outputs_go_to_their_requests_when_the_running_set_changes() -> None:
    """Between submission and result one leaves and one joins, in the middle of the order."""
    stage = Stage(rows=3)
    a, b, c = (stage.add([i], 12) for i in range(3))
    for _ in range(3):
        stage.step()
    stage.abort(b)
    late = stage.add([77], 12)
    stage.stall()
    assert late.req.row == b.owner[0]
    stage.finish()
    stage.cut(b)
    stage.complete(a, c, late)


@pytest.mark.parametrize("place", ["intake", "waiting", "prefilling", "in flight only", "retracted"])
def test_d11_abort_finds_the_request_wherever_it_is(place: str) -> None:
    stage = Stage(rows=1, chunk=4)
    other = stage.add(prompt(6, 70), 8)
    if place != "waiting":
        stage.abort(other)
        stage.step()
    client = stage.add(prompt(10, 80), 8)
    for _ in range({"intake": 0, "waiting": 3, "prefilling": 2}.get(place, 6)):
        stage.step()
    if place == "retracted":
        stage.scheduler._lifecycle.retract(client.req)
        client.forced += 1
    elif place == "in flight only":
        stage.stall()
    stage.abort(client)
    stage.stall()
    assert client.ended is not None and client.req.row == 0
    stage.finish()
    stage.cut(client)


def test_d12_abort_while_the_final_chunk_is_in_flight() -> None:
    stage = Stage(chunk=4)
    client = stage.add(prompt(8, 90), 6)
    stage.stall()
    assert client.req.state is RequestState.RUNNING and stage.device.in_flight == 2, "both chunks are submitted"
    stage.abort(client)
    stage.step(execute=2, deliver=2)
    stage.finish()
    assert client.tokens == [] and client.ended is not None


def test_d13_result_of_a_chunk_arrives_after_its_owner_left() -> None:
    stage = Stage(rows=1, chunk=4)
    gone, heir = stage.add(prompt(12, 10), 4), stage.add(prompt(12, 20), 4)
    stage.step(execute=2, deliver=0)
    stage.abort(gone)
    for _ in range(2):
        stage.step(execute=0, deliver=1)
    stage.finish()
    stage.cut(gone)
    stage.complete(heir)


def test_d14_abort_in_the_step_whose_result_ends_the_request() -> None:
    """The result is taken first, so it ends by its length; the abort that comes with it finds nobody."""
    stage = Stage(rows=1)
    client = stage.add([4, 5], 2)
    stage.step(execute=2, deliver=2)
    stage.abort(client)
    stage.step()
    assert client.ended is not None and client.ended.reason is FinishReason.LENGTH
    stage.abort(client)
    stage.finish()
    stage.complete(client)


def test_d15_mixed_chunk_request_that_ends_in_its_first_prefill() -> None:
    stage = Stage(rows=2)
    long = stage.add([1], 20)
    stage.step()
    for i in range(6):
        brief = stage.add([30 + i, 2], 1)
        for _ in range(3):
            stage.step()
        stage.complete(brief)
    assert stage.hits["mixed_step"] > 0
    stage.finish()
    stage.complete(long)


@pytest.mark.parametrize("cache", ["radix", "none"])
@pytest.mark.parametrize("every", [1, 2, 3])
def test_d16_retraction_all_the_time_changes_no_token(cache: str, every: int) -> None:
    stage = Stage(rows=3, pages=8, page_size=2, context=16, cache=cache, retract_every=every)
    clients = [stage.add(prompt(3, first), 9) for first in (40, 50, 60, 70)]
    for _ in range(60):
        stage.step()
    assert stage.hits["forced_retraction"] > 5
    stage.finish()
    stage.complete(*clients)


def test_d17_retraction_with_a_result_pending() -> None:
    """The token that is on its way when the row is taken comes again, at the same position and with the same value."""
    stage = Stage(rows=2)
    client = stage.add([6, 7], 10)
    for _ in range(3):
        stage.step()
    stage.device.execute_one()
    stage.scheduler._lifecycle.retract(client.req)
    client.forced += 1
    stage.step()
    stage.finish()
    assert stage.scheduler.stats.stale_results > 0
    stage.complete(client)


@pytest.mark.parametrize("cache", ["radix", "none"])
def test_d18_abort_in_the_queue_leaks_nothing(cache: str) -> None:
    stage = Stage(rows=1, cache=cache)
    running = stage.add([1, 2], 30)
    for _ in range(4):
        stage.step()
    fresh = stage.add([3], 5)
    stage.step()
    stage.scheduler._lifecycle.retract(running.req)
    running.forced += 1
    for client in (fresh, running):
        stage.abort(client)
    stage.step()
    assert stage.memory.rows.used == 0 and stage.memory.owned_pages() == 0
    stage.finish()
    stage.cut(fresh, running)


def test_d19_tokens_and_log_probabilities_stay_together_over_retractions() -> None:
    """Each token's own value comes with it, once; the clients compare every pair."""
    stage = Stage(rows=2, pages=8, page_size=2, context=16, retract_every=2)
    clients = [stage.add([i, 3], 10, logprobs=True, top_logprobs=2) for i in range(3)]
    for _ in range(30):
        stage.step()
    stage.finish()
    stage.complete(*clients)
    assert stage.hits["logprobs"] == sum(len(client.tokens) for client in clients) == 30


def test_d23_more_prefills_than_rows_and_no_decode() -> None:
    stage = Stage(rows=2)
    clients = [stage.add([i, 1], 1) for i in range(7)]
    stage.finish()
    stage.complete(*clients)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("prompt_len", [12, 15, 16])
def test_d24_what_passes_the_entry_is_admitted(page_size: int, prompt_len: int) -> None:
    """Prompt and output fill the pool to its last slot; one token more is refused at the door, and harms nobody."""
    stage = Stage(rows=2, pages=16 // page_size, page_size=page_size)
    room = stage.world.scenario.room(prompt_len)

    def enter(asked: int) -> int:
        request = GenerateRequest(sampling=SamplingParams(max_tokens=asked))
        (req,) = stage.world.inputs.entry.sequences(request, "r", "g", np.zeros(prompt_len, np.int64), 0.0)
        return req.max_new_tokens

    with pytest.raises(InvalidRequest):
        enter(room + 1)
    clients = [stage.add(prompt(prompt_len, first), enter(room)) for first in (1, 2)]
    stage.finish()
    stage.complete(*clients)


def test_d26_counters_survive_preemption_with_a_step_in_flight() -> None:
    """Planned and known tokens never part by more than the steps in flight; the oracle `kv_length` counts them."""
    stage = Stage(rows=3, retract_every=3)
    clients = [stage.add([i], 12) for i in range(3)]
    for i in range(60):
        stage.step(execute=i % 2, deliver=i % 3)
    stage.finish()
    stage.complete(*clients)


def test_d27_a_running_request_skips_steps_and_goes_on() -> None:
    """Without mixed steps every prefill keeps the decodes waiting; their newest token stays on the device meanwhile."""
    stage = Stage(rows=4, mixed=False, chunk=2)
    runner = stage.add([5], 12)
    for _ in range(3):
        stage.step()
    late = stage.add(prompt(14, 90), 4)
    submitted: list[ForwardMode] = []
    for _ in range(8):
        stage.stall()
        submitted += [batch.mode for batch in stage.device.queued]
        stage.device.execute_one()
        stage.device.deliver_one()
    assert submitted.count(ForwardMode.EXTEND) > 6
    stage.finish()
    stage.complete(runner, late)


@pytest.mark.parametrize("real_steps", [False, True])
def test_d28_pages_handed_on_while_their_last_step_is_in_flight(real_steps: bool) -> None:
    stage = Stage(rows=2, pages=4, page_size=2, context=12, cache="none", real_steps=real_steps)
    first = stage.add([1, 2, 3, 4], 5)
    for _ in range(3):
        stage.step()
    heir = stage.add([9, 8, 7, 6, 5], 4)
    stage.abort(first)
    stage.stall()
    assert stage.hits["page_reused_in_flight"] > 0
    stage.finish()
    stage.cut(first)
    stage.complete(heir)


def test_d29_freed_pages_count_at_once() -> None:
    """Nothing is fenced, so a full pool that one request leaves has room for the next in the very same step."""
    stage = Stage(rows=4, pages=4, page_size=4, context=20)
    big, other = stage.add(prompt(13, 1), 4), stage.add(prompt(13, 2), 4)
    for _ in range(3):
        stage.step()
    stage.abort(big)
    stage.stall()
    assert other.req.state is RequestState.RUNNING and stage.scheduler.tally.preemptions == 0
    stage.finish()
    stage.complete(other)


def test_d30_a_late_abort_never_hits_the_next_of_that_name() -> None:
    """Every request of a stage goes by one id; an abort names the object."""
    stage = Stage(rows=1)
    first = stage.add([1], 2)
    for _ in range(5):
        stage.step()
    assert first.ended is not None
    second = stage.add([2], 6)
    stage.abort(first)
    stage.abort(first)
    stage.finish()
    stage.complete(first, second)


def test_d35_late_result_for_a_row_that_was_taken_and_given_back() -> None:
    """Retracted and seated again in the same row: the old step's token is for a generation that is over."""
    stage = Stage(rows=1)
    client = stage.add([6, 7], 8)
    for _ in range(3):
        stage.step()
    before = client.owner
    stage.scheduler._lifecycle.retract(client.req)
    client.forced += 1
    stage.stall()
    assert client.owner[0] == before[0] and client.owner[1] > before[1]
    stage.finish()
    stage.complete(client)
    assert stage.scheduler.stats.stale_results > 0


def test_d36_preempted_with_a_prefix_hit_and_nobody_left_to_plan() -> None:
    stage = Stage(rows=2, pages=6, page_size=2, context=12)
    client = stage.add([1, 2, 3, 4, 5], 6)
    for _ in range(4):
        stage.step()
    stage.scheduler._lifecycle.retract(client.req)
    client.forced += 1
    stage.step()
    assert stage.hits["prefix_hit"] > 0, "what it had computed was found again"
    stage.abort(client)
    for _ in range(2):
        stage.step()
    assert stage.hits["empty_plan"] > 0
    stage.finish()
    stage.cut(client)
