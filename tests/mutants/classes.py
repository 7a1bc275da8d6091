"""Mutants of classes of requests: who gives way to whom, and whose turn a step is."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

PREEMPTION = "tests/scheduler/test_preemption.py::"
TURNS = "tests/scheduler/test_turns.py::"
ADDER = "core/scheduler/prefill_adder.py"
RULE = "core/scheduler/preemption.py"

CLASSES: tuple[Mutant, ...] = (
    Mutant(
        "no-preemption-by-class",
        "a waiting request of a higher class takes the place of a running one",
        RULE,
        "self._left = MOST_PER_PLAN",
        "self._left = 0",
        PREEMPTION + "test_a_request_of_a_higher_class_waits_a_handful_of_steps_for_a_row",
    ),
    Mutant(
        "preemption-below-the-threshold",
        "only a difference that reaches the threshold justifies a preemption",
        RULE,
        "newcomer.priority >= self._threshold",
        "newcomer.priority >= 0",
        PREEMPTION + "test_the_difference_must_reach_the_threshold",
    ),
    Mutant(
        "preemption-without-hysteresis",
        "what gave way advances before it gives way again",
        RULE,
        "        return rows[running.has_advanced(rows, MIN_TOKENS)]\n",
        "        return rows\n",
        PREEMPTION + "test_who_gave_way_must_advance_before_it_does_so_again",
    ),
    Mutant(
        "preemption-of-what-ends-anyway",
        "what is planned to its end keeps its row until then",
        RULE,
        "running.planned[rows] < np.maximum(running.prefill_end[rows], running.limit[rows])",
        "running.planned[rows] >= 0",
        PREEMPTION + "test_what_is_planned_to_its_end_is_let_be",
    ),
    Mutant(
        "asking-keeps-a-lock",
        "asking whether a request would fit holds none of the cached pages that it would read",
        "core/memory/request_memory.py",
        "        self._free(self.cache.unlock(match.node))\n        return len(match.pages)",
        "        return len(match.pages)",
        "tests/memory/test_request_memory.py::test_asking_what_would_be_admitted_holds_nothing",
    ),
    Mutant(
        "preemption-in-vain",
        "no request gives way where that would not help",
        "core/memory/request_memory.py",
        "return len(match.pages) * self.page_size if fits else None",
        "return len(match.pages) * self.page_size",
        PREEMPTION + "test_nobody_gives_way_where_that_would_not_help",
    ),
    Mutant(
        "preemption-of-the-first-in-line",
        "the last in line gives way first",
        RULE,
        "heapq.nlargest(",
        "heapq.nsmallest(",
        PREEMPTION + "test_a_request_of_a_higher_class_waits_a_handful_of_steps_for_a_row",
    ),
    Mutant(
        "preemption-raises-the-reserve",
        "a preemption by class is no page shortage",
        ADDER,
        "self.vacated += rows.tolist()",
        "self.vacated += rows.tolist(); self.retracted()",
        PREEMPTION + "test_the_reserve_is_not_raised",
    ),
    Mutant(
        "too-many-give-way",
        "at most a few give way in one plan",
        RULE,
        "        self._left -= len(found.losers)\n",
        "",
        PREEMPTION + "test_at_most_a_few_give_way_in_one_plan",
    ),
    Mutant(
        "cross-pages-not-counted",
        "the cross pages of a request that would give way count as free",
        "core/memory/cross/cross_pages.py",
        "coming = sum(len(self._pages[row]) for row in leaving.tolist())",
        "coming = 0",
        PREEMPTION + "test_places_in_other_pools_are_taken_as_well",
    ),
    Mutant(
        "state-slots-not-counted",
        "the state slot of a request that would give way counts as free",
        "core/memory/recurrent/state_slots.py",
        "return self.available + len(leaving) > 0",
        "return self.available > 0",
        PREEMPTION + "test_places_in_other_pools_are_taken_as_well",
    ),
    Mutant(
        "no-overtaking",
        "a long prompt of a lower class does not hold up a higher one",
        ADDER,
        "if req is None or (started and req.priority >= self._running.priorities[started[0]]):",
        "if req is None or started:",
        PREEMPTION + "test_a_long_prompt_of_a_lower_class_is_overtaken",
    ),
    Mutant(
        "writes-noted-for-other-rows-forgotten",
        "a row that changes hands takes no other row's table entries along",
        "core/memory/pending_writes.py",
        "noted[0] != row",
        "noted[0] == row",
        "tests/memory/test_request_memory.py::test_a_row_that_changes_hands_within_a_plan_has_one_owner_s_writes",
    ),
    Mutant(
        "writes-of-the-former-owner",
        "one step never writes a table entry of a row twice",
        "core/memory/request_memory.py",
        "        self._writes.forget(row)\n",
        "",
        "tests/memory/test_request_memory.py::test_a_row_that_changes_hands_within_a_plan_has_one_owner_s_writes",
    ),
    Mutant(
        "decodes-starve-without-mixed-steps",
        "rows that could decode wait for a bounded number of prefill steps",
        "core/scheduler/turns.py",
        "return self._prefills >= PREFILLS_PER_DECODE",
        "return False",
        TURNS + "test_both_sides_get_their_share_under_endless_arrivals",
    ),
    Mutant(
        "prefills-starve-without-mixed-steps",
        "a decode step that was owed is one step",
        "core/scheduler/turns.py",
        "self._prefills + 1 if prefill and ready else 0",
        "self._prefills + 1 if prefill and ready else self._prefills",
        TURNS + "test_both_sides_get_their_share_under_endless_arrivals",
    ),
)
