"""Mutants of what clients see, of who is served, and of who is ended."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from core.batch.result import StepResult
from core.batch.schedule_batch import HistoryWrites
from core.scheduler import holdings, planner
from core.scheduler.intake import Intake
from core.scheduler.lifecycle import Lifecycle
from core.scheduler.outputs import Ending, StepTokens
from core.scheduler.planner import Planner
from core.scheduler.prefill_adder import PrefillAdder
from core.scheduler.result_processor import ResultProcessor
from core.scheduler.running import RunningSet
from core.scheduler.sampling_table import SamplingTable
from core.scheduler.scheduler import Scheduler
from core.scheduler.waiting_queue import WaitingLine
from core.types.arrays import Bools, Ints
from core.types.io import FinishReason
from core.types.request import Req, RequestState
from tests.proofs.sim.mutants import Patch, mutant, put


@mutant("kv_length", "positions")
def retraction_forgets_outputs(patch: Patch) -> None:
    """What was emitted must be computed again, not sampled again."""

    def forgetful(old: Any, self: RunningSet, req: Req) -> Ints:
        written: Ints = old(self, req)
        req.outputs = np.empty(0, np.int32)
        return written

    put(patch, RunningSet, "remove", forgetful)


@mutant("after_terminal")
def token_after_the_terminal(patch: Patch) -> None:
    """Law 11: the overshoot of a request that ended is handed on."""
    ended: list[tuple[Req, int, int]] = []

    def chatty(old: Any, self: ResultProcessor, result: StepResult, places: Ints, now: float) -> StepTokens:
        out: StepTokens = old(self, result, places, now)
        tokens = list(zip(out.reqs, out.tokens, out.positions, strict=True))
        for req, token, position in ended:
            out.reqs.append(req)
            out.tokens.append(token)
            out = replace(out, positions=np.append(out.positions, position))
        ended[:] = [(req, token, at + 1) for req, token, at in tokens if req.state is RequestState.FINISHED]
        return out

    put(patch, ResultProcessor, "_append", chatty)


@mutant("terminal_once")
def terminal_comes_twice(patch: Patch) -> None:
    """Law 11."""

    def double(old: Any, self: Lifecycle) -> tuple[Ending, ...]:
        ended: tuple[Ending, ...] = old(self)
        return ended + ended

    put(patch, Lifecycle, "take_ended", double)


@mutant("kv_length")
def decode_goes_on_after_the_limit(patch: Patch) -> None:
    """Rows whose outputs are all planned take another step."""

    def decoding(self: RunningSet) -> Ints:
        rows = self.order
        return rows[self.planned[rows] >= self.prefill_end[rows]]

    patch.setattr(RunningSet, "decoding", decoding)


@mutant("tokens")
def min_tokens_one_short(patch: Patch) -> None:
    """An output may stop one token early."""

    def short(old: Any, self: SamplingTable, req: Req) -> None:
        old(self, req)
        biases = self._biases[req.row]
        self._biases[req.row] = replace(biases, end=biases.end - np.isneginf(biases.values))

    put(patch, SamplingTable, "fill", short)


@mutant("tokens")
def rows_swap_their_seeds(patch: Patch) -> None:
    """Law 13: somebody samples with a neighbour's random numbers."""
    module = __import__("core.scheduler.sampling_table", fromlist=["uniforms"])
    put(patch, module, "uniforms", lambda old, origins, lens: old(np.roll(origins, 1, axis=0), lens))


@mutant("tokens")
def history_misses_the_outputs(patch: Patch) -> None:
    """After a retraction the device's token history starts with less than what is known."""
    patch.setattr(planner, "HistoryWrites", lambda rows, ids: HistoryWrites(rows, tuple(each[:1] for each in ids)))


@mutant("tokens")
def rows_of_nan_are_emitted(patch: Patch) -> None:
    """Token 0 of a spoiled row reaches the client."""
    patch.setattr(ResultProcessor, "_fail_untrusted", lambda self, result, places, bad: places)


@mutant("unasked_end")
def neighbours_of_nan_fail_too(patch: Patch) -> None:
    """Only the row itself may."""

    def broad(old: Any, self: ResultProcessor, result: StepResult, places: Ints, bad: Bools) -> Ints:
        kept: Ints = old(self, result, places, np.ones_like(bad))
        return kept

    put(patch, ResultProcessor, "_fail_untrusted", broad)


@mutant("ending", "end_obeyed")
def stop_is_called_length(patch: Patch) -> None:
    """The reason of an ending is wrong."""

    def rename(old: Any, self: Lifecycle, ended: Ending, **kwargs: Any) -> None:
        old(self, Ending(ended.req, FinishReason.LENGTH) if ended.reason is FinishReason.STOP else ended, **kwargs)

    put(patch, Lifecycle, "end", rename)


