"""When a request is told as begun: as the step that makes its first token is submitted, and no earlier."""

from __future__ import annotations

import pytest

from core.scheduler.outputs import StepOutputs
from core.types.request import Req
from tests.unit.core.scheduler.harness import Harness


class Told(Harness):
    """Keeps what was begun, and how many batches had been submitted by then."""

    begun: list[tuple[Req, int]]

    def _emit(self, outputs: StepOutputs, now: float) -> None:
        told = [(req, len(self.executor.batches)) for req in outputs.begun]
        self.begun = [*getattr(self, "begun", []), *told]
        super()._emit(outputs, now)


@pytest.fixture
def harness() -> Told:
    made = Told(rows=2, depth=1)
    made.begun = []
    return made


def test_begun_before_its_step_has_run(harness: Told) -> None:
    req = harness.add(range(10))
    harness.step(run=False)
    assert harness.begun == [(req, 1)] and harness.seen[req].tokens == []
    harness.drain()
    assert harness.begun == [(req, 1)], "once"
    harness.expect(req)


def test_a_long_prompt_has_begun_with_its_last_chunk(harness: Told) -> None:
    req = harness.add(range(40))
    while not harness.begun:
        harness.step()
    assert harness.begun == [(req, 3)], "40 tokens are three chunks of at most 16"
    harness.drain()


def test_a_request_in_the_queue_has_not_begun(harness: Told) -> None:
    first, second = harness.add(range(4), 3), harness.add(range(4, 8), 3)
    third = harness.add(range(8, 12), 3)
    harness.step(run=False)
    assert [req for req, _ in harness.begun] == [first, second]
    harness.drain()
    assert [req for req, _ in harness.begun] == [first, second, third]
    assert harness.seen[third].tokens


def test_a_decode_step_beside_a_prompt_begins_no_other_request(harness: Told) -> None:
    first = harness.add(range(4), 12)
    for _ in range(3):
        harness.step()
    second = harness.add(range(4, 8), 3)
    harness.drain()
    assert [req for req, _ in harness.begun] == [first, second]
