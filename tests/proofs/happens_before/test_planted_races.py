"""Races put into the production step on purpose: each is reported by name, and where data can differ, it does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from core.batch.schedule_batch import ScheduleBatch
from core.device.checks import DeviceChecks
from core.device.event import Event
from core.device.recorder import RecordedEvent
from core.device.staging import Staging
from core.device.streams import COPY, FORWARD, TRANSFER, DeviceStreams
from core.executor.launched_step import RESULTS, SAMPLED
from core.memory.host_arena import HOST
from core.memory.leases import Leases
from core.relay.future_map import FutureMap
from core.relay.payload import RelayPayload
from core.sampling.penalties import TokenHistory
from core.types.arrays import Ints
from tests.proofs.happens_before.harness import Ask, Outcome, Scenario, play_lazily, play_plainly
from tests.proofs.happens_before.lazy_streams import DEFAULT
from tests.proofs.happens_before.seeded_executor import WAITER, SeededExecutor
from tests.proofs.happens_before.test_step_kinds import PENALTIES, SCENARIOS, prompt

LOOP = "MainThread"
SEEDS = range(3)
SCENARIO = Scenario([Ask(prompt(9, i), tokens=5, at=i, sampling=PENALTIES) for i in range(3)], rows=2, chunk=8)


def copy_does_not_wait(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RecordedEvent, "wait", lambda self, stream: None)


def one_event_for_all(patch: pytest.MonkeyPatch) -> None:
    make = DeviceStreams.new_event

    def new_event(self: DeviceStreams) -> Event:
        event: Event = self.__dict__.setdefault("_the_event", make(self))
        return event

    patch.setattr(DeviceStreams, "new_event", new_event)


def results_are_read_early(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RecordedEvent, "synchronize", lambda self: None)


def the_loop_writes_the_table(patch: pytest.MonkeyPatch) -> None:
    submit = SeededExecutor.submit

    def write_and_submit(self: SeededExecutor, batch: ScheduleBatch) -> None:
        writes = batch.table_writes
        columns = [torch.from_numpy(column) for column in (writes.rows, writes.places, writes.pages)]
        self._runner._state.pool.write(*columns, writes.page_size)
        submit(self, batch)

    patch.setattr(SeededExecutor, "submit", write_and_submit)


def a_pinned_buffer_is_filled_again(patch: pytest.MonkeyPatch) -> None:
    shared = torch.empty(64, dtype=torch.int64)

    def pinned(self: Staging, ids: Sequence[Ints]) -> torch.Tensor:
        flat = torch.cat([torch.from_numpy(part) for part in ids])
        return shared[: len(flat)].copy_(flat)

    patch.setattr(Staging, "pinned", pinned)


def tokens_are_stashed_on_the_copy_stream(patch: pytest.MonkeyPatch) -> None:
    stash = FutureMap.stash

    def misplaced(self: FutureMap, rows: torch.Tensor, payload: RelayPayload) -> None:
        with self._streams.on_copy():
            stash(self, rows, payload)

    patch.setattr(FutureMap, "stash", misplaced)


def tokens_are_gathered_on_the_copy_stream(patch: pytest.MonkeyPatch) -> None:
    gather = FutureMap.gather

    def misplaced(self: FutureMap, rows: torch.Tensor) -> torch.Tensor:
        with self._streams.on_copy():
            return gather(self, rows)

    patch.setattr(FutureMap, "gather", misplaced)


def the_loop_appends_the_history(patch: pytest.MonkeyPatch) -> None:
    append = TokenHistory.append

    def misplaced(self: TokenHistory, *columns: torch.Tensor) -> None:
        recorder: Any = self.recorder
        with recorder.as_thread(LOOP):
            append(self, *columns)

    patch.setattr(TokenHistory, "append", misplaced)


def live_counters_are_copied(patch: pytest.MonkeyPatch) -> None:
    """As the step once did: the copy of one step's counters ran beside the next step's counting."""
    patch.setattr(DeviceChecks, "snapshot", lambda self, violated: self.counters)


def pools_are_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    """As it once was: filled on the default stream, used on the forward stream."""
    patch.setattr(DeviceStreams, "synchronize", lambda self: None)


def copies_back_do_not_wait(patch: pytest.MonkeyPatch) -> None:
    wait = RecordedEvent.wait

    def no_wait_there(self: RecordedEvent, stream: Any) -> None:
        if stream.name != FORWARD:
            wait(self, stream)

    patch.setattr(RecordedEvent, "wait", no_wait_there)


def copies_out_do_not_wait(patch: pytest.MonkeyPatch) -> None:
    wait = RecordedEvent.wait

    def no_wait_there(self: RecordedEvent, stream: Any) -> None:
        if stream.name != TRANSFER:
            wait(self, stream)

    patch.setattr(RecordedEvent, "wait", no_wait_there)


def pages_are_not_leased(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Leases, "divert", lambda self, pages: pages)


@dataclass(frozen=True, slots=True)
class Planted:
    """A mutation, the race it must be reported as, and whether some seed must also see other tokens, or trouble."""

    mutate: Callable[[pytest.MonkeyPatch], None]
    buffer: str
    lanes: tuple[str, str]
    spoils: bool
    scenario: Scenario = SCENARIO

    @property
    def name(self) -> str:
        """Of the test."""
        behind = "" if self.scenario is not SCENARIOS["host prefix"] else "-prefix"
        return self.mutate.__name__ + behind


PLANTED = [
    Planted(copy_does_not_wait, SAMPLED, (FORWARD, COPY), spoils=True),
    Planted(one_event_for_all, RESULTS, (COPY, WAITER), spoils=False),
    Planted(results_are_read_early, RESULTS, (COPY, WAITER), spoils=True),
    Planted(the_loop_writes_the_table, "req_to_token", (LOOP, FORWARD), spoils=False),
    Planted(a_pinned_buffer_is_filled_again, "staging", (LOOP, FORWARD), spoils=True),
    Planted(tokens_are_stashed_on_the_copy_stream, "output_tokens_buf", (FORWARD, COPY), spoils=True),
    Planted(tokens_are_gathered_on_the_copy_stream, "output_tokens_buf", (FORWARD, COPY), spoils=True),
    Planted(the_loop_appends_the_history, "token_history", (LOOP, FORWARD), spoils=False),
    Planted(live_counters_are_copied, "memory of assert counters", (FORWARD, COPY), spoils=False),
    Planted(pools_are_not_waited_for, "memory of aten.zeros.default", (DEFAULT, FORWARD), spoils=False),
    Planted(copies_back_do_not_wait, HOST, (TRANSFER, FORWARD), spoils=True, scenario=SCENARIOS["rejoin"]),
    Planted(copies_back_do_not_wait, HOST, (TRANSFER, FORWARD), spoils=False, scenario=SCENARIOS["host prefix"]),
    Planted(copies_out_do_not_wait, HOST, (FORWARD, TRANSFER), spoils=False, scenario=SCENARIOS["host blocks"]),
    Planted(pages_are_not_leased, "kv", (TRANSFER, FORWARD), spoils=False, scenario=SCENARIOS["rejoin"]),
]


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
def test_a_planted_race_is_reported_by_name(planted: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = play_plainly(planted.scenario)
    planted.mutate(monkeypatch)
    outcomes = [play_lazily(planted.scenario, seed, eagerness=0.0) for seed in SEEDS]
    found = [
        race
        for outcome in outcomes
        for race in outcome.races
        if race.buffer == planted.buffer and race.between(*planted.lanes)
    ]
    assert found, "".join(outcome.story for outcome in outcomes)
    assert planted.spoils <= any(_spoiled(outcome, plain) for outcome in outcomes)


def _spoiled(outcome: Outcome, plain: Outcome) -> bool:
    return outcome.failure is not None or outcome.tokens != plain.tokens


def test_without_a_mutation_the_same_scenario_is_clean() -> None:
    plain = play_plainly(SCENARIO)
    for seed in SEEDS:
        outcome = play_lazily(SCENARIO, seed, eagerness=0.0)
        assert not outcome.races and not _spoiled(outcome, plain), outcome.story
