"""Mutants of speculation: what a plan allows for, what a step verifies, and what becomes of its result.

Not on the list: drafts that a new owner finds in its row. Each row samples before it decodes, and whatever samples
writes drafts or says that there are none, so they are gone before they are read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from core.batch.result import Accepted, StepResult
from core.batch.schedule_batch import ScheduleBatch
from core.batch.spec_plan import SpecPlan, TextSeed
from core.executor import speculator
from core.executor.launched_step import LaunchedStep
from core.executor.sampling_step import SamplingStep
from core.executor.speculator import Speculator
from core.sampling.places import Places
from core.scheduler import planner
from core.scheduler.planner import Decodes, Planner
from core.scheduler.result_processor import NewTokens, ResultProcessor
from core.scheduler.running import RunningSet
from core.speculation.drafter import Drafts, Ran
from core.speculation.trial import Trial, Verdict
from core.types.arrays import Ints
from core.types.request import Req
from tests.proofs.sim.mutants import Patch, mutant, put

# Bounds.


@mutant("bounds", "kv_length", drafts=True)
def the_least_counts_drafts(patch: Patch) -> None:
    """Every draft is believed to be right."""

    def plan(self: RunningSet, rows: Ints, counts: Ints) -> None:
        self.planned[rows] += counts
        self.planned_lower[rows] += counts

    patch.setattr(RunningSet, "plan_decodes", plan)


@mutant("bounds", drafts=True)
def the_most_counts_no_drafts(patch: Patch) -> None:
    """Every draft is believed to be wrong."""
    put(patch, RunningSet, "plan_decodes", lambda old, self, rows, counts: old(self, rows, np.ones_like(counts)))


@mutant("bounds", "left_out", drafts=True)
def results_settle_nothing(patch: Patch) -> None:
    """A row stays where its drafts could have brought it."""
    patch.setattr(RunningSet, "settle", lambda self, step, rows, before, most: None)


@mutant("bounds", drafts=True)
def results_settle_too_much(patch: Patch) -> None:
    """What the row got is given up too."""
    put(
        patch, RunningSet, "settle", lambda old, self, step, rows, before, most: old(self, step, rows, before, most + 1)
    )


@mutant("beyond_end", drafts=True)
def rows_decode_that_may_be_over(patch: Patch) -> None:
    """The least that a row may have says whether it goes on, so one that got all its tokens does."""

    def decoding(self: RunningSet) -> Ints:
        rows = self.order
        return rows[(self.planned[rows] >= self.prefill_end[rows]) & (self.planned_lower[rows] < self.limit[rows])]

    patch.setattr(RunningSet, "decoding", decoding)


# Plans.


@mutant("unpaged", drafts=True)
def pages_for_drafts_are_not_taken(patch: Patch) -> None:
    """One token of each row has its page, and drafts may have none."""
    put(patch, Planner, "_cover", lambda old, self, rows, drafts: old(self, rows, np.zeros_like(drafts)))


@mutant("draft_plan", drafts=True)
def drafts_beside_prompts(patch: Patch) -> None:
    """A long step is made longer."""
    patch.setattr(Decodes, "plain", lambda self: self)


@mutant("draft_plan", drafts=True)
def drafts_have_no_budget(patch: Patch) -> None:
    """A step holds what the depth says, however many rows there are."""

    def lavish(old: Any, self: Planner, *args: Any) -> Ints:
        config, self._config = self._config, replace(self._config, chunked_prefill_size=1 << 20)
        drafts: Ints = old(self, *args)
        self._config = config
        return drafts

    put(patch, Planner, "_drafts", lavish)


@mutant("draft_plan", drafts=True)
def drafts_cost_a_place(patch: Patch) -> None:
    """A request gives way where one token of each row would fit."""

    def cover(old: Any, self: Planner, *args: Any) -> bool:
        covered: bool = old(self, *args)
        if not covered and len(self._running) > 1:
            self._give_way()
        return covered

    put(patch, Planner, "_cover", cover)


@mutant("draft_plan", drafts=True)
def the_last_output_is_fed_back(patch: Patch) -> None:
    """Rows are said to end one token late, so a draft is verified that no output needs."""

    def late(old: Any, self: Planner, *args: Any) -> SpecPlan:
        plan: SpecPlan = old(self, *args)
        return replace(plan, limits=plan.limits + 1)

    put(patch, Planner, "_spec_plan", late)


@mutant("draft_plan", drafts=True)
def the_drafter_hears_of_prompts_only(patch: Patch) -> None:
    """Behind a retraction the text of a row begins anew."""
    patch.setattr(planner, "TextSeed", lambda ids, **rest: TextSeed(ids=ids[:1], **rest))


@mutant("draft_plan", drafts=True)
def tenants_share_drafts(patch: Patch) -> None:
    """What one says is guessed from what another said."""
    patch.setattr(planner, "TextSeed", lambda scope, **rest: TextSeed(scope="", **rest))


# Steps.


@mutant("out_cache_loc", "crash:RuntimeError", drafts=True, real=True)
def a_row_tries_more_than_its_plan(patch: Patch) -> None:
    """The most that a row may try is taken for the most that it may compute."""

    def of(newest: Ints, lens: Ints, drafts: Drafts, room: Ints, vocab_size: int) -> Trial:
        return build(newest, lens, drafts, room + 1, vocab_size)

    build = Trial.of
    patch.setattr(Trial, "of", staticmethod(of))


@mutant("verdict", drafts=True, real=True)
def every_draft_is_believed(patch: Patch) -> None:
    """A draft counts whatever was sampled before it."""

    def judged(self: Trial, sampled: Ints, most: Ints | None = None) -> Verdict:
        return Verdict.of(self, self.starts + self.counts - 1)

    patch.setattr(Trial, "judged", judged)


@mutant("verdict", drafts=True, real=True)
def wrong_drafts_are_not_told(patch: Patch) -> None:
    """Only drafts that were right are said to have been verified."""

    def result(old: Any, self: LaunchedStep) -> StepResult:
        found: StepResult = old(self)
        accepted = found.accepted
        if accepted is None:
            return found
        return replace(found, accepted=Accepted(accepted.counts, accepted.counts - 1, accepted.planned))

    put(patch, LaunchedStep, "result", result)


@mutant("drafter_told", drafts=True, real=True)
def the_drafter_is_a_token_behind(patch: Patch) -> None:
    """It is told where rows stood without their newest step."""
    patch.setattr(speculator, "Ran", lambda rows, lens, *others: Ran(rows, lens - 1, *others))


@mutant("drafter_told", drafts=True, real=True)
def new_owners_hear_of_old_tokens(patch: Patch) -> None:
    """The drafter seats them before it has heard of the steps before."""

    def begin(self: Speculator, batch: ScheduleBatch) -> None:
        self._drafter.begin(batch)

    patch.setattr(Speculator, "begin", begin)


@mutant("drafter_told", drafts=True, real=True)
def the_drafter_drafts_before_it_heard(patch: Patch) -> None:
    """Steps behind which nothing was drafted are told of too late."""
    drafted = Speculator.drafted

    def too_early(self: Speculator, *args: Any) -> dict[str, torch.Tensor]:
        catch_up, self._catch_up = self._catch_up, lambda: None  # type: ignore[method-assign]
        found = drafted(self, *args)
        self._catch_up = catch_up  # type: ignore[method-assign]
        return found

    patch.setattr(Speculator, "drafted", too_early)


@mutant("tokens", drafts=True)
def numbers_of_the_first_place(patch: Patch) -> None:
    """Law 13: behind a draft the random number of the row's first place is used again."""

    def of(old: Any, batch: Any, lens: torch.Tensor, staging: Any) -> Places:
        first = replace(batch, uniforms=np.repeat(batch.uniforms[:, :1], batch.uniforms.shape[1], axis=1))
        places: Places = old(first, lens, staging)
        return places

    put(patch, Places, "of", of)


