"""Mutants of figures and shares: what the device waited, what tokens cost, what is kept free, evicted, ranked."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

FIGURED = "tests/scheduler/test_figures.py::"
ADMITTED = "tests/scheduler/test_admission.py::"
WAITED = FIGURED + "test_a_device_that_waits_for_the_host_is_idle_for_exactly_so_long"
EVICTED = "tests/memory/test_eviction.py::"

FIGURES: tuple[Mutant, ...] = (
    Mutant(
        "idle-time-never-counted",
        "a step behind another begins after no pause",
        "core/scheduler/scheduler.py",
        "            self._device_idle = False\n",
        "",
        WAITED,
    ),
    Mutant(
        "pauses-are-idle-time",
        "time in which there was nothing to do is not idle time",
        "core/executor/launched_step.py",
        "self.previous_end is not None and not batch.after_idle",
        "self.previous_end is not None",
        FIGURED + "test_time_without_requests_is_not_idle_time",
    ),
    Mutant(
        "no-wait-behind-a-step-in-flight",
        "a pause needs an empty device",
        "core/scheduler/scheduler.py",
        "self._device_idle or self.executor.in_flight == 0",
        "True",
        FIGURED + "test_only_a_step_behind_which_nothing_was_left_to_do_begins_after_a_pause",
    ),
    Mutant(
        "idle-ratio-of-all-times",
        "the idle ratio is that of the last steps",
        "core/scheduler/tally.py",
        "self._idle * IDLE_WINDOW",
        "self._idle",
        WAITED,
    ),
    Mutant(
        "gaps-since-the-beginning",
        "a gap is the time since the token before",
        "core/scheduler/result_processor.py",
        "        running.last_token_at[rows] = now\n",
        "",
        FIGURED + "test_every_gap_between_tokens_is_observed_once_and_exactly",
    ),
    Mutant(
        "gaps-of-other-rows",
        "a gap is the time since the row's own token before",
        "core/scheduler/result_processor.py",
        "running.last_token_at[rows] = now",
        "running.last_token_at[:] = now",
        FIGURED + "test_every_gap_between_tokens_is_observed_once_and_exactly",
    ),
    Mutant(
        "lpm-without-the-salt",
        "a prefix counts only for the tenant that it is kept for",
        "core/scheduler/prefill_adder.py",
        "len(ids) - 1, req.salt)",
        'len(ids) - 1, "")',
        ADMITTED + "test_a_prefix_counts_only_under_the_salt_it_is_kept_under",
    ),
    Mutant(
        "retraction-reserves-nothing",
        "a retraction keeps pages for those who run",
        "core/scheduler/prefill_adder.py",
        "        self._reserve_share = max(RESERVE_AFTER_RETRACTION, self._reserve_share)\n",
        "        return\n",
        ADMITTED + "test_a_retraction_keeps_pages_for_those_who_run",
    ),
    Mutant(
        "adder-not-told-of-retraction",
        "a retraction keeps pages for those who run",
        "core/scheduler/planner.py",
        "            self._adder.retracted()\n",
        "",
        ADMITTED + "test_a_retraction_keeps_pages_for_those_who_run",
    ),
    Mutant(
        "reserve-never-falls",
        "quiet steps give back what a retraction keeps free",
        "core/scheduler/prefill_adder.py",
        "self._reserve_share * RESERVE_DECAY)",
        "self._reserve_share)",
        ADMITTED + "test_what_a_retraction_keeps_free_is_given_back_by_quiet_steps",
    ),
    Mutant(
        "newcomer-reserves-nothing",
        "what a newcomer may put out counts before it is let in",
        "core/scheduler/prefill_adder.py",
        " + newcomer.max_new_tokens - len(newcomer.outputs)",
        "",
        ADMITTED + "test_what_a_newcomer_may_put_out_counts_before_it_is_let_in",
    ),
    Mutant(
        "cached-tokens-recomputed",
        "what is found in the cache is not computed again",
        "core/scheduler/lifecycle.py",
        "len(ids) - seat.cached_tokens + req.encoder_len",
        "len(ids) + req.encoder_len",
        ADMITTED + "test_recomputed_tokens_are_those_that_were_computed_again",
    ),
    Mutant(
        "cache-cleared-for-a-page",
        "the cache gives up what is short, and no more",
        "core/memory/request_memory.py",
        "self.cache.evict(short)",
        "self.cache.clear()",
        EVICTED + "test_admission_evicts_only_the_pages_it_is_short_of",
    ),
    Mutant(
        "evicts-beside-free-pages",
        "free pages are taken before cached ones",
        "core/memory/request_memory.py",
        "self.cache.evict(short)",
        "self.cache.evict(count)",
        EVICTED + "test_decode_evicts_only_the_pages_it_is_short_of",
    ),
)