@mutant("logprobs")
def logprobs_of_another_row(patch: Patch) -> None:
    """D19: lists that belong together are cut apart."""

    def shift(old: Any, self: ResultProcessor, result: StepResult, places: Ints, now: float) -> StepTokens:
        out: StepTokens = old(self, result, places, now)
        return replace(out, logprob_rows=[len(result.rows) - 1 - row for row in out.logprob_rows])

    put(patch, ResultProcessor, "_append", shift)


# Who is served, and who is ended.


@mutant("end_obeyed")
def abort_in_the_queue_is_lost(patch: Patch) -> None:
    """D11: who is in neither the running set nor a batch is not found."""

    def deaf(old: Any, self: Lifecycle, ended: Ending, **kwargs: Any) -> None:
        if ended.reason is not FinishReason.CANCELLED or ended.req.state is not RequestState.WAITING:
            old(self, ended, **kwargs)

    put(patch, Lifecycle, "end", deaf)


@mutant("end_obeyed", "unasked_end")
def aborts_go_by_name(patch: Patch) -> None:
    """D30: the first live request with that id is ended."""

    def by_name(old: Any, self: Scheduler, command: Ending) -> None:
        named = [req for req in self.abandon() if req.request_id == command.req.request_id]
        old(self, replace(command, req=named[0]) if named else command)

    put(patch, Scheduler, "_end", by_name)


@mutant("unasked_end")
def queue_timeout_strikes_the_running(patch: Patch) -> None:
    """Waiting ends at the first step."""

    def expired(old: Any, self: Intake, now: float) -> list[Ending]:
        kept = [(req, req.scheduled_at) for req in self._expiring.values()]
        for req, _ in kept:
            req.scheduled_at = None
        due: list[Ending] = old(self, now)
        for req, at in kept:
            req.scheduled_at = at
        return due

    put(patch, Intake, "expired", expired)


@mutant("slept_through")
def expiries_are_not_announced(patch: Patch) -> None:
    """The loop sleeps until something else happens, and limits of time strike late."""
    patch.setattr(Intake, "next_expiry", lambda self: None)


@mutant("one_place", "order")
def retracted_request_is_not_queued(patch: Patch) -> None:
    """It is in no place at all."""

    def drop(self: Lifecycle, req: Req, *, keep: bool = True) -> None:
        self._unseat(req, keep=keep)
        req.move_to(RequestState.WAITING)
        req.retractions += 1
        self._tally.preemptions += 1

    patch.setattr(Lifecycle, "retract", drop)


@mutant("order")
def oldest_gives_way(patch: Patch) -> None:
    """Who was first in line pays for who came last."""
    patch.setattr(holdings, "victim", lambda running, policy: min(running, key=policy.key))


@mutant("order")
def youngest_is_admitted_first(patch: Patch) -> None:
    """The queue is a stack."""

    def last(old: Any, self: WaitingLine, match_len: Any, *, scoring: bool) -> Req | None:
        return max(self.members(), key=self.policy.key, default=None)

    put(patch, WaitingLine, "best", last)


@mutant("fits_alone")
def lone_request_is_ended(patch: Patch) -> None:
    """Who cannot get a page is ended, though an empty pool would hold it."""

    def harsh(old: Any, self: Planner) -> None:
        self._running.members = lambda: type(self._running).members(self._running)[-1:]  # type: ignore[method-assign]
        old(self)
        del self._running.members

    put(patch, Planner, "_give_way", harsh)


@mutant("wedged", "kept_waiting")
def reserve_is_kept_for_nobody(patch: Patch) -> None:
    """Pages are reserved for the outputs of others where there are no others: the big one waits for ever."""
    patch.setattr(
        PrefillAdder, "_reserve_pages", lambda self, newcomer, leaving=(): self._memory.allocator.num_pages // 2 + 1
    )


@mutant("preempted_for_ever")
def decodes_give_way_every_time(patch: Patch) -> None:
    """Retracted before its first token arrives, admitted again, retracted again."""

    def restless(old: Any, self: Planner, *only: Any) -> Ints:
        for req in self._running.members():
            if self._running.planned[req.row] >= self._running.prefill_end[req.row]:
                self._lifecycle.retract(req)
        rows: Ints = old(self, *only)
        return rows

    put(patch, Planner, "_secure_decode", restless)


@mutant("abandon")
def abandoned_requests_are_forgotten(patch: Patch) -> None:
    """An engine that dies ends only those who run."""
    patch.setattr(Scheduler, "abandon", lambda self: self.running.members())