@mutant("tokens", drafts=True, real=True)
def penalties_do_not_count_drafts(patch: Patch) -> None:
    """The tokens before a place are those before the step."""
    patch.setattr(SamplingStep, "_try", lambda self, batch, trial: None)


# Results.


@mutant("tokens", drafts=True)
def what_stands_behind_a_stop_is_told(patch: Patch) -> None:
    """A request that ended goes on talking."""
    put(patch, ResultProcessor, "_cut", lambda old, self, new: (new, old(self, new)[1]))


@mutant("tokens", drafts=True)
def tokens_of_a_step_change_places(patch: Patch) -> None:
    """Those of one row come in the wrong order."""

    def turned(old: Any, self: ResultProcessor, *args: Any) -> NewTokens:
        new: NewTokens = old(self, *args)
        order = np.lexsort((-new.known, new.rows))
        back = np.lexsort((new.known, new.rows))
        tokens = new.tokens.copy()
        tokens[back] = new.tokens[order]
        return replace(new, tokens=tokens)

    put(patch, ResultProcessor, "_new_tokens", turned)


@mutant("logprobs", drafts=True)
def logprobs_of_the_newest_token(patch: Patch) -> None:
    """All tokens of a row get those of its last one."""

    def last(old: Any, self: ResultProcessor, *args: Any) -> NewTokens:
        new: NewTokens = old(self, *args)
        newest = dict(zip(new.rows.tolist(), new.places.tolist(), strict=True))
        return replace(new, places=np.array([newest[row] for row in new.rows.tolist()], np.int64))

    put(patch, ResultProcessor, "_new_tokens", last)


@mutant("kv_read", "invariant:page_padding_reserved", "invariant:page_conservation", drafts=True)
def drafts_are_offered_to_others(patch: Patch) -> None:
    """At its end a request gives the cache what it may have computed, and not what it knows."""

    def boastful(old: Any, self: RunningSet, req: Req) -> Ints:
        ids = self.ids(req.row, min(int(self.planned[req.row]), self.tokens.shape[1]))
        old(self, req)
        return ids

    put(patch, RunningSet, "remove", boastful)


@mutant("stats", drafts=True)
def drafts_count_as_prompts(patch: Patch) -> None:
    """A decode row is taken to be one token, and all else to be filled in."""
    tally = __import__("core.scheduler.tally", fromlist=["Tally"]).Tally

    def submitted(old: Any, self: Any, batch: ScheduleBatch) -> int:
        tokens: int = old(self, batch)
        drafts = int((batch.extend_lens[batch.num_extend :] - 1).sum())
        self._prefilled += drafts
        self._decoded -= drafts
        return tokens

    put(patch, tally, "submitted", submitted)


@mutant("stats", drafts=True)
def gaps_count_what_was_dropped(patch: Patch) -> None:
    """Tokens before a stop share the time of their step with those behind it."""

    def of(old: Any, self: NewTokens, which: Any) -> NewTokens:
        new: NewTokens = old(self, which)
        return new if self.counts is None else replace(new, counts=self.counts[which])

    put(patch, NewTokens, "of", of)
