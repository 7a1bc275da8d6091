"""Mutants of the scheduler."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

SCHEDULER = "tests/scheduler/test_scheduler.py::"

SCHEDULING: tuple[Mutant, ...] = (
    Mutant(
        "recompute-forgets-outputs",
        "a retracted request keeps what it produced",
        "core/types/request.py",
        "np.concatenate([self.prompt, np.asarray(self.outputs, np.int64)]) if self.outputs else self.prompt",
        "self.prompt",
        SCHEDULER + "test_tiny_pool_forces_retraction_and_loses_nothing",
    ),
    Mutant(
        "retract-the-first-in-line",
        "the request first in line is never retracted, so somebody always ends",
        "core/scheduler/policy.py",
        "return max(running, key=policy.key)",
        "return min(running, key=policy.key)",
        "tests/scheduler/test_policy.py::test_the_first_in_line_never_gives_way",
    ),
    Mutant(
        "terminal-twice",
        "law 11: a request ends exactly once",
        "core/scheduler/lifecycle.py",
        "        if req.state is RequestState.FINISHED:\n            return\n",
        "",
        SCHEDULER + "test_abort_twice_and_after_the_end_is_harmless",
    ),
    Mutant(
        "cancel-keeps-the-row",
        "a cancelled request gives its row back",
        "core/scheduler/lifecycle.py",
        "if req.state is RequestState.RUNNING:",
        'if req.state is RequestState.RUNNING and (ended.reason is None or ended.reason.value != "cancelled"):',
        SCHEDULER + "test_abort_in_every_phase_frees_at_once",
    ),
    Mutant(
        "deadline-ignored",
        "a passed deadline ends the request wherever it is",
        "core/scheduler/intake.py",
        "if req.deadline is not None and req.deadline <= now:",
        "if req.deadline is not None and req.deadline <= now and req.row == 0:",
        SCHEDULER + "test_deadline_and_queue_timeout",
    ),
    Mutant(
        "queue-timeout-while-running",
        "queue_timeout bounds the queue, not the generation",
        "core/scheduler/intake.py",
        "elif req.scheduled_at is None:",
        "else:",
        SCHEDULER + "test_queue_timeout_does_not_end_a_request_that_was_scheduled",
    ),
    Mutant(
        "one-step-too-many",
        "no step is planned past max_tokens",
        "core/scheduler/running.py",
        "(planned < self.limit[rows])]",
        "(planned <= self.limit[rows])]",
        SCHEDULER + "test_no_step_is_planned_past_the_last_token",
    ),
    Mutant(
        "middle-chunks-sample",
        "only the chunk that ends a prompt samples",
        "core/batch/build.py",
        "finals = np.fromiter((s.final for s in plan.segments), np.bool_, num_extend)",
        "finals = np.ones(num_extend, np.bool_)",
        SCHEDULER + "test_chunks_share_a_step_with_decodes",
    ),
    Mutant(
        "prefix-offered-late",
        "requests that arrive together share their prefix",
        "core/scheduler/prefill_adder.py",
        "        self._offer(row, stop, final=stop == end)\n",
        "",
        SCHEDULER + "test_requests_that_arrive_together_share_a_prefix_in_one_step",
    ),
    Mutant(
        "non-finite-row-goes-on",
        "a row without finite logits fails, alone",
        "core/scheduler/result_processor.py",
        "if result.non_finite.any():",
        "if False:",
        SCHEDULER + "test_non_finite_row_fails_alone",
    ),
    Mutant(
        "failed-step-swallowed",
        "a failed step ends the engine",
        "core/scheduler/scheduler.py",
        "            raise result.error\n",
        "            return None\n",
        SCHEDULER + "test_failed_step_is_raised_to_the_shell",
    ),
    Mutant(
        "hot-prefixes-starve-the-rest",
        "lpm passes a request over only so often",
        "core/scheduler/waiting_queue.py",
        "older.passed_over += 1",
        "older.passed_over += 0",
        SCHEDULER + "test_longest_prefix_first_but_nobody_starves",
    ),
    Mutant(
        "eos-always-ignored",
        "EOS ends an output unless ignore_eos",
        "core/scheduler/result_processor.py",
        "(self._is_eos[token] and not req.params.ignore_eos)",
        "False",
        SCHEDULER + "test_eos_ends_unless_ignored",
    ),
)
