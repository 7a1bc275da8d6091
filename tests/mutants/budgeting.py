"""Mutants of what one caller's options may cost the others: stop strings, compiles and masks of constraints."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

STOP = "core/text/stop.py"
WORK = "core/executor/grammar_work.py"
COMPILER = "core/engine/grammar/compiler.py"
COMPILES = "tests/engine/test_grammar_compiler.py::"
BUDGET = "tests/constraints/test_budget.py::"
STOP_MEMORY = "tests/text/test_stop_memory.py::"

BUDGETING: tuple[Mutant, ...] = (
    Mutant(
        "stops-kept-for-ever",
        "the memory of a request's stop strings goes with its last output",
        STOP,
        "_shared: WeakValueDictionary[tuple[str, ...], _Automaton] = WeakValueDictionary()",
        "_shared: dict[tuple[str, ...], _Automaton] = {}",
        STOP_MEMORY + "test_equal_stop_strings_share_and_the_last_matcher_frees_them",
    ),
    Mutant(
        "stops-linked-at-once",
        "a request's stop strings are not worked through on the loop when it comes",
        STOP,
        "        self._linked = 1\n",
        "        self._linked = 1\n        self._starts = {}\n        for _ in range(max(map(len, stops)) - 1):\n"
        "            self._link()\n",
        STOP_MEMORY + "test_a_request_with_the_largest_comes_in_for_few_calls",
    ),
    Mutant(
        "stops-not-shared",
        "outputs with equal stop strings share what is made of them",
        STOP,
        "    found = _shared.get(stops)\n",
        "    found = None\n",
        STOP_MEMORY + "test_equal_stop_strings_share_and_the_last_matcher_frees_them",
    ),
    Mutant(
        "tokens-not-charged",
        "what a token of a constrained output costs is charged to it, as its mask is",
        WORK,
        "            follower.accepting += time.thread_time() - began\n            if",
        "            if",
        BUDGET + "test_one_row_ends_when_its_budget_is_used_up[tokens]",
    ),
    Mutant(
        "mask-work-of-a-step-unbounded",
        "all constrained rows together have a bound on what they cost a step",
        WORK,
        "        if follower.budget.is_dear and self._shared.left < 0:",
        "        if follower.budget.is_dear and not self._shared:",
        BUDGET + "test_the_work_of_one_step_is_bounded_however_many_rows_want_it",
    ),
    Mutant(
        "dearest-first",
        "when there is no time for all constrained rows, those that took most make room",
        WORK,
        "alone.sort(key=lambda place: -followers[place].budget.left)",
        "alone.sort(key=lambda place: followers[place].budget.left)",
        BUDGET + "test_those_who_took_least_are_served_first",
    ),
    Mutant(
        "known-outputs-for-nothing",
        "a retracted request pays for the tokens that its matcher takes again",
        WORK,
        "            self._charge(follower, time.thread_time() - began)\n",
        "",
        BUDGET + "test_outputs_that_are_known_already_are_charged_too",
    ),
    Mutant(
        "slow-call-then-the-next",
        "rows behind a slow call are asked one by one, by their budgets",
        WORK,
        "                alone += together[start + TOGETHER :]\n                break\n",
        "",
        BUDGET + "test_a_slow_call_has_the_rest_asked_one_by_one",
    ),
    Mutant(
        "complex-constraint-is-our-fault",
        "a constraint that costs too much is its caller's error",
        "core/scheduler/result_processor.py",
        "    if status is GrammarStatus.TOO_COMPLEX:",
        "    if status is GrammarStatus.OPEN:",
        BUDGET + "test_what_costs_too_much_alone_is_its_callers_error",
    ),
    Mutant(
        "rows-of-the-library-unbounded",
        "no single call for a mask is long enough to be noticed by the neighbours",
        "core/sampling/grammar/llguidance_backend.py",
        "    max_items_in_row=300,\n",
        "",
        BUDGET + "test_no_single_call_is_long[ambiguous]",
    ),
    Mutant(
        "cancelled-compiles-stay",
        "a constraint that no call waits for leaves the queue",
        COMPILER,
        "            self._leave(job, tenant)\n",
        "            pass\n",
        COMPILES + "test_cancelled_calls_leave_nothing_in_the_queue",
    ),
    Mutant(
        "orphaned-compile-goes-on",
        "a compile ends with the last call that waits for it",
        COMPILER,
        "            job.task.cancel()\n",
        "            pass\n",
        COMPILES + "test_what_nothing_waits_for_any_more_is_stopped",
        dies_by="timeout",
    ),
    Mutant(
        "compiles-first-come-first-served",
        "tenants take turns at compiling",
        "core/engine/grammar/compile_queue.py",
        "        self._lines.move_to_end(tenant)\n",
        "",
        COMPILES + "test_tenants_take_turns",
    ),
    Mutant(
        "full-queue-for-one-tenant",
        "a tenant that fills the queue of compiles makes room for the others",
        "core/engine/grammar/compile_queue.py",
        "        if len(longest) < len(self._lines.get(tenant, ())) + 2:",
        "        if longest:",
        COMPILES + "test_a_full_queue_makes_room_for_the_tenant_with_less",
    ),
    Mutant(
        "grammars-of-anybody",
        "grammars are for callers that the operator names",
        "service/access/permissions.py",
        "        if kind is not ConstraintKind.EBNF or ANY_NAME in self._writers:",
        "        if kind is not ConstraintKind.EBNF or not self._writers:",
        "tests/security/test_grammar_callers.py::test_without_tokens",
    ),
    Mutant(
        "kept-grammars-of-anybody",
        "a resumable request asks for no more than another",
        "service/calls/open_calls.py",
        '        """\n        self._refuse_grammar(asked)\n',
        '        """\n',
        "tests/security/test_grammar_callers.py::test_a_resumable_request_asks_for_no_more_than_another",
    ),
    Mutant(
        "compiles-of-no-tenant",
        "a call's constraint stands in the line of its caller",
        "core/engine/async_engine.py",
        "self._parts.grammars.grammar(request.constraint, request.tenant)",
        'self._parts.grammars.grammar(request.constraint, "")',
        "tests/security/test_grammar_callers.py::test_compiles_stand_in_the_line_of_their_caller",
    ),
    Mutant(
        "compile-here-without-end",
        "a compile in the server's own process is given up after its seconds of work",
        "core/engine/grammar/library.py",
        "            return await within(asyncio.shield(thread.ended), thread.cpu_seconds, self._seconds)\n",
        "            return await asyncio.shield(thread.ended)\n",
        COMPILES + "test_a_compile_in_this_process_has_an_end_too",
        dies_by="timeout",
    ),
    Mutant(
        "work-of-a-trial-not-seen",
        "a first compile is ended after its seconds of work",
        "core/engine/grammar/trial.py",
        "return (int(fields[11]) + int(fields[12])) / os",
        "return 0 / os",
        "tests/engine/test_grammar_trial.py::test_work_is_still_bounded",
    ),
    Mutant(
        "a-row-that-spends-nothing",
        "an output ends when it has used up its budget",
        "core/sampling/grammar/budget.py",
        "min(self._burst, self.left + self._free - seconds)",
        "min(self._burst, self.left + self._free)",
        "tests/constraints/test_budget.py::test_one_row_ends_when_its_budget_is_used_up",
    ),
)
